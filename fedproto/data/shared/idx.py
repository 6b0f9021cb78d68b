"""The idx format of MNIST and its relatives."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedproto.data import DataFolders
from fedproto.errors import DataError


def read_pair(
    places: DataFolders, folders: Sequence[str], part: str
) -> tuple[np.ndarray, np.ndarray]:
    """The images and the labels of one part, such as "train", gzipped or not."""
    images, labels = (
        _read(places, folders, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
    )
    return images, labels.astype(np.int64)


def _read(places: DataFolders, folders: Sequence[str], stem: str) -> np.ndarray:
    path = places.find(*(f"{folder}/{stem}{end}" for folder in folders for end in ("", ".gz")))
    return read_idx(path, axes=3 if "idx3" in stem else 1)


def read_idx(path: Path, axes: int) -> np.ndarray:
    """An array of bytes in the idx format: two zero bytes, type 8, number of axes, their sizes (big-endian), data."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    magic, start = bytes([0, 0, 8, axes]), 4 + 4 * axes
    if raw[:4] != magic or len(raw) < start:
        begin = raw[:4].hex() or "nothing"
        raise DataError(
            f"{path} is no idx file of bytes with {axes} axes: it starts with {begin}, not {magic.hex()}"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", count=axes, offset=4))
    wanted, found = (
        math.prod(shape),
        len(raw) - start,
    )  # Python's numbers: a damaged header may exceed 64 bits
    if found != wanted:
        raise DataError(
            f"{path} is damaged: its header announces {wanted} bytes of data, it holds {found}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
