"""Data sets that PFLlib has divided among clients, read without unpickling."""

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedproto.config.options import PositiveFloat
from fedproto.core.files import read_json
from fedproto.data import DataFolders, Source, Split, check_split, from_arrays, join_splits
from fedproto.data.npz import MAX_UNNAMED_CLASSES, to_whole_numbers
from fedproto.data.shared.channel_order import OrderOption
from fedproto.data.shared.pickles import load_arrays
from fedproto.errors import DataError


def pfllib(
    data_folders: DataFolders,
    path: str,
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
    channel_order: OrderOption = "auto",
) -> Source:
    """A data set as PFLlib divides it: `train/0.npz`, `test/0.npz` and so on, one file per client.

    `--partition natural` with all clients keeps its division, except for test images of classes
    that a client does not train. PFLlib normalises before it writes; bytes are divided by 255.
    Classes are named by their numbers. `channel_order` is as in `npz`.
    """
    root = Path(path)
    clients = _find_clients(root)
    train = _read_part(root / "train", clients)
    test = _read_part(root / "test", clients)
    for client in clients:
        test_labels = test.y[test.writer == client]
        train_labels = train.y[train.writer == client]
        if not np.isin(test_labels, train_labels).any():
            raise DataError(
                f"{path}: client {client} has no test image of a class that it has training "
                "images of"
            )
    names = tuple(str(label) for label in range(_count_classes(root, train.y)))
    return from_arrays(
        f"pfllib:{path}",
        names,
        [train, test],
        mean=mean,
        std=std,
        augment=augment,
        channel_order=channel_order,
    )


def _find_clients(root: Path) -> list[int]:
    """Return the numbers of the clients, which must be the same in both parts."""
    train = _list_numbers(root / "train")
    test = _list_numbers(root / "test")
    if not train:
        raise DataError(
            f"{root} is not a data set divided by PFLlib: it needs train/0.npz, test/0.npz and "
            "so on"
        )
    if train != test:
        client = min(train ^ test)
        raise DataError(f"{root}: client {client} has a file in only one of train and test")
    return sorted(train)


def _list_numbers(folder: Path) -> set[int]:
    """Return the numbers that the files in a folder are named by."""
    stems = [file.stem for file in folder.glob("*.npz")]
    return {int(stem) for stem in stems if stem.isdigit()}


def _read_part(folder: Path, clients: list[int]) -> Split:
    """Read the training or the test files of all clients as one split."""
    splits = [_read_client(folder, client) for client in clients]
    first = splits[0]
    for client, split in zip(clients, splits, strict=True):
        if split.x.shape[1:] != first.x.shape[1:] or split.x.dtype != first.x.dtype:
            raise DataError(
                f"client {clients[0]} has inputs that are {_describe_inputs(first)}, "
                f"but client {client}'s are {_describe_inputs(split)}"
            )
    return join_splits(splits)


def _describe_inputs(split: Split) -> str:
    return f"{split.x.dtype} of shape {split.x.shape[1:]}"


def _read_client(folder: Path, client: int) -> Split:
    """Read the file of one client, which is the writer of all its rows."""
    path = folder / f"{client}.npz"
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as file:
            data = _load_object_array(file).item()
        x = np.asarray(data["x"])
        y = np.asarray(data["y"])
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is not a file of PFLlib (or is damaged): {error}") from error
    labels = to_whole_numbers(str(path), "y", y)
    split = Split(x, labels, np.full(len(labels), client))
    # Each client is checked: after joining them, two wrong lengths could cancel out.
    check_split(str(path), split, MAX_UNNAMED_CLASSES)
    return split


def _load_object_array(file: IO[bytes]) -> Any:
    """Return the array of an npy file of objects.

    numpy itself reads such a file only by a pickle that may run any code.
    """
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        _, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"its npy format {version} is not known")
    if not dtype.hasobject:
        raise ValueError("its array `data` holds no dictionary of x and y")
    return load_arrays(file.read())


def _count_classes(root: Path, y: np.ndarray) -> int:
    """Return the number of classes: at least as config.json says, and as the labels need."""
    count = int(y.max(initial=0)) + 1
    config = root / "config.json"
    if config.exists():
        content = read_json(config, DataError)
        try:
            count = max(count, int(content["num_classes"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(f"{config} does not say num_classes: {error}") from error
    if count > MAX_UNNAMED_CLASSES:
        raise DataError(
            f"{root} has {count} classes, more than {MAX_UNNAMED_CLASSES}: labels count from 0"
        )
    return count
