"""Text that figures and tables show: short names, sizes in bytes, names of accuracies.

This module does without matplotlib, so tables can use it where matplotlib is not installed.
"""

from __future__ import annotations

import re

OWN_SUFFIX = "_own"
MAX_LABEL_LETTERS = 40
#: The folders of an absolute path, where one begins: after a quote, a colon, a bracket or a space.
_FOLDERS = re.compile(r"(?:(?<=[\"':=(,\s])|^)/(?:[^/\"'\s]+/)+")


def shorten(name: str, max_letters: int = MAX_LABEL_LETTERS) -> str:
    """Return a name from a file as one short line of printable letters.

    A leading space is put before an underscore, because matplotlib leaves labels that begin with
    an underscore out of legends.
    """
    printable = [letter if letter.isprintable() else " " for letter in name]
    line = " ".join("".join(printable).split())
    if len(line) > max_letters:
        line = line[: max_letters - 1] + "…"
    if line.startswith("_"):
        return f" {line}"
    return line


def format_bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit.

    >>> format_bytes(999), format_bytes(19_336), format_bytes(2.5e9)
    ('999 B', '19.3 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def is_own_accuracy(name: str) -> bool:
    """Whether an accuracy chooses among the client's own classes only."""
    return name.endswith(OWN_SUFFIX)


def score_name(accuracy: str) -> str:
    """Return the score by which an accuracy predicts: `head` for `head` and `head_own`."""
    return accuracy.removesuffix(OWN_SUFFIX)


def describe_accuracy(name: str) -> str:
    """Return the name of an accuracy in words.

    >>> describe_accuracy("head"), describe_accuracy("prototype_own")
    ('head', 'prototype, own classes')
    """
    if is_own_accuracy(name):
        return f"{score_name(name)}, own classes"
    return name


def hide_folders(text: str) -> str:
    """Return text in which the folders of absolute paths are left out.

    They say who made a report, and mean nothing on another machine.

    >>> hide_folders('name = "csv:/home/ada/data/iris.csv"')
    'name = "csv:…/iris.csv"'
    """
    return _FOLDERS.sub("…/", text)
