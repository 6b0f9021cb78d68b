"""The data sources, one file each, and what they share. Which client gets what is said in `fedproto/partitions`.

A source's function takes the places where data may lie, then its options, and returns a `Source`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedproto.core import rng
from fedproto.core.class_names import class_name, merge_names, normalise_name
from fedproto.data.shared.feature_encoding import Encoding
from fedproto.data.shared.lazy_images import Lazy
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError

CHUNK = 1 << 24  # values looked at in one go


@dataclass(frozen=True)
class Split:
    """Inputs as they are stored (bytes where the files hold bytes), labels 0 .. C-1, and who wrote each, if known.

    Inputs may stay on disk: a memory-mapped array, or a `Lazy` one.
    """

    x: np.ndarray | Lazy
    y: np.ndarray
    writer: np.ndarray | None = None

    def rows(self, index: np.ndarray) -> Split:
        x = (
            Lazy.over(self.x).subset(index)
            if isinstance(self.x, (Lazy, np.memmap))
            else self.x[index]
        )
        return Split(x, self.y[index], None if self.writer is None else self.writer[index])


@dataclass(frozen=True, eq=False)
class Source:
    """A data set: images (n, height, width) or (n, channels, height, width), or anything else with n rows."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...] = (0.0,)  # per channel, of inputs scaled to [0, 1]
    std: tuple[float, ...] = (1.0,)
    scale: float = 255.0  # what 1.0 is in the stored bytes
    augment: bool = False  # random crop with padding 4 and flip in training
    model: str = "cnn"
    mixed_model: str = "cnn-mh"
    shots: int = 100
    encoding: Encoding | None = None  # how rows of a table, or texts, became these inputs

    def __post_init__(self) -> None:
        refuse_unwritable("the data set is called", self.name)
        if len(set(self.classes)) < len(
            self.classes
        ):  # members share class names, so two would become one
            raise DataError(f"{self.name} names a class twice: {', '.join(self.classes)}")
        for part, split in (("training", self.train), ("test", self.test)):
            check(f"{self.name}: the {part} set", split, len(self.classes))
        self._check_inputs()
        self._normalise_names()

    def _normalise_names(self) -> None:
        """Spell the classes as everybody does; two spellings of one name are one class."""
        names, places = merge_names(self.classes, f"{self.name} has a class")
        if names != self.classes:
            object.__setattr__(self, "classes", names)  # frozen for everybody else
            for part, split in (("train", self.train), ("test", self.test)):
                object.__setattr__(self, part, _relabelled(split, places))

    def _check_inputs(self) -> None:
        """Training and test inputs are of one shape, and the options fit it."""
        shapes = [split.x.shape[1:] for split in (self.train, self.test)]
        if shapes[0] != shapes[1]:
            raise DataError(
                f"{self.name} has training inputs of shape {shapes[0]} but test inputs of {shapes[1]}"
            )
        channels = shapes[0][0] if len(shapes[0]) != 2 else 1
        if not {len(self.mean), len(self.std)} <= {
            1,
            channels,
        }:  # would otherwise grow channels by broadcasting
            raise ConfigError(
                f"{self.name} has {channels} channels: mean and std take 1 or {channels} values"
            )
        if self.augment and len(shapes[0]) not in (2, 3):
            raise ConfigError(
                f"{self.name} has inputs of shape {shapes[0]}: augment crops and flips images only"
            )

    def tensor(self, split: Split, index: np.ndarray) -> Tensor:
        """Rows of a split as the model sees them: float32, channels first, normalised."""
        x = split.x[index].astype(np.float32)  # a copy; and numpy knows types torch does not
        return self.preprocessing.normalised(x.reshape(-1, *self.preprocessing.shape))

    @property
    def preprocessing(self) -> Preprocessing:
        shape = self.train.x.shape[1:]
        channels_first = (1, *shape) if len(shape) == 2 else shape
        return Preprocessing(
            channels_first, tuple(self.mean), tuple(self.std), self.scale, self.encoding
        )


def _relabelled(split: Split, places: Sequence[int]) -> Split:
    """The split with each label moved to its place among other classes."""
    return replace(split, y=np.array(places, np.int64)[split.y])


