"""The data sources, one file per source, and what they share.

A source is a function that takes the folders where data may lie, then its options, and returns a
`Source`. How the rows of a source are divided among clients is said in `fedproto/partitions`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedproto.core import rng
from fedproto.core.class_names import merge_names, normalise_name
from fedproto.core.row_splits import draw_held_out, find_shared_group
from fedproto.data.shared.channel_order import Order, OrderOption, find_order
from fedproto.data.shared.data_notices import describe_duplicates
from fedproto.data.shared.dicom import Window
from fedproto.data.shared.feature_encoding import Encoding
from fedproto.data.shared.lazy_array import LazyArray
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError

#: Values that are checked for NaN at a time: the inputs may be larger than the memory.
MAX_VALUES_PER_CHECK = 1 << 24
#: The default number of training rows per class and client suffices for this many clients.
CLIENTS_PER_CLASS = 20
MAX_DEFAULT_SHOTS = 100
#: The shortest side of an image of which the convolutions of `cnn` leave something.
MIN_CNN_SIDE = 16

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Split:
    """The training or the test set of a source.

    `x` holds the inputs as they are stored (bytes where the files hold bytes), `y` the labels
    0 .. C-1, `writer`, if known, who wrote each row, and `group`, if known, what each row belongs
    to, such as a patient: rows of one group are never separated. Inputs may stay on disk: as a
    memory-mapped array, or as a `LazyArray`. `place`, if known, says where a row was read, such as
    its file and line.
    """

    x: np.ndarray | LazyArray
    y: np.ndarray
    writer: np.ndarray | None = None
    group: np.ndarray | None = None
    place: Callable[[int], str] | None = None

    def select_rows(self, index: np.ndarray) -> Split:
        """Return some of the rows; inputs on disk stay there."""
        x: np.ndarray | LazyArray
        if isinstance(self.x, (LazyArray, np.memmap)):
            x = LazyArray.wrap(self.x).subset(index)
        else:
            x = self.x[index]
        writer = None if self.writer is None else self.writer[index]
        group = None if self.group is None else self.group[index]
        return Split(x, self.y[index], writer, group, self._select_places(index))

    def _select_places(self, index: np.ndarray) -> Callable[[int], str] | None:
        """Return the places of some of the rows, if they are known."""
        place = self.place
        if place is None:
            return None
        rows = np.arange(len(self.y))[index]
        return lambda row: place(int(rows[row]))


@dataclass(frozen=True, eq=False)
class Source:
    """A data set, with what a run needs to know about it.

    Inputs are images, (n, height, width) or (n, channels, height, width), or anything else with n
    rows. Raises DataError or ConfigError if they cannot be trained on.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...] = (0.0,)  # per channel, of inputs scaled to [0, 1]
    std: tuple[float, ...] = (1.0,)
    scale: float = 255.0  # the stored value that becomes 1.0
    augment: bool = False  # random crop with padding 4 and flip in training
    model: str = "cnn"
    mixed_model: str = "cnn-mh"
    #: The model for an optimiser other than SGD; None: the same.
    adaptive_model: str | None = None
    shots: int = 100
    encoding: Encoding | None = None  # how rows of a table, or texts, became these inputs
    channel_order: Order = "first"  # of the images as they came; here they are first in any case
    validation: Split | None = None  # a set of its own to choose the best round by
    window: Window | None = None  # for DICOM files, instead of their own
    notices: tuple[str, ...] = ()  # what the user of a run should know about the data

    def __post_init__(self) -> None:
        check_writable("the data set is called", self.name)
        # Clients share class names, so two equal names would become one class.
        if len(set(self.classes)) < len(self.classes):
            raise DataError(f"{self.name} names a class twice: {', '.join(self.classes)}")
        check_split(f"{self.name}: the training set", self.train, len(self.classes))
        check_split(f"{self.name}: the test set", self.test, len(self.classes))
        if self.validation is not None:
            check_split(f"{self.name}: the validation set", self.validation, len(self.classes))
        self._check_shapes()
        self._refuse_leaking_groups()
        self._normalise_names()
        self._normalise_clients()

    def _normalise_names(self) -> None:
        """Normalise the names of the classes; two spellings of one name become one class."""
        names, positions = merge_names(self.classes, f"{self.name} has a class")
        if names == self.classes:
            return
        # The dataclass is frozen for everybody else.
        object.__setattr__(self, "classes", names)
        object.__setattr__(self, "train", _relabel(self.train, positions))
        object.__setattr__(self, "test", _relabel(self.test, positions))
        if self.validation is not None:
            object.__setattr__(self, "validation", _relabel(self.validation, positions))

    def _refuse_leaking_groups(self) -> None:
        """Refuse sets that share a group: a model that has seen a patient knows all its rows."""
        sets = {"training": self.train, "test": self.test, "validation": self.validation}
        groups = {
            kind: split.group
            for kind, split in sets.items()
            if split is not None and split.group is not None
        }
        shared = find_shared_group(list(groups.values()))
        if shared is not None:
            group, first, second = shared
            kinds = list(groups)
            raise DataError(
                f"{self.name} has leaking groups: the {kinds[first]} set and the {kinds[second]} "
                f"set both have rows of the group {group!r}"
            )

    def _normalise_clients(self) -> None:
        """Normalise the names of clients; two spellings of one name become one client."""
        for part in ("train", "test", "validation"):
            split: Split | None = getattr(self, part)
            if split is None:
                continue
            writer = _normalise_writers(split.writer)
            if writer is not split.writer:
                object.__setattr__(self, part, replace(split, writer=writer))

    def _check_shapes(self) -> None:
        """Check that training and test inputs have one shape, and that the options fit it."""
        shape = self.train.x.shape[1:]
        others = {"test": self.test, "validation": self.validation}
        for kind, split in others.items():
            if split is not None and split.x.shape[1:] != shape:
                raise DataError(
                    f"{self.name} has training inputs of shape {shape} but {kind} inputs of "
                    f"{split.x.shape[1:]}"
                )
        channels = 1 if len(shape) == 2 else shape[0]
        # Any other number of values would add channels by broadcasting.
        for values in (self.mean, self.std):
            if len(values) not in (1, channels):
                raise ConfigError(
                    f"{self.name} has {channels} channels: mean and std take 1 or {channels} values"
                )
        if self.augment and len(shape) not in (2, 3):
            raise ConfigError(
                f"{self.name} has inputs of shape {shape}: augment crops and flips images only"
            )

    def tensor(self, split: Split, index: np.ndarray) -> Tensor:
        """Return rows of a split as the model sees them: float32, channels first, normalised."""
        preprocessing = self.preprocessing
        # `astype` copies, and numpy knows types that torch does not.
        x = split.x[index].astype(np.float32)
        return preprocessing.normalise(x.reshape(-1, *preprocessing.shape))

    @property
    def preprocessing(self) -> Preprocessing:
        """What `tensor` does to stored inputs; trained clients do the same to new ones."""
        shape = self.train.x.shape[1:]
        channels_first = (1, *shape) if len(shape) == 2 else shape
        return Preprocessing(
            channels_first,
            tuple(self.mean),
            tuple(self.std),
            self.scale,
            self.encoding,
            self.channel_order,
            self.window,
        )


