"""Finds the runs and deployed federations in a folder, without leaving it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedproto.deploy.server_state import STATE_FILE
from fedproto.errors import RunFolderError
from fedproto.runs.folder import CONFIG, PARTITION
from fedproto.watch.plain_files import stamp_of

MAX_DEPTH = 4  # folders below the one that was named
MAX_FOUND = 500
MAX_FOLDERS = 20_000  # looked at; more than that is not a folder of runs
ID_DIGITS = 16


@dataclass(frozen=True)
class Place:
    """A run folder, or the state file of a deployed server."""

    id: str  # stands for the folder in addresses
    name: str  # the folder, relative to what is watched
    path: Path
    is_deployed: bool = False


def find_places(root: Path) -> list[Place]:
    """Return the runs and deployed servers in a folder, or the folder itself if it is one.

    Symbolic links are not followed, and hidden folders are left out. The order is that of names.
    """
    if not root.is_dir():
        raise RunFolderError(f"{root} is not a folder: name a run, or a folder of runs")
    places: list[Place] = []
    for folder in _walk(root):
        place = _look_at(folder, root)
        if place is not None:
            places.append(place)
        if len(places) == MAX_FOUND:
            break
    return sorted(places, key=lambda place: place.name)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the folder and the folders below it; nothing below a run."""
    waiting = [(root, 0)]
    looked_at = 0
    while waiting and looked_at < MAX_FOLDERS:
        folder, depth = waiting.pop()
        looked_at += 1
        yield folder
        if depth < MAX_DEPTH and not _is_run(folder):
            waiting.extend((inner, depth + 1) for inner in _list_folders(folder))


def _list_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            real = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / entry.name for entry in real if not entry.name.startswith(".")]


def _is_run(folder: Path) -> bool:
    return stamp_of(folder / CONFIG) is not None and stamp_of(folder / PARTITION) is not None


def _look_at(folder: Path, root: Path) -> Place | None:
    name = _name_folder(folder, root)
    identity = hashlib.sha256(os.fsencode(folder.relative_to(root))).hexdigest()[:ID_DIGITS]
    if _is_run(folder):
        return Place(identity, name, folder)
    if stamp_of(folder / STATE_FILE) is not None:
        return Place(identity, name, folder / STATE_FILE, is_deployed=True)
    return None


def _name_folder(folder: Path, root: Path) -> str:
    """Return a folder's path from the watched one, or its own name if it is that one.

    Bytes that are not UTF-8 are shown as �, since pages are.
    """
    if folder == root:
        return _to_text(root.resolve().name) or "run"
    return _to_text(folder.relative_to(root).as_posix())


def _to_text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")
