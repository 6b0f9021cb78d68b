import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from scipy.io import loadmat

from fedproto.config.options import PositiveInt
from fedproto.core.files import read_json
from fedproto.data import DataFolders, Source, Split, check, hold_out
from fedproto.data.chars74k import MIXED_MODEL, MODEL
from fedproto.data.shared.idx import read_pair
from fedproto.data.shared.lazy_images import Images, Lazy
from fedproto.errors import ConfigError, DataError

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
NORMAL = (
    (0.1307,),
    (0.3081,),
)  # MNIST's mean and deviation, as in the released code; the same for all forms
IDX_FOLDERS = ("femnist", "femnist/gzip", "emnist", "emnist/gzip", "EMNIST/raw")
LEAF_FOLDERS = ("femnist", "femnist/data", "leaf/data/femnist/data")
TEST_FOLDER = "hsf_4"  # writers of NIST's own test set: high-school students, where the others are mostly staff

#: form -> what is looked for, the best first; nearer folders win
FORMS = {
    "leaf": [f"{folder}/{part}" for folder in LEAF_FOLDERS for part in ("train", "all_data")],
    "emnist": [
        f"{folder}/emnist-byclass{end}"
        for end in (".mat", "-train-images-idx3-ubyte.gz", "-train-images-idx3-ubyte")
        for folder in (*IDX_FOLDERS, "femnist/matlab", "emnist/matlab")
    ],
    "nist": ["femnist/by_class", "by_class"],
}


def femnist(
    places: DataFolders,
    *,
    form: Literal["auto", "leaf", "emnist", "nist"] = "auto",
    size: PositiveInt | None = None,
) -> Source:
    """Handwritten 0-9, A-Z and a-z by 3,600 people: LEAF's FEMNIST, EMNIST by class, or NIST's 128x128 images.

    `auto` takes the form whose files are found. In all of them ink is bright, as in MNIST. LEAF and emnist-byclass.mat
    say who wrote what. NIST's images stay on disk and are read when they are needed; `size` makes them smaller.
    """
    found, path = _locate(places, form)
    if size is not None and found != "nist":
        raise ConfigError(f"size is for form nist: the images of form {found} have 28x28 pixels")
    if found == "leaf":
        train, test = _leaf(path)
    elif found == "nist":
        train, test = _nist(path, size)
    elif path.suffix == ".mat":
        train, test = _mat(path)
    else:
        train, test = _emnist(places)
    return Source("femnist", CLASSES, train, test, *NORMAL, model=MODEL, mixed_model=MIXED_MODEL)


def _locate(places: DataFolders, form: str) -> tuple[str, Path]:
    """The form that is there, and where."""
    wanted = FORMS if form == "auto" else {form: FORMS[form]}
    for folder in places.folders():
        for found, candidates in wanted.items():
            for candidate in candidates:
                if (folder / candidate).exists():
                    return found, folder / candidate
    looked = ", ".join(map(str, places.folders()))
    what = " or ".join(dict.fromkeys(candidates[0] for candidates in wanted.values()))
    raise DataError(
        f"{what} was not found in {looked}: put it there, or name a folder with --data-dir"
    )


# --- LEAF: JSON files, writer by writer


def _leaf(folder: Path) -> tuple[Split, Split]:
    """train/ and test/ as LEAF splits them, or a seeded fifth of each class of all_data/ held out."""
    if folder.name == "all_data":
        everything = _shards(folder)
        train, test = hold_out(everything.y)
        return everything.rows(train), everything.rows(test)
    return _shards(folder), _shards(folder.with_name("test"))


def _shards(folder: Path) -> Split:
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise DataError(f"{folder} holds no .json file: LEAF's train, test and all_data folders do")
    parts = [split for path in paths for split in _shard(path)]
    if not parts:
        raise DataError(f"{folder} holds no writer")
    x, y, writer = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y", "writer")
    )
    return Split(x, y, writer)


def _shard(path: Path) -> Iterator[Split]:
    """The writers of one file."""
    content = read_json(path, DataError)
    try:
        people = [(user, content["user_data"][user]) for user in content["users"]]
        counts = content.get("num_samples", [len(data["y"]) for _, data in people])
        found = [len(data["y"]) for _, data in people]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged or no LEAF file: {type(error).__name__}: {error}"
        ) from error
    if counts != found:
        raise DataError(
            f"{path} is damaged: num_samples does not say how many labels each writer has"
        )
    for user, data in people:
        yield _writer(f"{path}: writer {user}", str(user), data)


