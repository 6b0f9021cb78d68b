"""Reading image files as arrays of 8 or 16 bits, at once or when their rows are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from fedproto.data.shared.dicom import (
    DICOM_ENDINGS,
    Window,
    is_dicom,
    read_dicom,
    read_dicom_header,
)
from fedproto.data.shared.lazy_array import LazyArray
from fedproto.errors import DataError, ImageSizesError

#: How the names of image files end that are read by every installation, and with pydicom.
PILLOW_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
IMAGE_ENDINGS = (*PILLOW_ENDINGS, *DICOM_ENDINGS)
GREY_MODES = ("1", "L", "LA")  # pillow's names for images of one channel of at most 8 bits
DEEP_MODE_PREFIX = "I;16"  # begins pillow's names for grey images of 16 bits
#: Pillow's names for images of numbers without a known white: 32 bits, or floats.
BOUNDLESS_MODES = ("I", "F")
WHITE = {8: 255, 16: 65535}  # by the bits per channel
TIFF_PHOTOMETRIC = 262  # the tag that says whether 0 is white
TIFF_BITS_PER_SAMPLE = 258
MAX_NAMED_FILES = 10  # in one sentence


@contextmanager
def quietly() -> Iterator[None]:
    """Keep pillow and pydicom from warning of what is odd in a file.

    There may be thousands of such files, and what cannot be read is an error of ours in any case.
    """
    with warnings.catch_warnings(action="ignore"):
        yield


class ImageFile(NamedTuple):
    """An image file, and what an error calls it."""

    file: str | Path | BinaryIO
    name: str


class Header(NamedTuple):
    """What is known of an image before its pixels are read."""

    size: tuple[int, int]  # height and width
    is_grey: bool
    bits: int = 8  # per channel, 8 or 16
    is_transparent: bool = False


@dataclass(frozen=True)
class ImageFormat:
    """What all images of a source are made: their size, their colours and their bits."""

    size: tuple[int, int]  # height and width
    mode: str  # "L" or "RGB"
    bits: int = 8  # per channel, 8 or 16
    resize: bool = False  # otherwise an image of another size is refused
    window: Window | None = None  # for DICOM files, instead of their own

    def shape(self, count: int) -> tuple[int, ...]:
        """Return (count, height, width) for mode "L" and (count, 3, height, width) for "RGB"."""
        channels = () if self.mode == "L" else (3,)
        return (count, *channels, *self.size)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)

    @property
    def white(self) -> float:
        """The value that becomes 1.0."""
        return float(WHITE[self.bits])


class LazyImages(LazyArray):
    """Image files as a lazy array; its shape is as the format says."""

    def __init__(self, paths: Sequence[str | Path], format: ImageFormat) -> None:
        def read(rows: np.ndarray) -> np.ndarray:
            files = [ImageFile(paths[row], str(paths[row])) for row in rows]
            return read_images(files, format)

        super().__init__(format.shape(len(paths)), read, format.dtype)


def read_images(files: Sequence[ImageFile], format: ImageFormat) -> np.ndarray:
    """Return images as one array of the shape and the bits of the format.

    Raises one DataError about all images that are damaged or, if they are not to be resized, have
    another size.
    """
    result = np.empty(format.shape(len(files)), format.dtype)
    errors = []
    for row, (file, name) in enumerate(files):
        try:
            pixels = read_pixels(file, name, format)
        except DataError as error:
            errors.append(str(error))
            continue
        if pixels.dtype != format.dtype:
            pixels = _change_bits(pixels, format.bits)
        result[row] = pixels if format.mode == "L" else pixels.transpose(2, 0, 1)
    if errors:
        raise DataError(describe_broken(errors, len(files)))
    return result


@quietly()
def read_pixels(file: str | Path | BinaryIO, name: str, format: ImageFormat) -> np.ndarray:
    """Return an image, (h, w) or (h, w, 3), in its own bits: uint8 or uint16.

    Raises DataError if it is damaged, or has another size and is not to be resized.
    """
    if _is_dicom(file, name):
        pixels = read_dicom(file, name, format.window)
    else:
        pixels = _decode(file, name, format.mode)
    if format.mode == "L" and pixels.ndim == 3:  # colours of a DICOM file
        pixels = np.asarray(Image.fromarray(pixels).convert("L"))
    if format.resize and pixels.shape[:2] != format.size:
        pixels = _resize(pixels, format.size)
    if pixels.shape[:2] != format.size:
        found = (pixels.shape[0], pixels.shape[1])
        raise _size_error(name, found, format.size, [found, format.size])
    if format.mode == "RGB" and pixels.ndim == 2:
        pixels = np.stack([pixels] * 3, axis=2)
    return pixels


def _is_dicom(file: str | Path | BinaryIO, name: str) -> bool:
    if isinstance(file, (str, Path)) and str(file).lower().endswith(PILLOW_ENDINGS):
        return False  # without opening it
    try:
        return is_dicom(file)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error


def _decode(file: str | Path | BinaryIO, name: str, mode: str) -> np.ndarray:
    """Return an image as pillow decodes it: grey of 16 bits as it is, others in a mode."""
    with _open_image(file, name) as image:
        try:
            if _is_deep(image):
                return _read_deep(image)
            return np.asarray(image.convert(mode))
        except Exception as error:  # a damaged file can fail in any way
            raise DataError(f"{name} is damaged: {error}") from error


def _resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return an image in another size, (height, width), bilinear and in its own bits."""
    height, width = size
    bilinear = Image.Resampling.BILINEAR
    if pixels.dtype == np.uint8:
        return np.asarray(Image.fromarray(pixels).resize((width, height), bilinear))
    resized = Image.fromarray(pixels.astype(np.float32)).resize((width, height), bilinear)
    return np.round(np.asarray(resized)).clip(0, WHITE[16]).astype(np.uint16)


