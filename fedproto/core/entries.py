"""Checks of the entries of JSON objects, which anybody may have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedproto.errors import RunFolderError, shown


class Entry(NamedTuple):
    """What a key of a JSON object must hold."""

    accepts: Callable[[Any], bool]
    description: str  # completes "must be ..."


def find_wrong_entry(content: Mapping[str, Any], entries: Mapping[str, Entry]) -> str | None:
    """Return the first key of `entries` that is missing or holds another kind of value, or None."""
    for key, entry in entries.items():
        if key not in content or not entry.accepts(content[key]):
            return key
    return None


def check_entries(content: Any, entries: Mapping[str, Entry], where: str) -> dict[str, Any]:
    """Return an object of a run folder's file, or raise a sentence that names its wrong entry."""
    if not isinstance(content, dict):
        raise RunFolderError(f"{where} is damaged: it holds {shown(content, 40)}, not an object")
    key = find_wrong_entry(content, entries)
    if key is None:
        return content
    if key not in content:
        raise RunFolderError(f"{where} is damaged: it lacks {key!r}")
    found = shown(content[key], 40)
    raise RunFolderError(
        f"{where} is damaged: {key!r} must be {entries[key].description}, not {found}"
    )