def _relabel(split: Split, positions: Sequence[int]) -> Split:
    """Return the split with each label replaced by its position."""
    return replace(split, y=np.array(positions, np.int64)[split.y])


def _normalise_writers(writer: np.ndarray | None) -> np.ndarray | None:
    """Return the writers with texts normalised; the same array if there is nothing to do."""
    if writer is None or writer.dtype.kind not in "UO":
        return writer
    listed = writer.tolist()
    normalised = {}
    for name in set(listed):
        normalised[name] = normalise_name(name) if isinstance(name, str) else name
    if all(name == spelled for name, spelled in normalised.items()):
        return writer
    # As texts of any length: a composed form may be longer.
    return np.array([normalised[name] for name in listed], writer.dtype.kind)


def join_splits(splits: Sequence[Split]) -> Split:
    """Return the rows of several splits as one; their inputs must have one shape.

    Either all splits or none of them say who wrote their rows, or what their rows belong to.
    """
    x = np.concatenate([split.x for split in splits])
    y = np.concatenate([split.y for split in splits])
    writers = [split.writer for split in splits if split.writer is not None]
    writer = np.concatenate(writers) if writers else None
    groups = [split.group for split in splits if split.group is not None]
    group = np.concatenate(groups) if groups else None
    return Split(x, y, writer, group)


# --- checks


