"""CIFAR-100 as its python files, which are pickles and are read without running code."""

from pathlib import Path
from typing import Any

import numpy as np

from fedproto.data import DataFolders, Source, Split, check_split
from fedproto.data.cifar10 import IMAGENET_MEAN, IMAGENET_STD
from fedproto.data.shared.pickles import load_arrays
from fedproto.errors import DataError

FOLDERS = ("cifar100/cifar-100-python", "cifar-100-python")
CLASS_COUNTS = {"fine": 100, "coarse": 20}


def cifar100(data_folders: DataFolders, *, coarse: bool = False) -> Source:
    """CIFAR-100, 50,000 + 10,000 colour images, from the python files.

    There are 100 classes or, if `coarse`, the 20 groups of five classes. Training images are
    randomly cropped and flipped; they are normalised as in CIFAR-10.
    """
    folder = data_folders.find(*FOLDERS, dataset="cifar100")
    kind = "coarse" if coarse else "fine"
    return Source(
        "cifar100",
        _read_names(folder / "meta", kind),
        _read_split(folder / "train", kind),
        _read_split(folder / "test", kind),
        IMAGENET_MEAN,
        IMAGENET_STD,
        augment=True,
        model="resnet18",
        mixed_model="resnet18-mh",
    )


def _read_names(path: Path, kind: str) -> tuple[str, ...]:
    """Return the names of the classes from the file `meta`."""
    names: Any = _load(path).get(f"{kind}_label_names".encode())
    count = CLASS_COUNTS[kind]
    is_list = isinstance(names, list) and len(names) == count
    if not is_list or not all(isinstance(name, bytes) for name in names):
        raise DataError(f"{path} must hold a list {kind}_label_names of {count} names")
    return tuple(name.decode("utf-8", "replace") for name in names)


def _read_split(path: Path, kind: str) -> Split:
    """Return the images, (n, 3, 32, 32), and labels of the file `train` or `test`."""
    content = _load(path)
    try:
        x = np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        y = np.asarray(content[f"{kind}_labels".encode()], np.int64)
    except Exception as error:  # a damaged pickle can fail in any way
        raise _damage_error(path, error) from error
    split = Split(x, y)
    check_split(str(path), split, CLASS_COUNTS[kind])
    return split


def _load(path: Path) -> dict[bytes, Any]:
    """Return the dictionary in a python file, or raise DataError."""
    try:
        content = load_arrays(path.read_bytes(), encoding="bytes")
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: the folder must hold train, test and meta") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise _damage_error(path, error) from error
    if not isinstance(content, dict):
        found = type(content).__name__
        raise DataError(f"{path} is not a CIFAR-100 python file: it holds {found}, not a dict")
    return content


def _damage_error(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a CIFAR-100 python file (or is damaged): {error}")
