"""Which files a report wrote, so that writing it again touches nothing else.

`X-figures/files.json` lists each figure and the Markdown page with the SHA-256 of what was written.
A file that is not listed, or that was changed since, belongs to somebody else: it is never deleted,
and a report that would have to overwrite it is refused before anything is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from fedproto.core.files import read_json, write_atomically
from fedproto.errors import RunFolderError

RECORD = "files.json"
RECORD_FORMAT = "files of a report"
RECORD_VERSION = 1
FIGURE_ENDINGS = (".png", ".csv")

#: The hashes of files by their paths, relative to the folder of figures. There are two hashes per
#: file, the old and the new one, while files are replaced.
Hashes = dict[str, list[str]]


def refuse_foreign(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raise a RunFolderError if a file would replace one that no report wrote.

    folder  the folder of figures, which need not exist
    files   what will be written, by path from that folder
    """
    recorded = _read_record(folder)
    for name, content in files.items():
        path = _find_path(folder, name)
        accepted = [*recorded.get(name, []), _hash(content)]
        if not _is_free(path, accepted):
            raise RunFolderError(
                f"{path} is there already and was not written by a report, or was changed since: "
                "move it away, or name another file with --out"
            )


def replace_own(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a report, and delete figures of an earlier report that it does not have.

    All other files are kept. The record names the old and the new contents before the first file
    is replaced, so that the files of a report that was killed half-way are still known to be ours.
    """
    recorded = _read_record(folder)
    new = {name: [_hash(content)] for name, content in files.items()}
    old_and_new = dict(recorded)
    for name, hashes in new.items():
        old_and_new[name] = old_and_new.get(name, []) + hashes
    folder.mkdir(parents=True, exist_ok=True)
    _write_record(folder, old_and_new)
    for name, hashes in recorded.items():
        if name not in files and _is_figure(name):
            _delete_unchanged(folder / name, hashes)
    for name, content in files.items():
        write_atomically(_find_path(folder, name), content)
    _write_record(folder, new)


def _find_path(folder: Path, name: str) -> Path:
    """Return the path of a file of the record.

    The system cannot resolve `..` as long as the folder does not exist.
    """
    if name.startswith("../"):
        return folder.parent / name.removeprefix("../")
    return folder / name


def _is_free(path: Path, accepted: list[str]) -> bool:
    """Whether nothing is there, or something that a report wrote and nobody changed."""
    if not path.exists() and not path.is_symlink():
        return True
    return _is_unchanged(path, accepted)


def _is_unchanged(path: Path, hashes: list[str]) -> bool:
    """Whether a plain file is there whose content has one of the hashes."""
    if path.is_symlink() or not path.is_file():
        return False
    return _hash(path.read_bytes()) in hashes


def _delete_unchanged(path: Path, hashes: list[str]) -> None:
    """Delete a file that an earlier report wrote, unless somebody changed it."""
    if _is_unchanged(path, hashes):
        path.unlink()


def _is_figure(name: str) -> bool:
    """Whether a file of the record is a figure in the folder itself.

    A record that somebody sent must not delete anything elsewhere.
    """
    return PurePath(name).name == name and name.endswith(FIGURE_ENDINGS)


def _read_record(folder: Path) -> Hashes:
    """Return the recorded hashes; none if there is no record."""
    path = folder / RECORD
    if not path.exists():
        return {}
    record = read_json(path)
    if not _is_record(record):
        raise RunFolderError(
            f"{path} is not the list of a report's files: "
            "move it away, or name another file with --out"
        )
    return record["files"]


def _is_record(record: Any) -> bool:
    """Whether a JSON value has the form and the version of a record."""
    if not isinstance(record, dict):
        return False
    if record.get("format") != RECORD_FORMAT or record.get("version") != RECORD_VERSION:
        return False
    files = record.get("files")
    if not isinstance(files, dict):
        return False
    return all(_is_list_of_text(hashes) for hashes in files.values())


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _write_record(folder: Path, files: Hashes) -> None:
    """Write the record with its files in alphabetical order."""
    content = {
        "format": RECORD_FORMAT,
        "version": RECORD_VERSION,
        "files": dict(sorted(files.items())),
    }
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(folder / RECORD, text.encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
