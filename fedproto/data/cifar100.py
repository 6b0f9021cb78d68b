from pathlib import Path
from typing import Any

import numpy as np

from fedproto.data import DataFolders, Source, Split, check
from fedproto.data.cifar10 import IMAGENET
from fedproto.data.shared.pickles import load_arrays
from fedproto.errors import DataError

FOLDERS = ("cifar100/cifar-100-python", "cifar-100-python")
SIZES = {"fine": 100, "coarse": 20}


def cifar100(places: DataFolders, *, coarse: bool = False) -> Source:
    """CIFAR-100, 50,000 + 10,000 colour images, of 100 classes or, `coarse`, of the 20 groups they fall into.

    From the python files; random crop and flip in training, normalised as CIFAR-10 is.
    """
    folder = places.find(*FOLDERS)
    labels = "coarse" if coarse else "fine"
    names = _names(folder / "meta", labels)
    train, test = (_read(folder / part, labels, len(names)) for part in ("train", "test"))
    return Source(
        "cifar100",
        names,
        train,
        test,
        *IMAGENET,
        augment=True,
        model="resnet18",
        mixed_model="resnet18-mh",
    )


def _names(path: Path, labels: str) -> tuple[str, ...]:
    names = _load(path).get(f"{labels}_label_names".encode())
    if (
        not isinstance(names, list)
        or not all(isinstance(name, bytes) for name in names)
        or len(names) != SIZES[labels]
    ):
        raise DataError(f"{path} must hold a list {labels}_label_names of {SIZES[labels]} names")
    return tuple(name.decode("utf-8", "replace") for name in names)


def _read(path: Path, labels: str, classes: int) -> Split:
    content = _load(path)
    try:
        x = np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        y = np.asarray(content[f"{labels}_labels".encode()], np.int64)
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is damaged or no CIFAR-100 python file: {error}") from error
    check(str(path), Split(x, y), classes)
    return Split(x, y)


def _load(path: Path) -> dict[bytes, Any]:
    try:
        content = load_arrays(path.read_bytes(), encoding="bytes")
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: the folder must hold train, test and meta") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is damaged or no CIFAR-100 python file: {error}") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} is no CIFAR-100 python file: it holds {type(content).__name__}, not a dict"
        )
    return content
