"""Reading DICOM files as pictures of 16 bits, or of three colours, by the optional package pydicom.

The values of a grey image go through what its header says: the modality's rescaling, then a window,
and the inversion of MONOCHROME1. Nothing of a file is executed.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from fedproto.errors import DataError, need

DICOM_ENDINGS = (".dcm", ".dicom")
MAGIC_OFFSET = 128  # bytes before the four letters that mark a DICOM file
MAGIC = b"DICM"
WHITE = 65535
GREY_KINDS = ("MONOCHROME1", "MONOCHROME2")
PALETTE = "PALETTE COLOR"

MIN_WINDOW_WIDTH = 1  # as DICOM has it
MAX_WINDOW = 1e12  # far beyond any value of a scanner

#: A window: its centre and its width, in units of the rescaled values.
Window = tuple[float, float]


def is_dicom(file: str | Path | BinaryIO) -> bool:
    """Return whether a file is DICOM, by the ending of its name or by its first bytes."""
    if isinstance(file, (str, Path)):
        if str(file).lower().endswith(DICOM_ENDINGS):
            return True
        with open(file, "rb") as opened:
            return _has_magic(opened)
    return _has_magic(file)


def _has_magic(file: BinaryIO) -> bool:
    file.seek(0)
    start = file.read(MAGIC_OFFSET + len(MAGIC))
    file.seek(0)
    return start[MAGIC_OFFSET:] == MAGIC


def read_dicom_header(file: str | Path | BinaryIO, name: str) -> tuple[tuple[int, int], bool]:
    """Return the (height, width) of a DICOM image, and whether it is grey; pixels stay unread."""
    header = _read(file, name, stop_before_pixels=True)
    return _check(header, name)


def read_dicom(file: str | Path | BinaryIO, name: str, window: Window | None) -> np.ndarray:
    """Return a DICOM image: grey ones as (h, w) of 16 bits, colours as (h, w, 3) of 8 bits.

    `window` replaces the header's. Without any, the image's own values are spread from black to
    white. Raises DataError if the file holds no single image, or is damaged.
    """
    pydicom = _import_pydicom(name)
    header = _read(file, name)
    _, is_grey = _check(header, name)
    try:
        stored = header.pixel_array
        if not is_grey:
            return _to_colours(pydicom, header, stored)
        values = np.asarray(pydicom.pixels.apply_modality_lut(stored, header), np.float64)
        fractions = _apply_window(header, stored, values, window)
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).split("\n")[0]
        raise DataError(f"{name} is damaged, or cannot be decoded: {reason}") from error
    if header.PhotometricInterpretation == "MONOCHROME1":
        fractions = 1 - fractions
    return np.round(fractions * WHITE).astype(np.uint16)


def _import_pydicom(name: str) -> ModuleType:
    pydicom = need("pydicom", "'.[dicom]'", f"{name} is a DICOM file, which")
    need("pydicom.pixels", "'.[dicom]'", f"{name} is a DICOM file, which")
    return pydicom


def _read(file: str | Path | BinaryIO, name: str, stop_before_pixels: bool = False) -> Any:
    """Return what a file holds, or raise DataError."""
    pydicom = _import_pydicom(name)
    try:
        if not isinstance(file, (str, Path)):
            file.seek(0)
        return pydicom.dcmread(file, stop_before_pixels=stop_before_pixels)
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).split("\n")[0]
        raise DataError(f"{name} is not a DICOM file (or is damaged): {reason}") from error


def _check(header: Any, name: str) -> tuple[tuple[int, int], bool]:
    """Return the size of an image and whether it is grey; refuse what is no single image."""
    try:
        kind = str(header.PhotometricInterpretation)
        size = (int(header.Rows), int(header.Columns))
        frames = int(header.get("NumberOfFrames", None) or 1)
    except Exception as error:  # a header may lack or hold anything
        raise DataError(f"{name} is a DICOM file without an image") from error
    if frames > 1:
        raise DataError(
            f"{name} holds {frames} frames, but one image per file is needed: save each frame as "
            "a file of its own"
        )
    if min(size) < 1:
        raise DataError(f"{name} is a DICOM file with an image of {size[0]}x{size[1]} pixels")
    return size, kind in GREY_KINDS


def _to_colours(pydicom: ModuleType, header: Any, stored: np.ndarray) -> np.ndarray:
    """Return an image of three colours in 8 bits each."""
    colours = stored
    if header.PhotometricInterpretation == PALETTE:
        colours = pydicom.pixels.apply_color_lut(stored, header)
    if colours.ndim != 3 or colours.shape[2] != 3:
        raise ValueError(f"its {header.PhotometricInterpretation} pixels are no three colours")
    if colours.dtype == np.uint8:
        return colours
    bits = 16 if header.PhotometricInterpretation == PALETTE else int(header.BitsStored)
    return (colours.astype(np.uint32) >> (bits - 8)).astype(np.uint8)


# --- windows


def is_window(value: Any) -> bool:
    """Return whether an entry of a JSON file is a window, a list of two numbers, or none."""
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != 2:
        return False
    for number in value:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return False
        if not abs(number) < MAX_WINDOW:
            return False
    return value[1] >= MIN_WINDOW_WIDTH


def _apply_window(
    header: Any, stored: np.ndarray, values: np.ndarray, window: Window | None
) -> np.ndarray:
    """Return rescaled values as fractions from black, 0, to white, 1."""
    function = "LINEAR"
    if window is None:
        window = _find_window(header)
        function = str(header.get("VOILUTFunction", None) or "LINEAR").upper()
    if window is None:
        return _spread(values, _find_padding(header, stored))
    return apply_window(values, window, function)


def apply_window(values: np.ndarray, window: Window, function: str = "LINEAR") -> np.ndarray:
    """Return values as fractions of a window, by the formulas of DICOM PS3.3 C.11.2.1.2 and .3."""
    centre, width = window
    if function == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700)))
    if function == "LINEAR_EXACT":
        fractions = (values - centre) / width + 0.5
    else:
        # With a width of 1, the division is by zero: all values are black or white.
        with np.errstate(divide="ignore", invalid="ignore"):
            fractions = np.divide(values - (centre - 0.5), width - 1) + 0.5
        fractions = np.where(np.isnan(fractions), 0.0, fractions)
    return np.clip(fractions, 0, 1)


def _find_window(header: Any) -> Window | None:
    """Return the first window of a header, or None if it has none that is usable."""
    centre = _first_number(header.get("WindowCenter", None))
    width = _first_number(header.get("WindowWidth", None))
    if centre is None or width is None or width < MIN_WINDOW_WIDTH:
        return None
    return centre, width


def _first_number(value: Any) -> float | None:
    """Return a number, or the first of several; None if there is none."""
    if value is None:
        return None
    if not isinstance(value, (str, int, float)):
        values = list(value)
        if not values:
            return None
        value = values[0]
    number = float(value)
    return number if np.isfinite(number) else None


def _find_padding(header: Any, stored: np.ndarray) -> np.ndarray:
    """Return where an image is padding, which no window should be widened for."""
    padding = header.get("PixelPaddingValue", None)
    if padding is None:
        return np.zeros(stored.shape, bool)
    return stored == int(padding)


def _spread(values: np.ndarray, is_padding: np.ndarray) -> np.ndarray:
    """Return values as fractions of their own range; one single value, and padding, is black."""
    inside = values[~is_padding]
    if not inside.size or not np.isfinite(inside).all():
        return np.zeros(values.shape)
    low = inside.min()
    high = inside.max()
    if low == high:
        return np.zeros(values.shape)
    fractions = np.clip((values - low) / (high - low), 0, 1)
    return np.where(is_padding, 0.0, fractions)
