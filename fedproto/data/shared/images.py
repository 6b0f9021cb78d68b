"""Reading image files as arrays of bytes, at once or when their rows are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from fedproto.data.shared.lazy_array import LazyArray
from fedproto.errors import DataError

GREY_MODES = ("1", "L", "LA")  # pillow's names for images of one channel
#: How pillow's names for images with more than 8 bits per channel begin.
DEEP_MODE_PREFIXES = ("I", "F")


class ImageFile(NamedTuple):
    """An image file, and what an error calls it."""

    file: str | Path | BinaryIO
    name: str


class LazyImages(LazyArray):
    """Image files as a lazy array of bytes; its shape is as `array_shape` says."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        size: tuple[int, int],
        mode: str,
        resize: bool = False,
    ) -> None:
        def read(rows: np.ndarray) -> np.ndarray:
            files = [ImageFile(paths[row], str(paths[row])) for row in rows]
            return read_images(files, size, mode, resize)

        super().__init__(array_shape(len(paths), size, mode), read)


def array_shape(count: int, size: tuple[int, int], mode: str) -> tuple[int, ...]:
    """Return (n, height, width) for mode "L" and (n, 3, height, width) for mode "RGB".

    `size` is (height, width).
    """
    channels = () if mode == "L" else (3,)
    return (count, *channels, *size)


def read_images(
    files: Sequence[ImageFile], size: tuple[int, int], mode: str, resize: bool
) -> np.ndarray:
    """Return images as one array of bytes, of the shape that `array_shape` says.

    Raises DataError if an image is damaged or, without `resize`, is not (height, width) in size.
    """
    height, width = size
    result = np.empty(array_shape(len(files), size, mode), np.uint8)
    for row, (file, name) in enumerate(files):
        image = _read_pixels(file, name, mode)
        if resize and image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if image.size != (width, height):
            raise _size_error(name, (image.height, image.width), size)
        pixels = np.asarray(image)
        result[row] = pixels if mode == "L" else pixels.transpose(2, 0, 1)
    return result


def _read_pixels(file: str | Path | BinaryIO, name: str, mode: str) -> Image.Image:
    """Return an image, decoded and converted to a mode."""
    with open_image(file, name) as image:
        try:
            return image.convert(mode)
        except Exception as error:  # a damaged file can fail in any way
            raise DataError(f"{name} is damaged: {error}") from error


def open_image(file: str | Path | BinaryIO, name: str) -> Image.Image:
    """Open an image file of at most 8 bits per channel, or raise DataError; pixels stay unread."""
    try:
        image = Image.open(file)
    except Image.UnidentifiedImageError as error:
        reason = "its format is not known"
        raise DataError(f"{name} is not an image (or is damaged): {reason}") from error
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{name} is not an image (or is damaged): {error}") from error
    if image.mode.startswith(DEEP_MODE_PREFIXES):  # pillow would cut values off at 255
        raise DataError(
            f"{name} has more than 8 bits per channel (mode {image.mode}), which is not accepted"
        )
    return image


def agree_on_format(
    files: Iterable[ImageFile], side: int | None, grey: bool | None
) -> tuple[tuple[int, int], str]:
    """Return the (height, width) and the mode, "L" or "RGB", of all images.

    The options `side` (pixels per side) and `grey` decide; what they leave open is what the files
    agree on: their common size, and grey if all of them are. If both options are given, no file is
    opened.
    """
    if side is not None and grey is not None:
        return (side, side), "L" if grey else "RGB"
    size = None if side is None else (side, side)
    is_coloured = grey is False
    for file, name in files:
        with open_image(file, name) as image:
            found = (image.height, image.width)
            if grey is None and image.mode not in GREY_MODES:
                is_coloured = True
        if size is None:
            size = found
        if side is None and found != size:
            raise _size_error(name, found, size)
    assert size is not None, "there is an image"
    return size, "RGB" if is_coloured else "L"


def _size_error(name: str, found: tuple[int, int], others: tuple[int, int]) -> DataError:
    found_pixels = f"{found[0]}x{found[1]}"
    other_pixels = f"{others[0]}x{others[1]}"
    return DataError(
        f"{name} has {found_pixels} pixels but others have {other_pixels}: "
        "with size=N every image is resized to NxN"
    )
