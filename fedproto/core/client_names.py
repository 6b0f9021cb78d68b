"""Names of clients, such as a hospital's: where they come from outside, and how they are found.

A client without a name of its own is called by its number. Names are text from anybody: they are
normalised like those of classes, and whoever shows them escapes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

from fedproto.core.class_names import find_flaw, is_plain, list_names, normalise_name
from fedproto.errors import ConfigError, DataError, find_near, shown

#: Characters of a name that a person or another machine chooses.
MAX_NAME_CHARACTERS = 100


def client_name(raw: str, where: str) -> str:
    """Return the normalised name of a client.

    Raises DataError if the name is unusable; `where` begins its sentence.

    >>> client_name(" Ko\u0308ln ", "the data has a client")
    'Köln'
    """
    name = normalise_name(raw)
    flaw = find_flaw(name, "client")
    if flaw is not None:
        raise DataError(f"{where} {shown(raw, 60)}, which {flaw}")
    return name


def chosen_name(raw: str, where: str) -> str:
    """Return the normalised name that somebody chose for a client, which must not be long."""
    name = client_name(raw, where)
    if len(name) > MAX_NAME_CHARACTERS:
        raise DataError(
            f"{where} {shown(raw, 60)}, which has {len(name)} characters: "
            f"at most {MAX_NAME_CHARACTERS} are accepted"
        )
    return name


def is_chosen_name(name: object) -> TypeGuard[str]:
    """Return whether a value from another machine is a normalised name that is not too long."""
    return isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS and is_plain(name)


def refuse_equal_names(names: Sequence[str]) -> None:
    """Raise DataError if two clients have one name."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(names):
        first = numbers.setdefault(name, number)
        if first != number:
            raise DataError(
                f"clients {first} and {number} are both called {shown(name, 60)}: "
                "every client needs a name of its own"
            )


def find_client(names: Sequence[str], text: str | int, where: str = "") -> int:
    """Return the number of the client that a text names; a name wins over a number.

    Where clients are called by other numbers than their own, as hospitals 17 and 23 are, a text is
    a name and nothing else. A whole number is always the number of a client. Raises ConfigError
    with the names there are; `where` says in its sentence whose they are, as in ` in runs/a`.

    >>> find_client(("Ulm", "Köln"), "Köln"), find_client(("Ulm", "Köln"), "0")
    (1, 0)
    """
    if isinstance(text, str):
        name = normalise_name(text)
        if name in names:
            return list(names).index(name)
        number = -1
        if is_number(name) and not have_other_numbers(enumerate(names)):
            number = int(name)
    else:
        number = text
    if 0 <= number < len(names):
        return number
    raise ConfigError(f"there is no client {_show(text)}{where}: {_describe(names, str(text))}")


def are_numbers(names: Sequence[str]) -> bool:
    """Return whether every client is called by its number, so that no name need be shown."""
    return all(name == str(number) for number, name in enumerate(names))


def is_number(name: str) -> bool:
    """Return whether a text may be the number of a client."""
    return name.isascii() and name.isdecimal() and len(name) < 19


def have_other_numbers(names: Iterable[tuple[int, str]]) -> bool:
    """Return whether a client, given by number and name, is called by another number."""
    return any(is_number(name) and name != str(number) for number, name in names)


def _show(text: str | int) -> str:
    is_number = isinstance(text, int) or text.isdecimal()
    return str(text)[:60] if is_number else shown(text, 60)


def _describe(names: Sequence[str], wanted: str) -> str:
    """Return which clients there are, with the one that may have been meant first."""
    if are_numbers(names):
        return f"there are clients 0 to {len(names) - 1}"
    near = find_near(normalise_name(wanted), names)
    hint = "" if near is None else f"did you mean {near!r}? "
    return f"{hint}there are {list_names(names)}"