def check(where: str, split: Split, classes: int) -> None:
    """Refuse arrays that no model could be trained on, in one sentence."""
    if split.x.dtype.kind not in "fiub" or split.x.ndim < 2:
        found = f"{split.x.dtype} of shape {split.x.shape}"
        raise DataError(
            f"{where} must have inputs that are numbers, with one row a sample, not {found}"
        )
    if 0 in split.x.shape[1:]:
        raise DataError(f"{where} has inputs of shape {split.x.shape[1:]}, which hold no value")
    if len(split.x) != len(split.y):
        raise DataError(f"{where} has {len(split.x)} inputs but {len(split.y)} labels")
    if split.writer is not None and split.writer.ndim != 1:
        raise DataError(
            f"{where} has client or writer ids of shape {split.writer.shape}: one a row is wanted"
        )
    if split.writer is not None and split.writer.dtype.kind == "f" and np.isnan(split.writer).any():
        raise DataError(f"{where} has a client or writer id that is not a number")
    if split.writer is not None and len(split.writer) != len(split.y):
        raise DataError(
            f"{where} has {len(split.y)} labels but {len(split.writer)} client or writer ids"
        )
    if split.writer is not None and split.writer.dtype.kind == "U" and (split.writer == "").any():
        raise DataError(
            f"{where} has an empty client or writer id in row {np.flatnonzero(split.writer == '')[0]}"
        )
    if len(split.y) and not (split.y.min() >= 0 and split.y.max() < classes):
        wrong = split.y[(split.y < 0) | (split.y >= classes)][0]
        raise DataError(
            f"{where} has a label {wrong}, out of range: there are {classes} classes, 0 to {classes - 1}"
        )
    row = _not_finite(split.x)
    if row is not None:
        raise DataError(
            f"{where} holds a value that is not a finite number (NaN or infinite) in row {row}"
        )


