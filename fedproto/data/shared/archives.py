"""Archives opened with care: the names inside them come from outside."""

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
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Literal, NamedTuple

import numpy as np
from PIL import Image

from fedproto.errors import DataError

#: Chars74K's images: the number of the character, and the number of the font.
FONT_IMAGE = re.compile(r"(?:.*/)?Sample(\d{3})/img\d{3}-(\d{5})\.png")
CHARACTERS = 62
#: What a damaged archive raises, besides OSError.
DAMAGE_ERRORS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
)


class Entry(NamedTuple):
    """An entry of an archive; `open` is for files only."""

    name: str
    kind: Literal["file", "folder", "other"]
    open: Callable[[], IO[bytes] | None]


class FontImage(NamedTuple):
    """One character in one font."""

    label: int
    font: int
    pixels: np.ndarray


# --- unpacking


def unpack(archive: Path, into: Path, pattern: str) -> None:
    """Unpack the files of a zip or tar archive whose names match the pattern.

    They are moved into the folder when all of them are written. Raises DataError, before anything
    is written, if the archive is damaged, holds no such file, or holds an unsafe name.
    """
    temporary = into / f".{archive.name}.unpacked"
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed run left behind
    try:
        # All names are checked before anything is written.
        names = [entry.name for entry in _list_files(archive)]
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DataError(
                f"{archive} holds no {pattern}: it is not the archive that was expected"
            )
        for entry in _list_files(archive):
            if fnmatchcase(entry.name, pattern):
                _write_file(entry, temporary / entry.name)
        _move_contents(temporary, into)
    except (*DAMAGE_ERRORS, OSError) as error:
        raise _explain(archive, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _explain(archive: Path, error: Exception) -> Exception:
    """Return the error to raise: a full disk stays an OSError, all else is the archive's fault."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DataError(f"{archive} is not a valid archive (or is damaged): {error}")


def _write_file(entry: Entry, target: Path) -> None:
    """Write a file of an archive to a path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = entry.open()
    assert source is not None, "only files are listed"
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


def _move_contents(temporary: Path, into: Path) -> None:
    """Move files and folders; a new folder comes in one step, so it is never there in part."""
    for path in sorted(temporary.iterdir()):
        target = into / path.name
        if path.is_dir() and target.is_dir():
            _move_contents(path, target)
        elif not target.exists():  # a file of the user's own stays; it is checked later
            path.replace(target)


def _list_files(archive: Path) -> Iterator[Entry]:
    """Yield the files of an archive.

    Raises DataError if a name leads out of the folder, or if an entry is a link or a device.
    """
    for entry in _list_entries(archive):
        path = PurePosixPath(entry.name)
        is_outside = path.is_absolute() or ".." in path.parts
        if is_outside or "\\" in entry.name or ":" in entry.name:
            raise DataError(
                f"{archive} is refused: its member {entry.name!r} would be written outside its "
                "folder"
            )
        if entry.kind == "other":
            raise DataError(
                f"{archive} is refused: its member {entry.name!r} is a link or a device, not a file"
            )
        if entry.kind == "file":
            yield entry._replace(name=str(path))


def _list_entries(archive: Path) -> Iterator[Entry]:
    """Yield all entries of a zip or tar archive, unchecked."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                yield Entry(info.filename, _zip_kind(info), partial(zipped.open, info))
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            yield Entry(member.name, _tar_kind(member), partial(tar.extractfile, member))


def _zip_kind(info: zipfile.ZipInfo) -> Literal["file", "folder", "other"]:
    if stat.S_ISLNK(info.external_attr >> 16):
        return "other"
    return "folder" if info.is_dir() else "file"


def _tar_kind(member: tarfile.TarInfo) -> Literal["file", "folder", "other"]:
    if member.isfile():
        return "file"
    return "folder" if member.isdir() else "other"


# --- Chars74K


def pack_fonts(archive: Path, into: Path) -> None:
    """Write Chars74K's archive as the npz file that the loader reads: 28x28, bright on black.

    Raises DataError if the archive is damaged or does not hold all characters.
    """
    images: list[FontImage] = []
    try:
        for entry in _list_files(archive):
            match = FONT_IMAGE.fullmatch(entry.name)
            if match is None:
                continue
            file = entry.open()
            assert file is not None, "only files are listed"
            pixels = 255 - _read_small_image(file)
            images.append(FontImage(int(match[1]) - 1, int(match[2]), pixels))
    except (*DAMAGE_ERRORS, OSError) as error:
        raise _explain(archive, error) from error
    if {image.label for image in images} != set(range(CHARACTERS)):
        raise DataError(
            f"{archive} does not hold Sample001 to Sample062: it is not Chars74K's EnglishFnt.tgz"
        )
    images.sort(key=lambda image: (image.label, image.font))
    _save_fonts(into / "chars74k_fnt_28.npz", images)


def _read_small_image(file: IO[bytes]) -> np.ndarray:
    """Return an image as 28x28 grey values."""
    with Image.open(file) as image:
        small = image.convert("L").resize((28, 28), Image.Resampling.BILINEAR)
        return np.asarray(small)


def _save_fonts(target: Path, images: list[FontImage]) -> None:
    """Write the images as an npz file, atomically."""
    temporary = target.with_name(f"{target.name}.part")
    x = np.stack([image.pixels for image in images])
    y = np.array([image.label for image in images], np.uint8)
    font_index = np.array([image.font for image in images], np.uint16)
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, x=x, y=y, font_index=font_index)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
