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
    data_folders: DataFolders, folders: Sequence[str], part: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and the labels of one part, such as "train".

    The files may be gzipped and lie in one of the folders, inside one of the data folders. The
    first folder has the name of the data set.
    """
    images = read_idx(_find(data_folders, folders, f"{part}-images-idx3-ubyte"), axes=3)
    labels = read_idx(_find(data_folders, folders, f"{part}-labels-idx1-ubyte"), axes=1)
    return images, labels.astype(np.int64)


def _find(data_folders: DataFolders, folders: Sequence[str], name: str) -> Path:
    """Return the path of an idx file, which may be gzipped."""
    candidates = []
    for folder in folders:
        candidates.append(f"{folder}/{name}")
        candidates.append(f"{folder}/{name}.gz")
    return data_folders.find(*candidates, dataset=folders[0])


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Return an array of bytes in the idx format, or raise DataError.

    The format is: two zero bytes, type 8, the number of axes, their sizes (big-endian), data.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    magic = bytes([0, 0, 8, axes])
    header_bytes = 4 + 4 * axes
    if content[:4] != magic or len(content) < header_bytes:
        start = content[:4].hex() or "nothing"
        raise DataError(
            f"{path} is not an idx file of bytes with {axes} axes: it starts with {start}, "
            f"not {magic.hex()}"
        )
    sizes = np.frombuffer(content, ">u4", count=axes, offset=4)
    shape = tuple(int(size) for size in sizes)
    announced_bytes = math.prod(shape)  # of Python's integers: a damaged header may exceed 64 bits
    data_bytes = len(content) - header_bytes
    if data_bytes != announced_bytes:
        raise DataError(
            f"{path} is damaged: its header announces {announced_bytes} bytes of data, "
            f"but it holds {data_bytes}"
        )
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)
