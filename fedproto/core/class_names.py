"""Names of classes, which identify them: members that number theirs differently can still federate.

This is the one place where names are normalised. All names from outside (data, uploads, prototype
files, settings) go through `class_name` or `merge_names`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from fedproto.errors import DataError, shown

#: Characters that change the direction of the text around them: a name could look like another.
_DIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
#: Unicode's categories of control characters and line breaks.
_CONTROL = ("Cc", "Zl", "Zp")
#: Unicode's categories of format, unassigned and private characters, and of spaces.
_INVISIBLE = ("Cf", "Cn", "Co", "Zs")
#: Names that one sentence lists.
MAX_LISTED_NAMES = 20
MAX_SENTENCES = 5  # about names that look alike


def normalise_name(name: str) -> str:
    """Return the name in Unicode's composed form (NFC), without white space around it."""
    return unicodedata.normalize("NFC", name).strip()


def is_plain(name: str) -> bool:
    """Return whether a name is usable and already normalised, as `class_name` returns it."""
    return name == normalise_name(name) and find_flaw(name) is None


def are_plain_names(values: Any) -> bool:
    """Return whether a value of a file is a list of different names, each usable and normalised."""
    if not isinstance(values, list) or not values:
        return False
    are_plain = all(isinstance(value, str) and is_plain(value) for value in values)
    return are_plain and len(set(values)) == len(values)


def class_name(raw: str, where: str) -> str:
    """Return the normalised name of a class.

    Raises DataError if the name is unusable; `where` begins its sentence.

    >>> class_name(" cafe\u0301 ", "the data has a class")
    'café'
    """
    name = normalise_name(raw)
    flaw = find_flaw(name)
    if flaw is not None:
        raise DataError(f"{where} {shown(raw, 60)}, which {flaw}")
    return name


def merge_names(raw: Sequence[str], where: str) -> tuple[tuple[str, ...], list[int]]:
    """Return the distinct normalised names in order, and the position of each raw name in them."""
    names = [class_name(each, where) for each in raw]
    distinct = tuple(dict.fromkeys(names))
    position = {name: number for number, name in enumerate(distinct)}
    return distinct, [position[name] for name in names]


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in the order of the classes: short ones first, so that numbers count upwards.

    >>> sort_names({"10", "9", "b", "a"})
    ('9', 'a', 'b', '10')
    """
    return tuple(sorted(names, key=lambda name: (len(name), name)))


def list_names(names: Sequence[str], limit: int = MAX_LISTED_NAMES) -> str:
    """Return names as a list for a sentence, which is cut after `limit` of them.

    >>> list_names(["Ulm", "Köln", "Bonn", "Trier"], 2)
    'Ulm, Köln and 2 more'
    """
    listed = ", ".join(names[:limit])
    others = len(names) - limit
    return f"{listed} and {others} more" if others > 0 else listed


def find_flaw(name: str, what: str = "class") -> str | None:
    """Return why a normalised name is unusable in lists, tables and sentences, or None.

    `what` is named: a class or a client.
    """
    if not name:
        return f"is empty: every {what} needs a name"
    try:
        name.encode()
    except UnicodeEncodeError:  # half an emoji in JSON, or a stray byte in a file name
        return "holds half a character and cannot be written in UTF-8"
    for letter in name:
        if unicodedata.category(letter) in _CONTROL or letter in _DIRECTIONAL:
            return "holds a line break or another control character: names are single lines of text"
    if all(unicodedata.category(letter) in _INVISIBLE for letter in name):
        return "holds nothing that can be seen"
    return None


def describe_similar_names(names: Iterable[str]) -> list[str]:
    """Return a warning per group of names that differ only in case, spaces, hyphens, underscores.

    They stay different classes, which may be intended: `a` and `A` are two of the 62 characters.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(_fold(name), []).append(name)
    several = [group for group in groups.values() if len(group) > 1]
    sentences = []
    for group in several[:MAX_SENTENCES]:
        listed = ", ".join(map(repr, group))
        difference = "differ only in case, spaces or hyphens"
        sentences.append(f"classes {listed} {difference}, and are different classes here")
    if len(several) > MAX_SENTENCES:
        sentences.append(f"so do {len(several) - MAX_SENTENCES} more groups of classes")
    return sentences


def _fold(name: str) -> str:
    """Return a name without what similar names may differ in."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(folded.split()).replace("_", "").replace("-", "")
