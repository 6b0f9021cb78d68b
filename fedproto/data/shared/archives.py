"""Archives opened with care: their names come from outside."""

from __future__ import annotations

import lzma
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from PIL import Image

from fedproto.errors import DataError

FONT = re.compile(r"(?:.*/)?Sample(\d{3})/img\d{3}-(\d{5})\.png")
DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
)  # what a damaged archive raises
Member = tuple[str, Callable[[], IO[bytes] | None]]


def unpack(archive: Path, into: Path, pattern: str) -> None:
    """The files of a zip or tar archive whose names fit the pattern, moved into the folder when all are written."""
    aside = into / f".{archive.name}.unpacked"
    shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
    try:
        names = [
            name for name, _ in _members(archive)
        ]  # all names are looked at before anything is written
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DataError(
                f"{archive} holds no {pattern}: it is not the archive that was expected"
            )
        for name, opened in _members(archive):
            if fnmatchcase(name, pattern):
                _write(aside / name, opened)
        _move(aside, into)
    except (*DAMAGED, OSError) as error:
        raise _damaged(archive, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _damaged(archive: Path, error: Exception) -> Exception:
    """A full disk stays what it is; everything else is the archive's fault."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DataError(f"{archive} is damaged or no archive: {error}")


def _write(target: Path, opened: Callable[[], IO[bytes] | None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = opened()
    assert source is not None  # only files are listed
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


def _move(aside: Path, into: Path) -> None:
    """A folder that is not there yet comes in one step, so that half a data set is never taken for all of it."""
    for path in sorted(aside.iterdir()):
        target = into / path.name
        if path.is_dir() and target.is_dir():
            _move(path, target)
        elif (
            not target.exists()
        ):  # a file of the user's own stays; whoever checks it says if it is wrong
            path.replace(target)


def _members(archive: Path) -> Iterator[Member]:
    """The files in an archive; one name that leads out of the folder, or one link, and all of it is refused."""
    for name, kind, opened in _entries(archive):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
            raise DataError(
                f"{archive} is refused: its member {name!r} would be written outside its folder"
            )
        if kind == "other":
            raise DataError(
                f"{archive} is refused: its member {name!r} is a link or a device, not a file"
            )
        if kind == "file":
            yield str(path), opened


def _entries(archive: Path) -> Iterator[tuple[str, str, Callable[[], IO[bytes] | None]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                kind = (
                    "other"
                    if stat.S_ISLNK(info.external_attr >> 16)
                    else "folder"
                    if info.is_dir()
                    else "file"
                )
                yield info.filename, kind, lambda info=info: zipped.open(info)  # type: ignore[misc]
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            kind = "file" if member.isfile() else "folder" if member.isdir() else "other"
            yield member.name, kind, lambda member=member: tar.extractfile(member)  # type: ignore[misc]


def pack_fonts(archive: Path, into: Path) -> None:
    """Chars74K's archive of 128x128 images as the npz file that the loader reads: 28x28, bright on black."""
    rows: list[tuple[int, int, np.ndarray]] = []
    try:
        for name, opened in _members(archive):
            if (match := FONT.fullmatch(name)) and (file := opened()):
                pixels = 255 - _small(file)
                rows.append((int(match[1]) - 1, int(match[2]), pixels))
    except (*DAMAGED, OSError) as error:
        raise _damaged(archive, error) from error
    if {label for label, _, _ in rows} != set(range(62)):
        raise DataError(
            f"{archive} does not hold Sample001 to Sample062: it is not Chars74K's EnglishFnt.tgz"
        )
    _save(into / "chars74k_fnt_28.npz", sorted(rows, key=lambda row: row[:2]))


def _small(file: IO[bytes]) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("L").resize((28, 28), Image.Resampling.BILINEAR))


def _save(target: Path, rows: list[tuple[int, int, np.ndarray]]) -> None:
    labels, fonts, images = zip(*rows, strict=True)
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as file:
            y, font_index = np.array(labels, np.uint8), np.array(fonts, np.uint16)
            np.savez_compressed(file, x=np.stack(images), y=y, font_index=font_index)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
