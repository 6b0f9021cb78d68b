"""Which files a report wrote, so that writing it again touches nothing else.

`X-figures/files.json` lists each figure and the Markdown page with the SHA-256 of what was written. A
file that is not listed, or that was changed since, belongs to somebody else: it is never deleted, and a
report that would have to overwrite it is refused before anything is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath

from fedproto.core.files import read_json, write_atomically
from fedproto.errors import RunFolderError

RECORD = "files.json"
RECORD_FORMAT = "files of a report"
RECORD_VERSION = 1
FIGURE_ENDINGS = (".png", ".csv")

Hashes = dict[
    str, list[str]
]  # by the file's path from the folder of figures; two while files are replaced


def refuse_foreign(folder: Path, names: Mapping[str, bytes]) -> None:
    """Raise a sentence that names a file which is in the way and which no report wrote."""
    recorded = _read_record(folder)
    for name, content in names.items():
        path = _path(folder, name)
        accepted = [*recorded.get(name, []), _hash(content)]
        if not _is_free(path, accepted):
            raise RunFolderError(
                f"{path} is there already and was not written by a report, or was changed since: "
                "move it away, or name another file with --out"
            )


def replace_own(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a report and delete those of an earlier one that it lacks; keep all others.

    The record names the old and the new contents before the first file is replaced, so that a report
    that was killed half-way is still known to be ours.
    """
    recorded = _read_record(folder)
    new = {name: [_hash(content)] for name, content in files.items()}
    both = {name: recorded.get(name, []) + new.get(name, []) for name in {**recorded, **new}}
    folder.mkdir(parents=True, exist_ok=True)
    _write_record(folder, both)
    for name, hashes in recorded.items():
        if name not in files and _is_figure(name):
            _delete_unchanged(folder / name, hashes)
    for name, content in files.items():
        write_atomically(_path(folder, name), content)
    _write_record(folder, new)


def _path(folder: Path, name: str) -> Path:
    """Where a file of the record lies; the folder may not be there yet, so `..` cannot be left to the system."""
    beside = name.removeprefix("../")
    return folder / name if beside == name else folder.parent / beside


def _is_free(path: Path, accepted: list[str]) -> bool:
    """Whether nothing is there, or something that a report wrote and nobody changed."""
    if not path.exists() and not path.is_symlink():
        return True
    return path.is_file() and not path.is_symlink() and _hash(path.read_bytes()) in accepted


def _delete_unchanged(path: Path, hashes: list[str]) -> None:
    if path.is_file() and not path.is_symlink() and _hash(path.read_bytes()) in hashes:
        path.unlink()


def _is_figure(name: str) -> bool:
    """Whether it lies in the folder itself: a record that somebody sent must not delete anything elsewhere."""
    return PurePath(name).name == name and name.endswith(FIGURE_ENDINGS)


def _read_record(folder: Path) -> Hashes:
    path = folder / RECORD
    if not path.exists():
        return {}
    found = read_json(path)
    is_record = isinstance(found, dict) and found.get("format") == RECORD_FORMAT
    if (
        not is_record
        or found.get("version") != RECORD_VERSION
        or not _are_hashes(found.get("files"))
    ):
        raise RunFolderError(
            f"{path} is not the list of a report's files: move it away, or name another file with --out"
        )
    return found["files"]


def _are_hashes(files: object) -> bool:
    if not isinstance(files, dict):
        return False
    return all(
        isinstance(hashes, list) and all(isinstance(each, str) for each in hashes)
        for hashes in files.values()
    )


def _write_record(folder: Path, files: Hashes) -> None:
    content = {
        "format": RECORD_FORMAT,
        "version": RECORD_VERSION,
        "files": dict(sorted(files.items())),
    }
    write_atomically(folder / RECORD, (json.dumps(content, indent=1) + "\n").encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
