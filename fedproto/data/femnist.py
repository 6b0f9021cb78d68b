"""Handwritten characters, in the three forms that they are published in.

LEAF's FEMNIST is JSON, 28x28 pixels, with writers. EMNIST by class is idx files (28x28, without
writers) or a MATLAB file (with writers). NIST Special Database 19 is a PNG file per character,
128x128 pixels.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from scipy.io import loadmat

from fedproto.config.options import PositiveInt
from fedproto.core.files import read_json
from fedproto.data import DataFolders, Source, Split, check_split, join_splits, split_off_test
from fedproto.data.chars74k import CLASSES, MIXED_MODEL, MODEL
from fedproto.data.shared.idx import read_pair
from fedproto.data.shared.images import ImageFormat, LazyImages
from fedproto.data.shared.lazy_array import LazyArray
from fedproto.errors import ConfigError, DataError

#: MNIST's mean and standard deviation, as in the released code; the same for all forms.
MEAN = (0.1307,)
STD = (0.3081,)
LEAF_FOLDERS = ("femnist", "femnist/data", "leaf/data/femnist/data")
LEAF_PARTS = ("train", "all_data")
IDX_FOLDERS = ("femnist", "femnist/gzip", "emnist", "emnist/gzip", "EMNIST/raw")
EMNIST_FOLDERS = (*IDX_FOLDERS, "femnist/matlab", "emnist/matlab")
EMNIST_FILES = (
    "emnist-byclass.mat",
    "emnist-byclass-train-images-idx3-ubyte.gz",
    "emnist-byclass-train-images-idx3-ubyte",
)
#: The writers of NIST's own test set: high-school students, while the others are mostly staff.
TEST_FOLDER = "hsf_4"

#: The paths that are looked for, the best first.
LEAF_PATHS = [f"{folder}/{part}" for folder in LEAF_FOLDERS for part in LEAF_PARTS]
EMNIST_PATHS = [f"{folder}/{file}" for file in EMNIST_FILES for folder in EMNIST_FOLDERS]
NIST_PATHS = ["femnist/by_class", "by_class"]
CANDIDATES = {"leaf": LEAF_PATHS, "emnist": EMNIST_PATHS, "nist": NIST_PATHS}


def femnist(
    data_folders: DataFolders,
    *,
    form: Literal["auto", "leaf", "emnist", "nist"] = "auto",
    size: PositiveInt | None = None,
) -> Source:
    """Handwritten 0-9, A-Z and a-z by 3,600 people: LEAF's FEMNIST, EMNIST by class, or NIST's.

    `auto` takes the form whose files are found. In all forms ink is bright, as in MNIST. LEAF and
    emnist-byclass.mat say who wrote what. NIST's images of 128x128 pixels stay on disk until used;
    `size` makes them smaller.
    """
    found_form, path = _locate(data_folders, form)
    if size is not None and found_form != "nist":
        raise ConfigError(
            f"size is for form nist: the images of form {found_form} have 28x28 pixels"
        )
    if found_form == "leaf":
        train, test = _read_leaf(path)
    elif found_form == "nist":
        train = _read_nist(path, "train", size)
        test = _read_nist(path, "test", size)
    elif path.suffix == ".mat":
        train, test = _read_mat(path)
    else:
        train = _read_emnist(data_folders, "train")
        test = _read_emnist(data_folders, "test")
    return Source("femnist", CLASSES, train, test, MEAN, STD, model=MODEL, mixed_model=MIXED_MODEL)


def _locate(data_folders: DataFolders, form: str) -> tuple[str, Path]:
    """Return the form that is found, and its path; earlier folders win."""
    candidates = CANDIDATES if form == "auto" else {form: CANDIDATES[form]}
    for folder in data_folders.folders():
        for found_form, paths in candidates.items():
            for path in paths:
                if (folder / path).exists():
                    return found_form, folder / path
    wanted = " or ".join(paths[0] for paths in candidates.values())
    raise data_folders.missing(wanted, "femnist-nist" if form == "nist" else "femnist")


# --- LEAF: JSON files, writer by writer


def _read_leaf(folder: Path) -> tuple[Split, Split]:
    """Read train/ and test/ as LEAF splits them, or all_data/, of which some rows are held out."""
    if folder.name == "all_data":
        return split_off_test(_read_json_files(folder))
    return _read_json_files(folder), _read_json_files(folder.with_name("test"))


def _read_json_files(folder: Path) -> Split:
    """Return the images of all writers in a folder."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise DataError(f"{folder} holds no .json file: LEAF's train, test and all_data folders do")
    splits: list[Split] = []
    for path in paths:
        splits.extend(_read_writers(path))
    if not splits:
        raise DataError(f"{folder} holds no writer")
    return join_splits(splits)