def _change_bits(pixels: np.ndarray, bits: int) -> np.ndarray:
    """Return an image with white where it was, in 8 or in 16 bits."""
    ratio = WHITE[16] // WHITE[8]
    if bits == 16:
        return pixels.astype(np.uint16) * np.uint16(ratio)
    return np.round(pixels / ratio).astype(np.uint8)


# --- headers


@quietly()
def read_header(file: str | Path | BinaryIO, name: str) -> Header:
    """Return what is known of an image without its pixels; raises DataError if it is none."""
    if _is_dicom(file, name):
        size, is_grey = read_dicom_header(file, name)
        return Header(size, is_grey, 16 if is_grey else 8)
    with _open_image(file, name) as image:
        is_deep = _is_deep(image)
        return Header(
            (image.height, image.width),
            is_deep or image.mode in GREY_MODES,
            16 if is_deep else 8,
            "A" in image.getbands() or "transparency" in image.info,
        )


def _open_image(file: str | Path | BinaryIO, name: str) -> Image.Image:
    """Open an image file, or raise DataError; its pixels stay unread."""
    try:
        image = Image.open(file)
        pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    except Image.UnidentifiedImageError as error:
        reason = "its format is not known"
        raise DataError(f"{name} is not an image (or is damaged): {reason}") from error
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{name} is not an image (or is damaged): {error}") from error
    if pages > 1:
        raise DataError(
            f"{name} has {pages} pages, but one image per file is needed: save each page as a "
            "file of its own"
        )
    if image.mode in BOUNDLESS_MODES and not _is_deep(image):
        raise DataError(
            f"{name} holds numbers of 32 bits, floats or negative ones (mode {image.mode}), of "
            "which none is known to be white: save it with 8 or 16 bits, or as an array in an npz "
            "file"
        )
    return image


def _is_deep(image: Image.Image) -> bool:
    """Return whether an image is grey with 16 bits; older versions of pillow call PNG's "I"."""
    return image.mode.startswith(DEEP_MODE_PREFIX) or (image.mode, image.format) == ("I", "PNG")


def _read_deep(image: Image.Image) -> np.ndarray:
    """Return the pixels of a grey image of 16 bits, from 0, black, to 65535, white."""
    pixels = np.asarray(image).astype(np.uint16)
    tags: Any = getattr(image, "tag_v2", {})
    (bits,) = tags.get(TIFF_BITS_PER_SAMPLE, (16,))
    if bits < 16:  # such as 12
        pixels = np.round(pixels * (WHITE[16] / (2**bits - 1))).astype(np.uint16)
    if tags.get(TIFF_PHOTOMETRIC) == 0:  # 0 is white
        pixels = WHITE[16] - pixels
    return pixels


# --- what the images of a source have in common


class Examination(NamedTuple):
    """The headers of the image files of a source, and which of them are broken."""

    names: list[str]
    headers: list[Header | None]  # None: the file is broken
    errors: list[str]  # a sentence per broken file


def examine(
    files: Iterable[ImageFile], pixels: bool = False, window: Window | None = None
) -> Examination:
    """Return the headers of all files; with `pixels`, each is read completely to see if it can be.

    `window` is used where pixels are read.
    """
    found = Examination([], [], [])
    for file, name in files:
        header = None
        try:
            header = read_header(file, name)
            if pixels:
                read_pixels(file, name, ImageFormat(header.size, "RGB", window=window))
        except DataError as error:
            header = None
            found.errors.append(str(error))
        found.names.append(name)
        found.headers.append(header)
    return found


def describe_broken(errors: Sequence[str], count: int, hint: str = "") -> str:
    """Return one sentence about the broken ones of `count` image files; `hint` ends it."""
    if len(errors) == 1:
        return errors[0] + hint
    listed = list_errors(errors)
    return f"{len(errors):,} of {count:,} image files cannot be used: {listed}{hint}"


def list_errors(errors: Sequence[str]) -> str:
    """Return the first ten sentences about broken files, and how many more there are."""
    named = "; ".join(errors[:MAX_NAMED_FILES])
    rest = len(errors) - MAX_NAMED_FILES
    return f"{named}; and {rest:,} more" if rest > 0 else named


def agree_on_format(
    found: Examination, side: int | None, grey: bool | None, window: Window | None = None
) -> ImageFormat:
    """Return the format of all images that are not broken.

    The options `side` (pixels per side) and `grey` decide; what they leave open is what the files
    agree on: their common size, and grey if all of them are. If one file has 16 bits, all get them.
    """
    size = None if side is None else (side, side)
    is_coloured = grey is False
    bits = 8
    for name, header in zip(found.names, found.headers, strict=True):
        if header is None:
            continue
        bits = max(bits, header.bits)
        if grey is None and not header.is_grey:
            is_coloured = True
        if size is None:
            size = header.size
        if side is None and header.size != size:
            sizes = [each.size for each in found.headers if each is not None]
            raise _size_error(name, header.size, size, sizes)
    assert size is not None, "there is an image"
    mode = "RGB" if is_coloured else "L"
    return ImageFormat(size, mode, bits, resize=side is not None, window=window)


def _size_error(
    name: str, found: tuple[int, int], others: tuple[int, int], sizes: list[tuple[int, int]]
) -> ImageSizesError:
    found_pixels = f"{found[0]}x{found[1]}"
    other_pixels = f"{others[0]}x{others[1]}"
    return ImageSizesError(
        f"{name} has {found_pixels} pixels but others have {other_pixels}: "
        "with size=N every image is resized to NxN",
        sizes,
    )