def _not_finite(x: np.ndarray | Lazy) -> int | None:
    """The first row with a value that float32 cannot hold, looked for in pieces: the inputs may exceed the memory."""
    if x.dtype.kind != "f":
        return None
    step = max(1, CHUNK // max(1, math.prod(x.shape[1:])))
    for start in range(0, len(x), step):
        with np.errstate(over="ignore"):
            finite = np.isfinite(x[start : start + step].astype(np.float32, copy=False))
        if not finite.all():
            return start + int(np.argwhere(~finite)[0][0])
    return None


def refuse_unwritable(where: str, name: str) -> None:
    """Names go into files in UTF-8, which has no form for a lone surrogate: half an emoji of JSON, or a stray byte."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} {name!r}, which holds half a character and cannot be written in UTF-8"
        ) from error


def few(y: np.ndarray) -> int:
    """Rows a class and client, 100 or fewer, so that the smallest class is enough for twenty clients that all have it.

    `nway` gives a client up to two more, but never twice as many.
    """
    share = int(np.unique(y, return_counts=True)[1].min(initial=len(y))) // 20
    return min(100, max(1, (share + 1) // 2, share - 2))


def hold_out(y: np.ndarray, share: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) rows for a source without a test set: the same seeded fifth of each class every time."""
    generator = rng.generator(0, "hold out")
    held = [
        generator.permutation(rows)[: max(1, round(share * len(rows)))]
        if len(rows) > 1
        else rows[:0]
        for rows in (np.flatnonzero(y == label) for label in np.unique(y))
    ]
    test = np.sort(np.concatenate(held)) if held else np.zeros(0, int)
    return np.setdiff1d(np.arange(len(y)), test), test


def from_arrays(name: str, classes: tuple[str, ...], splits: list[Split], **options: Any) -> Source:
    """A source made of a user's own training and test arrays; without test arrays, some rows are held out.

    `options` are those of `Source` that arrays do not tell: mean, std, augment.
    """
    names, places = merge_names(classes, f"{name} has a class")
    if len(splits) == 1 or len(names) < len(set(classes)):
        for split in splits:
            check(name, split, len(classes))
    if len(names) < len(set(classes)):  # before rows of each class are held out
        classes = names
        splits = [_relabelled(split, places) for split in splits]
    if len(splits) == 1:
        splits = [splits[0].rows(rows) for rows in hold_out(splits[0].y)]
    train, test = splits
    if (train.x.dtype == np.uint8) != (
        test.x.dtype == np.uint8
    ):  # one of them would be scaled wrongly
        raise DataError(
            f"{name} has training inputs of type {train.x.dtype} but test inputs of {test.x.dtype}"
        )
    model = "cnn" if train.x.ndim >= 3 else "mlp"
    scale = 255.0 if train.x.dtype == np.uint8 else 1.0
    mixed, shots = f"{model}-mh", few(train.y)
    return Source(
        name,
        classes,
        train,
        test,
        scale=scale,
        model=model,
        mixed_model=mixed,
        shots=shots,
        **options,
    )


def from_clients(clients: Sequence) -> list[Source]:
    """A source a client from a list of (x, y) or (x, y, x_test, y_test); classes are named by the labels' text."""
    arrays = [_arrays(client, f"client {number}") for number, client in enumerate(clients)]
    labels = {str(label) for client in arrays for label in client[1].tolist()}
    trained = {class_name(label, "the clients' labels hold") for label in labels}
    names = tuple(sorted(trained, key=lambda name: (len(name), name)))
    return [_from_client(client, names, f"client {number}") for number, client in enumerate(arrays)]


def _arrays(client: Any, where: str) -> list[np.ndarray]:
    listed = isinstance(client, (tuple, list))
    if not listed or len(client) not in (2, 4):
        found = f"{len(client)} things" if listed else type(client).__name__
        raise DataError(f"{where} must be (x, y) or (x, y, x_test, y_test), not {found}")
    try:
        arrays = [
            np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array)
            for array in client
        ]
        arrays[1::2] = [np.asarray(y.tolist()) if y.dtype == object else y for y in arrays[1::2]]
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} has inputs or labels that are no array: {error}") from error
    for y in arrays[1::2]:
        if y.dtype.kind not in "iuU" or y.ndim != 1:
            found = f"{y.dtype} of shape {y.shape}"
            raise DataError(
                f"{where} has labels that are no list of whole numbers or of text: {found}"
            )
    return arrays


def _from_client(arrays: list[np.ndarray], names: tuple[str, ...], where: str) -> Source:
    index = {name: label for label, name in enumerate(names)}
    try:
        labels = [_numbered(y, index) for y in arrays[1::2]]
    except KeyError as error:
        raise DataError(
            f"{where} has test images of class {error}, of which nobody has a training image"
        ) from error
    return from_arrays(
        where, names, [Split(x, y) for x, y in zip(arrays[::2], labels, strict=True)]
    )


def _numbered(labels: np.ndarray, index: dict[str, int]) -> np.ndarray:
    """The number of each label's class, by its normalised name."""
    listed = labels.tolist()
    number = {label: index[normalise_name(str(label))] for label in set(listed)}
    return np.array([number[label] for label in listed], np.int64)


@dataclass(frozen=True)
class DataFolders:
    """Where data files may lie: `--data-dir`, then $FEDPROTO_DATA, then the user's cache folder."""

    data_dir: str | None = None

    def folders(self) -> list[Path]:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedproto"
        named = [self.data_dir, os.environ.get("FEDPROTO_DATA")]
        return [Path(folder) for folder in named if folder] + [cache]

    def find(self, *candidates: str) -> Path:
        """The first of the candidate paths that exists in the first folder that has one."""
        for folder in self.folders():
            for candidate in candidates:
                if (folder / candidate).exists():
                    return folder / candidate
        looked = ", ".join(str(folder) for folder in self.folders())
        raise DataError(
            f"{candidates[0]} was not found in {looked}: put it there, or name a folder with --data-dir"
        )


def folders_in(path: Path) -> list[Path]:
    """Those that are not hidden, by name."""
    return sorted(
        each for each in path.iterdir() if each.is_dir() and not each.name.startswith((".", "__"))
    )


DIGITS = tuple("0123456789")
