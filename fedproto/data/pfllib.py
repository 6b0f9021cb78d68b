import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config.options import PositiveFloat
from fedproto.core.files import read_json
from fedproto.data import DataFolders, Source, Split, check, from_arrays
from fedproto.data.npz import MOST_CLASSES, whole
from fedproto.data.shared.pickles import load_arrays
from fedproto.errors import DataError


def pfllib(
    places: DataFolders,
    path: str,
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """A data set as PFLlib divides it: `train/0.npz`, `test/0.npz` and so on, one file a client.

    `--partition natural` with all clients keeps its division, but for test images of classes that a client does not
    train. PFLlib normalises before it writes; bytes are divided by 255. Classes are named by their numbers.
    """
    root = Path(path)
    numbers = _numbers(root)
    train, test = (
        _split([_read(root / part / f"{n}.npz") for n in numbers], numbers)
        for part in ("train", "test")
    )
    for number in numbers:
        if not np.isin(test.y[test.writer == number], train.y[train.writer == number]).any():
            raise DataError(
                f"{path}: client {number} has no test image of a class that it has training images of"
            )
    names = tuple(str(label) for label in range(_classes(root, train.y)))
    return from_arrays(f"pfllib:{path}", names, [train, test], mean=mean, std=std, augment=augment)


def _numbers(root: Path) -> list[int]:
    """The clients' numbers, which must be the same in both parts."""
    train, test = (
        {int(f.stem) for f in (root / part).glob("*.npz") if f.stem.isdigit()}
        for part in ("train", "test")
    )
    if not train:
        raise DataError(
            f"{root} holds no division of PFLlib's: it needs train/0.npz, test/0.npz and so on"
        )
    if train != test:
        raise DataError(
            f"{root}: client {min(train ^ test)} has a file in only one of train and test"
        )
    return sorted(train)


def _split(clients: list[Split], numbers: list[int]) -> Split:
    for split, number in zip(clients, numbers, strict=True):
        if split.x.shape[1:] != clients[0].x.shape[1:] or split.x.dtype != clients[0].x.dtype:
            one, other = (
                f"{each.x.dtype} of shape {each.x.shape[1:]}" for each in (clients[0], split)
            )
            raise DataError(
                f"client {numbers[0]} has inputs that are {one}, but client {number}'s are {other}"
            )
    writer = np.repeat(numbers, [len(split.y) for split in clients])
    return Split(
        np.concatenate([split.x for split in clients]),
        np.concatenate([split.y for split in clients]),
        writer,
    )


def _read(path: Path) -> Split:
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as file:
            data = _unpickled(file).item()
        x, y = np.asarray(data["x"]), np.asarray(data["y"])
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is damaged or no file of PFLlib's: {error}") from error
    split = Split(x, whole(str(path), "y", y))
    check(
        str(path), split, MOST_CLASSES
    )  # client by client, lest two wrong lengths make up for each other
    return split


def _unpickled(file: Any) -> Any:
    """The array of an npy file of objects, which numpy reads only with a pickle that may run any code."""
    version = np.lib.format.read_magic(file)
    header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version](file)
    if not header[2].hasobject:
        raise ValueError("its array `data` holds no dictionary of x and y")
    return load_arrays(file.read())


def _classes(root: Path, y: np.ndarray) -> int:
    """How many classes there are: what config.json says, if it is there, else as many as the labels need."""
    seen, config = int(y.max(initial=0)) + 1, root / "config.json"
    try:
        said = int(read_json(config, DataError)["num_classes"]) if config.exists() else seen
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{config} does not say num_classes: {error}") from error
    if max(seen, said) > MOST_CLASSES:
        raise DataError(
            f"{root} has {max(seen, said)} classes, more than {MOST_CLASSES}: labels count from 0"
        )
    return max(seen, said)