def _writer(where: str, user: str, data: dict[str, Any]) -> Split:
    """One writer's images as bytes; LEAF stores dark ink on paper of 1.0, so they are turned round."""
    try:
        x, y = np.asarray(data["x"], np.float64), np.asarray(data["y"])
        x = x.reshape(len(y), 28, 28)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{where} has images that are not 784 numbers each: {error}") from error
    if y.dtype.kind not in "iu" and len(y):
        raise DataError(f"{where} has labels that are no whole numbers")
    if not ((x >= 0) & (x <= 1)).all():  # NaN is neither
        raise DataError(f"{where} has a value that is not between 0 and 1")
    split = Split(
        np.rint(255 * (1 - x)).astype(np.uint8), y.astype(np.int64), np.full(len(y), user)
    )
    check(where, split, len(CLASSES))
    return split


# --- EMNIST by class: idx files, or one MATLAB file with writers


def _emnist(places: DataFolders) -> tuple[Split, Split]:
    (x, y), (test_x, test_y) = (
        read_pair(places, IDX_FOLDERS, f"emnist-byclass-{part}") for part in ("train", "test")
    )
    return Split(_upright(x), y), Split(_upright(test_x), test_y)


def _upright(x: np.ndarray) -> np.ndarray:
    """EMNIST stores its images column by column."""
    return x.transpose(0, 2, 1)


def _mat(path: Path) -> tuple[Split, Split]:
    try:
        dataset = loadmat(path, variable_names=["dataset"])["dataset"][0, 0]
        train, test = (_mat_split(dataset[part][0, 0]) for part in ("train", "test"))
        symbols = "".join(map(chr, np.asarray(dataset["mapping"])[:, 1]))
    except Exception as error:  # a damaged file can fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{path} is damaged or no emnist-byclass.mat of MATLAB 5: {reason}"
        ) from error
    if symbols != "".join(CLASSES):
        raise DataError(
            f"{path} maps its labels to {symbols[:70]!r}, not to 0-9, A-Z, a-z: is it emnist-byclass.mat?"
        )
    for part, split in (("train", train), ("test", test)):
        check(f"{path}: {part}", split, len(CLASSES))
    return train, test


def _mat_split(part: Any) -> Split:
    images = np.asarray(part["images"], np.uint8).reshape(-1, 28, 28)
    writers = np.asarray(part["writers"]).reshape(-1).astype(np.int64)
    return Split(_upright(images), np.asarray(part["labels"]).reshape(-1).astype(np.int64), writers)


# --- NIST Special Database 19: a folder a class, named by the character's code in hexadecimal


def _nist(folder: Path, size: int | None) -> tuple[Split, Split]:
    listed: dict[str, tuple[list[str], list[int]]] = {"train": ([], []), "test": ([], [])}
    for label, character in enumerate(CLASSES):
        for part, paths in _files_of(folder / f"{ord(character):x}").items():
            listed[part][0].extend(paths)
            listed[part][1].extend([label] * len(paths))
    for part, (paths, _) in listed.items():
        if not paths:
            raise DataError(
                f"{folder} holds no {part} image: it needs folders 30 to 7a with train_30 or hsf_0 ... in them"
            )
    train, test = (_on_disk(paths, labels, size) for paths, labels in listed.values())
    return train, test


def _files_of(folder: Path) -> dict[str, list[str]]:
    """The images of a class: hsf_4 to test, train_xx to train, which repeats the other hsf_N."""
    subfolders = sorted(each for each in folder.glob("*_*") if each.is_dir())
    training = [each for each in subfolders if each.name.startswith("train_")]
    training = training or [
        each for each in subfolders if each.name.startswith("hsf_") and each.name != TEST_FOLDER
    ]
    parts = {"train": training, "test": [each for each in subfolders if each.name == TEST_FOLDER]}
    return {
        part: [path for each in where for path in _images_in(each)] for part, where in parts.items()
    }


def _images_in(folder: Path) -> list[str]:
    """As text: there are 800,000 of them, and sorting paths takes ten times as long."""
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.name.endswith(".png"))


def _on_disk(paths: list[str], labels: list[int], size: int | None) -> Split:
    """Images that are read when rows are asked for; NIST's ink is black, so they are turned round."""
    shape = (size, size) if size else _shape(paths[0])
    stored = Images(paths, shape, "L", resize=size is not None)
    x = Lazy(stored.shape, lambda rows: 255 - stored[rows])
    return Split(x, np.array(labels, np.int64))


def _shape(path: str) -> tuple[int, int]:
    """(height, width), which must be that of all the others."""
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is damaged or no image: {error}") from error