def check_split(where: str, split: Split, classes: int) -> None:
    """Raise DataError if no model with this number of classes could be trained on the split.

    `where` begins the sentence.
    """
    x = split.x
    if x.dtype.kind not in "fiub" or x.ndim < 2:
        found = f"{x.dtype} of shape {x.shape}"
        raise DataError(f"{where} must have numeric inputs with one row per sample, not {found}")
    if 0 in x.shape[1:]:
        raise DataError(f"{where} has inputs of shape {x.shape[1:]}, which hold no value")
    if len(x) != len(split.y):
        raise DataError(f"{where} has {len(x)} inputs but {len(split.y)} labels")
    if split.writer is not None:
        _check_ids(where, split.writer, len(split.y), "client or writer id")
    if split.group is not None:
        _check_ids(where, split.group, len(split.y), "group")
    is_wrong = (split.y < 0) | (split.y >= classes)
    if is_wrong.any():
        raise DataError(
            f"{where} has a label {split.y[is_wrong][0]}, out of range: "
            f"there are {classes} classes, 0 to {classes - 1}"
        )
    row = _find_non_finite_row(x)
    if row is not None:
        raise DataError(
            f"{where} holds a value that is not a finite number (NaN or infinite) in row {row}"
        )


def _check_ids(where: str, ids: np.ndarray, rows: int, what: str) -> None:
    """Raise DataError unless there is one usable id per row; `what` names a single id."""
    if ids.ndim != 1:
        raise DataError(f"{where} has {what}s of shape {ids.shape}, but needs one per row")
    if ids.dtype.kind == "f" and np.isnan(ids).any():
        raise DataError(f"{where} has a {what} that is not a number (NaN)")
    if len(ids) != rows:
        raise DataError(f"{where} has {rows} labels but {len(ids)} {what}s")
    if ids.dtype.kind == "U" and (ids == "").any():
        row = np.flatnonzero(ids == "")[0]
        raise DataError(f"{where} has an empty {what} in row {row}")


