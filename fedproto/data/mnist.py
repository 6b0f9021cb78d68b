import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedproto.data import DIGITS, Places, Source, Split
from fedproto.errors import DataError


def mnist(places: Places) -> Source:
    """All of MNIST, 60,000 + 10,000 images, from its four idx files, gzipped or not."""
    train, test = (Split(_read(places, part, "images-idx3"), _read(places, part, "labels-idx1").astype(np.int64))
                   for part in ("train", "t10k"))  # fmt: skip
    return Source("mnist", DIGITS, train, test, mean=(0.1307,), std=(0.3081,))


def _read(places: Places, part: str, kind: str) -> np.ndarray:
    stem = f"{part}-{kind}-ubyte"
    folders = ("mnist", "MNIST/raw", ".")
    path = places.find(*(f"{folder}/{stem}{end}" for folder in folders for end in ("", ".gz")))
    return read_idx(path, axes=int(kind[-1]))


def read_idx(path: Path, axes: int) -> np.ndarray:
    """An array of bytes in the idx format: two zero bytes, type 8, number of axes, their sizes (big-endian), data."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    magic, start = bytes([0, 0, 8, axes]), 4 + 4 * axes
    if raw[:4] != magic or len(raw) < start:
        begin = raw[:4].hex() or "nothing"
        raise DataError(f"{path} is no idx file of bytes with {axes} axes: it starts with {begin}, not {magic.hex()}")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", count=axes, offset=4))
    wanted, found = math.prod(shape), len(raw) - start  # Python's numbers: a damaged header may exceed 64 bits
    if found != wanted:
        raise DataError(f"{path} is damaged: its header announces {wanted} bytes of data, it holds {found}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