def _read_writers(path: Path) -> Iterator[Split]:
    """Yield the images of each writer of one file."""
    content = read_json(path, DataError)
    try:
        writers = [(user, content["user_data"][user]) for user in content["users"]]
        label_counts = [len(data["y"]) for _, data in writers]
        stated_counts = content.get("num_samples", label_counts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not a LEAF file (or is damaged): {reason}") from error
    if stated_counts != label_counts:
        raise DataError(
            f"{path} is damaged: num_samples does not say how many labels each writer has"
        )
    for user, data in writers:
        yield _read_writer(f"{path}: writer {user}", str(user), data)


def _read_writer(where: str, user: str, data: dict[str, Any]) -> Split:
    """Return one writer's images as bytes.

    LEAF stores dark ink on paper of 1.0, so the images are inverted.
    """
    try:
        y = np.asarray(data["y"])
        x = np.asarray(data["x"], np.float64).reshape(len(y), 28, 28)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{where} has images that are not 784 numbers each: {error}") from error
    if y.dtype.kind not in "iu" and len(y):
        raise DataError(f"{where} has labels that are not whole numbers")
    is_valid = (x >= 0) & (x <= 1)  # false for NaN
    if not is_valid.all():
        raise DataError(f"{where} has a value that is not between 0 and 1")
    pixels = np.rint(255 * (1 - x)).astype(np.uint8)
    split = Split(pixels, y.astype(np.int64), np.full(len(y), user))
    check_split(where, split, len(CLASSES))
    return split


# --- EMNIST by class: idx files, or one MATLAB file with writers


def _read_emnist(data_folders: DataFolders, part: str) -> Split:
    """Read the idx files of the part "train" or "test", which do not tell the writers."""
    images, labels = read_pair(data_folders, IDX_FOLDERS, f"emnist-byclass-{part}")
    return Split(_transpose(images), labels)


def _transpose(images: np.ndarray) -> np.ndarray:
    """Turn images upright: EMNIST stores them column by column."""
    return images.transpose(0, 2, 1)


def _read_mat(path: Path) -> tuple[Split, Split]:
    """Read the training and the test set of emnist-byclass.mat, or raise DataError."""
    try:
        dataset = loadmat(path, variable_names=["dataset"])["dataset"][0, 0]
        train = _read_mat_split(dataset["train"][0, 0])
        test = _read_mat_split(dataset["test"][0, 0])
        codes = np.asarray(dataset["mapping"])[:, 1]
        symbols = "".join(chr(code) for code in codes)
    except Exception as error:  # a damaged file can fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{path} is not the emnist-byclass.mat of MATLAB 5 (or is damaged): {reason}"
        ) from error
    if symbols != "".join(CLASSES):
        raise DataError(
            f"{path} maps its labels to {symbols[:70]!r}, not to 0-9, A-Z, a-z: "
            "is it emnist-byclass.mat?"
        )
    check_split(f"{path}: train", train, len(CLASSES))
    check_split(f"{path}: test", test, len(CLASSES))
    return train, test


def _read_mat_split(part: Any) -> Split:
    """Return one part of the MATLAB structure as a split."""
    images = np.asarray(part["images"], np.uint8)
    labels = np.asarray(part["labels"]).astype(np.int64)
    writers = np.asarray(part["writers"]).astype(np.int64)
    upright = _transpose(images.reshape(-1, 28, 28))
    return Split(upright, labels.reshape(-1), writers.reshape(-1))


# --- NIST Special Database 19: one folder per class, named by the character's hexadecimal code


def _read_nist(folder: Path, part: str, size: int | None) -> Split:
    """Return the training or test images, still on disk."""
    paths: list[str] = []
    labels: list[int] = []
    for label, character in enumerate(CLASSES):
        for image_folder in _find_nist_folders(folder / f"{ord(character):x}", part):
            images = _list_images(image_folder)
            paths.extend(images)
            labels.extend([label] * len(images))
    if not paths:
        raise DataError(
            f"{folder} holds no {part} image: it needs folders 30 to 7a with train_30 or hsf_0 "
            "... in them"
        )
    return Split(_invert_lazily(paths, size), np.array(labels, np.int64))


def _find_nist_folders(folder: Path, part: str) -> list[Path]:
    """Return the folders with a class's images of one part.

    hsf_4 is for testing. For training it is train_xx or, without it, the other hsf_N, which hold
    the same images.
    """
    subfolders = sorted(each for each in folder.glob("*_*") if each.is_dir())
    if part == "test":
        return [each for each in subfolders if each.name == TEST_FOLDER]
    training = [each for each in subfolders if each.name.startswith("train_")]
    if training:
        return training
    others = [each for each in subfolders if each.name.startswith("hsf_")]
    return [each for each in others if each.name != TEST_FOLDER]


def _list_images(folder: Path) -> list[str]:
    """Return paths as text: there are 800,000, and sorting `Path`s takes ten times as long."""
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.name.endswith(".png"))


def _invert_lazily(paths: list[str], size: int | None) -> LazyArray:
    """Return images that are read when rows are asked for, inverted: NIST's ink is black."""
    pixels = (size, size) if size else _read_size(paths[0])
    stored = LazyImages(paths, ImageFormat(pixels, "L", resize=size is not None))

    def read(rows: np.ndarray) -> np.ndarray:
        return 255 - stored[rows]

    return LazyArray(stored.shape, read)


def _read_size(path: str) -> tuple[int, int]:
    """Return the (height, width) of an image, which all others must have, too."""
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except Exception as error:  # a damaged file can fail in any way
        raise DataError(f"{path} is not an image (or is damaged): {error}") from error