def _find_non_finite_row(x: np.ndarray | LazyArray) -> int | None:
    """Return the first row with a value that float32 cannot hold, if there is one."""
    if x.dtype.kind != "f":
        return None
    values_per_row = max(1, math.prod(x.shape[1:]))
    rows_per_check = max(1, MAX_VALUES_PER_CHECK // values_per_row)
    for start in range(0, len(x), rows_per_check):
        with np.errstate(over="ignore"):
            values = x[start : start + rows_per_check].astype(np.float32, copy=False)
        is_finite = np.isfinite(values)
        if not is_finite.all():
            return start + int(np.argwhere(~is_finite)[0][0])
    return None


def check_writable(where: str, name: str) -> None:
    """Raise DataError if a name cannot be written in UTF-8; `where` begins the sentence.

    UTF-8 has no form for a lone surrogate: half an emoji in JSON, or a stray byte in a file name.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} {name!r}, which holds half a character and cannot be written in UTF-8"
        ) from error


# --- sources made of arrays


def default_shots(y: np.ndarray) -> int:
    """Return the default number of training rows per class and client, at most 100.

    With it the smallest class suffices for twenty clients that all have the class: `nway` gives a
    client up to two rows more, but never twice as many.
    """
    _, counts = np.unique(y, return_counts=True)
    rows_per_client = int(counts.min(initial=len(y))) // CLIENTS_PER_CLASS
    shots = max(1, (rows_per_client + 1) // 2, rows_per_client - 2)
    return min(MAX_DEFAULT_SHOTS, shots)


def choose_model(shape: tuple[int, ...]) -> str:
    """Return the default model for inputs of this shape: `cnn` for images, unless too small."""
    is_image = len(shape) in (2, 3)
    return "cnn" if is_image and min(shape[-2:]) >= MIN_CNN_SIDE else "mlp"


def hold_out(
    y: np.ndarray, fraction: float = 0.2, group: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the training rows and the test rows for a source without a test set, both ascending.

    The test rows are the same seeded fraction of each class every time; with `group`, all rows of
    a group are on one side.
    """
    test_rows = draw_held_out(y, fraction, rng.generator(0, "hold out"), group)
    train_rows = np.setdiff1d(np.arange(len(y)), test_rows)
    return train_rows, test_rows


def split_off_test(everything: Split) -> tuple[Split, Split]:
    """Return the training set and the test set of a source without a test set, by `hold_out`."""
    train_rows, test_rows = hold_out(everything.y, group=everything.group)
    return everything.select_rows(train_rows), everything.select_rows(test_rows)


def from_arrays(
    name: str,
    classes: tuple[str, ...],
    splits: list[Split],
    channel_order: OrderOption = "auto",
    validation: Split | None = None,
    **options: Any,
) -> Source:
    """Return a source made of a user's own arrays.

    `splits` is the training set and the test set, or one set, of which some rows are held out;
    `validation` is a set to choose the best round by. `channel_order` says where the channels of
    images are. `options` are those of `Source` that the arrays do not tell: mean, std, augment.
    """
    order: Order = "first"  # as our own readers give images
    if not isinstance(splits[0].x, LazyArray):
        order = find_order(name, splits[0].x.shape[1:], channel_order)
    if order == "last":
        splits = [_move_channels_first(split) for split in splits]
        if validation is not None:
            validation = _move_channels_first(validation)
    names, positions = merge_names(classes, f"{name} has a class")
    has_two_spellings = len(names) < len(set(classes))
    if len(splits) == 1 or has_two_spellings:
        for split in splits:  # their labels are used before `Source` checks them
            check_split(name, split, len(classes))
    if has_two_spellings:  # merged before rows of each class are held out
        classes = names
        splits = [_relabel(split, positions) for split in splits]
        if validation is not None:
            check_split(name, validation, len(positions))
            validation = _relabel(validation, positions)
    splits = [_name_rows(split) for split in splits]
    train, test = split_off_test(splits[0]) if len(splits) == 1 else splits
    train_is_bytes = train.x.dtype == np.uint8
    others: dict[str, Split | None] = {"test": test, "validation": validation}
    for kind, other in others.items():
        # One of them would be scaled wrongly.
        if other is not None and (other.x.dtype == np.uint8) != train_is_bytes:
            raise DataError(
                f"{name} has training inputs of type {train.x.dtype} but {kind} inputs of "
                f"{other.x.dtype}"
            )
    model = choose_model(train.x.shape[1:])
    source = Source(
        name,
        classes,
        train,
        test,
        scale=255.0 if train_is_bytes else 1.0,
        model=model,
        mixed_model=f"{model}-mh",
        shots=default_shots(train.y),
        validation=validation,
        channel_order=order,
        **options,
    )
    # Only now: `Source` has checked the splits. The dataclass is frozen for everybody else.
    found = describe_duplicates(name, source.train, source.test)
    object.__setattr__(source, "notices", (*source.notices, *found))
    return source


def _name_rows(split: Split) -> Split:
    """Return the split with the places of its rows: their numbers, where nothing else is known."""
    if split.place is not None:
        return split
    return replace(split, place=lambda row: f"row {row} of the array")


def _move_channels_first(split: Split) -> Split:
    """Return the split with images (channels, height, width); inputs on disk stay there."""
    if isinstance(split.x, LazyArray) or split.x.ndim != 4:
        return split  # `Source` refuses it, since the training set has another shape
    return replace(split, x=np.moveaxis(split.x, -1, 1))


# --- where data lies


@dataclass(frozen=True)
class DataFolders:
    """Where data files may lie: `--data-dir`, $FEDPROTO_DATA, the user's cache, the system's."""

    data_dir: str | None = None

    def folders(self) -> list[Path]:
        """Return the folders to look in, the first one first."""
        folders = []
        if self.data_dir:
            folders.append(Path(self.data_dir))
        from_environment = os.environ.get("FEDPROTO_DATA")
        if from_environment:
            folders.append(Path(from_environment))
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folders.append(Path(cache) / "fedproto")
        return folders + _list_system_folders()

    def describe(self) -> str:
        """Return the folders as text for an error."""
        return ", ".join(str(folder) for folder in self.folders())

    def find(self, *candidates: str, dataset: str | None = None) -> Path:
        """Return the first candidate path that exists in the first folder that has one.

        Raises DataError if there is none; it names the command that gets `dataset`.
        """
        for folder in self.folders():
            for candidate in candidates:
                if (folder / candidate).exists():
                    return folder / candidate
        raise self.missing(candidates[0], dataset)

    def missing(self, file: str, dataset: str | None = None) -> DataError:
        """Return the error for a file that is in none of the folders.

        It names the command that gets `dataset`, where there is one.
        """
        get = f"get it with `fedproto data get {dataset}`, " if dataset else ""
        return DataError(
            f"{file} was not found in {self.describe()}: {get}put it there, "
            "or name a folder with --data-dir"
        )


def _list_system_folders() -> list[Path]:
    """Return the folders with data sets that packages of the system have installed.

    Debian's `dataset-fashion-mnist` installs to /usr/share/datasets.
    """
    data_folders = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    folders = [Path(folder) / "datasets" for folder in data_folders.split(":")]
    return [folder for folder in folders if folder.is_dir()]


def list_folders(path: Path) -> list[Path]:
    """Return the folders inside a folder, sorted, without hidden ones."""
    folders = [entry for entry in path.iterdir() if entry.is_dir()]
    return sorted(folder for folder in folders if not folder.name.startswith((".", "__")))
