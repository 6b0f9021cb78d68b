"""Reads files that anybody may have put into a folder: plain files of a bounded size only."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from fedproto.errors import RunFolderError

MAX_BYTES = 256 * 2**20
MAX_TENSOR_BYTES = 4 * 2**30  # a checkpoint of many clients; only some of its tensors are read


class Stamp(NamedTuple):
    """What changes when a file is written or replaced."""

    inode: int
    size: int
    changed_ns: int


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a plain file; None if there is none, or something else is there."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def read_plain(path: Path, where: str, start: int = 0, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a plain file from `start` on.

    A symbolic link, a device, a pipe and a file that is too large raise a RunFolderError, which
    names the file as `where` does.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RunFolderError(f"{where} is not a plain file")
            if status.st_size - start > max_bytes:
                raise RunFolderError(f"{where} is larger than {max_bytes // 2**20} MiB")
            file.seek(start)
            return file.read(max_bytes)
    except OSError as error:
        raise RunFolderError(f"{where} cannot be read: {error.strerror or error}") from error


def require_plain(path: Path, where: str, max_bytes: int = MAX_TENSOR_BYTES) -> None:
    """Raise a RunFolderError unless a plain file of a bounded size is there."""
    stamp = stamp_of(path)
    if stamp is None:
        raise RunFolderError(f"{where} is not a plain file")
    if stamp.size > max_bytes:
        raise RunFolderError(f"{where} is larger than {max_bytes // 2**30} GiB")
