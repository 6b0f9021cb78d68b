"""Inputs that stay on disk: they look like an array, and are read when rows are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from fedproto.errors import DataError

GREY = ("1", "L", "LA")  # pillow's names for images of one channel
WIDE = ("I", "F")  # how its names for more than 8 bits a channel begin


class Lazy:
    """Rows that a function of their numbers reads; what `Split.x` needs of an array, and no more."""

    def __init__(
        self,
        shape: tuple[int, ...],
        read: Callable[[np.ndarray], np.ndarray],
        dtype: Any = np.uint8,
    ) -> None:
        self.shape, self.dtype, self._read = shape, np.dtype(dtype), read

    @staticmethod
    def over(array: Lazy | np.ndarray) -> Lazy:
        """A lazy array as it is, and one mapped from a file as a lazy one."""
        return (
            array
            if isinstance(array, Lazy)
            else Lazy(array.shape, lambda rows: array[rows], array.dtype)
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Rows by number, slice, list of numbers or mask, as numpy gives them."""
        rows = np.arange(len(self))[index]
        found = np.asarray(self._read(np.atleast_1d(rows)))
        return found if rows.ndim else found[0]

    def subset(self, index: np.ndarray) -> Lazy:
        """Some of the rows, still unread."""
        rows = np.arange(len(self))[index]
        return Lazy(
            (len(rows), *self.shape[1:]), lambda wanted: self._read(rows[wanted]), self.dtype
        )


class Images(Lazy):
    """Image files: (n, height, width) in mode "L", (n, 3, height, width) in mode "RGB"; `shape` is (height, width)."""

    def __init__(
        self, paths: Sequence[str | Path], shape: tuple[int, int], mode: str, resize: bool = False
    ) -> None:
        def read(rows: np.ndarray) -> np.ndarray:
            return decode([(paths[row], str(paths[row])) for row in rows], shape, mode, resize)

        super().__init__(full_shape(len(paths), shape, mode), read)


def full_shape(count: int, shape: tuple[int, int], mode: str) -> tuple[int, ...]:
    return (count, *(() if mode == "L" else (3,)), *shape)


Named = tuple[str | Path | BinaryIO, str]  # an image file, and what to call it in an error


def decode(files: Sequence[Named], shape: tuple[int, int], mode: str, resize: bool) -> np.ndarray:
    """Images as one array of bytes."""
    result = np.empty(full_shape(len(files), shape, mode), np.uint8)
    for place, (file, where) in enumerate(files):
        pixels = _pixels(file, where, mode)
        if resize and pixels.size != shape[::-1]:
            pixels = pixels.resize(shape[::-1], Image.Resampling.BILINEAR)
        if pixels.size != shape[::-1]:
            raise _another_size(where, pixels.size[::-1], shape)
        result[place] = np.asarray(pixels) if mode == "L" else np.asarray(pixels).transpose(2, 0, 1)
    return result


def _pixels(file: str | Path | BinaryIO, where: str, mode: str) -> Image.Image:
    with opened(file, where) as image:
        try:
            return image.convert(mode)
        except Exception as error:  # a damaged file can fail in any way
            raise DataError(f"{where} is damaged: {error}") from error


def opened(file: str | Path | BinaryIO, where: str) -> Image.Image:
    try:
        image = Image.open(file)
    except Exception as error:
        why = (
            "it cannot be identified" if isinstance(error, Image.UnidentifiedImageError) else error
        )
        raise DataError(f"{where} is damaged or no image: {why}") from error
    if image.mode.startswith(WIDE):  # pillow would cut them off at 255
        raise DataError(
            f"{where} has more than 8 bits a channel (mode {image.mode}), and no more are accepted"
        )
    return image


def agreed(
    files: Iterable[Named], size: int | None, grey: bool | None
) -> tuple[tuple[int, int], str]:
    """(height, width) and mode of all images: as the options say, else what the files agree on.

    Where both options are given, no file is opened.
    """
    shape, coloured = (size, size) if size else None, grey is False
    for file, where in files if size is None or grey is None else ():
        with opened(file, where) as image:
            found = (image.height, image.width)
            coloured |= grey is None and image.mode not in GREY
        shape = shape or found
        if size is None and found != shape:
            raise _another_size(where, found, shape)
    assert shape is not None, "there is an image"
    return shape, "RGB" if coloured else "L"


def _another_size(where: str, found: tuple[int, ...], others: tuple[int, ...]) -> DataError:
    one, other = (f"{height}x{width}" for height, width in (found, others))
    return DataError(
        f"{where} has {one} pixels but others have {other}: with size=N every image is resized to NxN"
    )
