"""Classes are names: members that number theirs differently still federate, as long as they spell them alike."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def alike(names: Iterable[str]) -> list[str]:
    """A sentence for each group of names that differ only in case, spaces, hyphens, underscores or Unicode's forms.

    They stay different classes, since somebody may mean it: `a` and `A` are two of the 62 characters.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(_plain(name), []).append(name)
    return [
        f"classes {', '.join(map(repr, group))} differ only in case, spaces or hyphens, and are different classes here"
        for group in groups.values()
        if len(group) > 1
    ]


def _plain(name: str) -> str:
    return "".join(unicodedata.normalize("NFKC", name).casefold().split()).replace("_", "").replace("-", "")
