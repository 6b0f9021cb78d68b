"""Classes are names: members that number theirs differently still federate, as long as they spell them alike.

This is the one place where names are normalised. Whatever comes from outside (data, uploads, prototype
files, settings) goes through `class_name` or `merge_names`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from fedproto.errors import DataError, shown

#: Characters that turn the direction of the text around them: one name could be shown as another.
_TURNING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_CONTROL = ("Cc", "Zl", "Zp")  # Unicode's categories of control characters and of line breaks
_INVISIBLE = ("Cf", "Cn", "Co", "Zs")  # of those that join others, of none, of private ones, and of spaces
MAX_SENTENCES = 5  # about names that look alike


def normalise_name(name: str) -> str:
    """Return the name in Unicode's composed form (NFC), without white space around it."""
    return unicodedata.normalize("NFC", name).strip()


def is_plain(name: str) -> bool:
    """Return whether a name is one that `class_name` returns."""
    return name == normalise_name(name) and _find_flaw(name) is None


def class_name(raw: str, where: str) -> str:
    """Return the normalised name of a class; `where` begins the sentence that refuses an unusable one.

    >>> class_name(" cafe\u0301 ", "the data has a class")
    'café'
    """
    name = normalise_name(raw)
    flaw = _find_flaw(name)
    if flaw is not None:
        raise DataError(f"{where} {shown(raw, 60)}, which {flaw}")
    return name


def merge_names(raw: Sequence[str], where: str) -> tuple[tuple[str, ...], list[int]]:
    """Return the different normalised names in order, and the place among them of each raw name."""
    names = [class_name(each, where) for each in raw]
    different = tuple(dict.fromkeys(names))
    place = {name: number for number, name in enumerate(different)}
    return different, [place[name] for name in names]


def _find_flaw(name: str) -> str | None:
    """Return what makes a normalised name unusable in files of a name per line, tables and sentences."""
    if not name:
        return "is empty: every class needs a name"
    try:
        name.encode()
    except UnicodeEncodeError:  # half an emoji of JSON, or a stray byte of a file name
        return "holds half a character and cannot be written in UTF-8"
    for letter in name:
        if unicodedata.category(letter) in _CONTROL or letter in _TURNING:
            return "holds a line break or another control character: names are single lines of text"
    if all(unicodedata.category(letter) in _INVISIBLE for letter in name):
        return "holds nothing that can be seen"
    return None


def describe_similar_names(names: Iterable[str]) -> list[str]:
    """Return a sentence for each group of names that differ only in case, spaces, hyphens or underscores.

    They stay different classes, since somebody may mean it: `a` and `A` are two of the 62 characters.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(_plain(name), []).append(name)
    several = [group for group in groups.values() if len(group) > 1]
    sentences = []
    for group in several[:MAX_SENTENCES]:
        listed = ", ".join(map(repr, group))
        sentences.append(f"classes {listed} differ only in case, spaces or hyphens, and are different classes here")
    if len(several) > MAX_SENTENCES:
        sentences.append(f"so do {len(several) - MAX_SENTENCES} more groups of classes")
    return sentences


def _plain(name: str) -> str:
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(folded.split()).replace("_", "").replace("-", "")
