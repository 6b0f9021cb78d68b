"""Reads the trained models that `client_models.py` wrote, perhaps in a folder from a stranger."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fedproto.core.class_names import are_plain_names, is_plain
from fedproto.core.client_names import find_client
from fedproto.core.entries import Entry, check_entries
from fedproto.core.files import read_tensors
from fedproto.core.tensors import split_groups
from fedproto.core.types import Tree
from fedproto.data.shared.channel_order import ORDERS
from fedproto.data.shared.dicom import is_window
from fedproto.data.shared.feature_encoding import Encoding
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import RunFolderError, shown
from fedproto.runs.client_models import (
    INDEX,
    OWN,
    SHARD_FORMAT,
    WEIGHTS,
    shard_path,
)
from fedproto.runs.folder import RunFolder
from fedproto.runs.held_out import HeldOut, Outputs

MAX_COUNT = 2**31  # of anything that an index counts
MAX_SHARDS = 10**5
MAX_THREADS = 4096
MAX_KEPT_SHARDS = 2  # a client's own, and that of the weights it shares with others


@dataclass(frozen=True)
class StoredClient:
    """A trained client as a run folder holds it."""

    id: int
    name: str  # its number, where it has no name of its own
    dataset: str
    model: str  # its configured text, or the class of a module that was passed from Python
    is_from_python: bool
    own_classes: tuple[str, ...]
    preprocessing: Preprocessing
    accuracy: dict[str, float]
    state: Tree  # parameters and buffers, as they are evaluated
    held_out: HeldOut
    teacher_weight: float  # 1 where the run has no teacher


@dataclass(frozen=True)
class ClientModels:
    """The models of a finished run; `read` gives a client's."""

    folder: RunFolder
    run: str  # a hash of the run's settings and partition, which its shards repeat
    round: int
    algorithm: str
    classes: tuple[str, ...]  # of the federation, in the order of the logits
    dim: int  # values of a feature vector
    has_prototypes: bool
    threads: int
    precision: str
    layouts: list[Any]
    clients: list[Any]
    names: tuple[str, ...]  # of the clients
    _shards: dict[int, dict[str, Tree]] = field(default_factory=dict, repr=False)

    @cached_property
    def _encodings(self) -> dict[int, Encoding]:
        return self.folder.encodings()

    @classmethod
    def open(cls, folder: RunFolder) -> ClientModels:
        """Read a run folder's index; refused if the run keeps no models, or has not finished."""
        if not (folder.path / INDEX).exists():
            raise RunFolderError(_explain_missing_index(folder))
        index = check_entries(folder.read_json(INDEX), _INDEX, str(folder.path / INDEX))
        return cls(
            folder=folder,
            run=index["run"],
            round=index["round"],
            algorithm=index["algorithm"],
            classes=tuple(index["classes"]),
            dim=index["dim"],
            has_prototypes=index["has_prototypes"],
            threads=index["threads"],
            precision=index["precision"],
            layouts=index["layouts"],
            clients=index["clients"],
            names=_read_names(index["clients"], str(folder.path / INDEX)),
        )

    def __len__(self) -> int:
        return len(self.clients)

    def find_most_experienced(self) -> int:
        """Return the client with the most classes, of these the most training rows, the first."""
        experience = []
        for client in range(len(self)):
            entry = self._check_entry(client)
            experience.append((len(entry["own_classes"]), entry["train"]))
        return find_most_experienced(experience)

    def find(self, client: int | str) -> int:
        """Return the number of the client with this name or number."""
        return find_client(self.names, client, f" in {self.folder.path}")

    def read(self, client: int | str) -> StoredClient:
        """Return the client with this name or number; shards it does not need are not read."""
        client = self.find(client)
        entry = self._check_entry(client)
        own_tensors = self._read_tensors(client)
        unknown = set(entry["own_classes"]) - set(self.classes)
        if unknown:
            raise self._error(
                client, f"names {shown(min(unknown), 80)}, which is not among the classes"
            )
        return StoredClient(
            id=client,
            name=self.names[client],
            dataset=entry["dataset"],
            model=entry["model"],
            is_from_python=entry["is_from_python"],
            own_classes=tuple(entry["own_classes"]),
            preprocessing=self._read_preprocessing(client, entry["preprocessing"]),
            accuracy=entry["accuracy"],
            state=self._read_state(client, entry["layout"], own_tensors),
            held_out=self._read_held_out(client, own_tensors),
            teacher_weight=self._read_teacher_weight(client, entry),
        )

    def _name(self, client: int) -> str:
        return f"{self.folder.path / INDEX}: client {self.names[client]}"

    def _error(self, client: int, what: str) -> RunFolderError:
        return RunFolderError(f"{self._name(client)} {what}")

    def _check_entry(self, client: int) -> dict[str, Any]:
        """Return a client's entry of the index, once its kinds of values are checked."""
        return check_entries(self.clients[client], _CLIENT, self._name(client))

    def _read_tensors(self, client: int) -> dict[str, Tree]:
        """Return a client's tensors in groups: its weights, and the groups of held-out rows."""
        shard = self._read_shard(self._check_entry(client)["shard"])
        return split_groups(shard.get(str(client), {}))

    def _read_shard(self, number: int) -> dict[str, Tree]:
        """Return a shard's tensors by client. The last two are kept: neighbours share a shard."""
        if number not in self._shards:
            path = shard_path(self.folder, self.round, number)
            tensors, header = read_tensors(path, SHARD_FORMAT)
            if header.get("run") != self.run:
                index = self.folder.path / INDEX
                raise RunFolderError(f"{path} belongs to another run than {index}")
            while len(self._shards) >= MAX_KEPT_SHARDS:
                del self._shards[next(iter(self._shards))]
            self._shards[number] = split_groups(tensors)
        return self._shards[number]

    def _read_state(self, client: int, number: int, own_tensors: dict[str, Tree]) -> Tree:
        """Return a client's weights; a layout says in whose entry each of them is stored."""
        layout = self.layouts[number] if number < len(self.layouts) else None
        if not isinstance(layout, dict):
            raise self._error(client, "has no valid layout of its weights")
        tensors_of = {client: own_tensors}
        state = {}
        for name, stated in layout.items():
            owner = client if stated == OWN else stated
            if not isinstance(owner, int) or not 0 <= owner < len(self):
                raise self._error(
                    client, f"takes its weights from {shown(owner, 80)}, which is not a client"
                )
            if owner not in tensors_of:
                tensors_of[owner] = self._read_tensors(owner)
            stored = tensors_of[owner].get(WEIGHTS, {})
            if name not in stored:
                raise self._error(client, f"has no stored weights {shown(name, 80)}")
            state[name] = stored[name]
        return state

    def _read_preprocessing(self, client: int, content: Any) -> Preprocessing:
        stated = check_entries(content, _PREPROCESSING, self._name(client))
        shape = stated["shape"]
        mean = tuple(stated["mean"])
        std = tuple(stated["std"])
        scale = stated["scale"]
        lengths = (1, shape[0])  # one number, or one per channel
        if len(mean) not in lengths or len(std) not in lengths:
            raise self._error(client, f"must have a mean and std of 1 or {shape[0]} numbers")
        if min(std) <= 0 or scale <= 0:
            raise self._error(client, "must have positive `std` and `scale`")
        channel_order = stated.get("channel_order", "first")
        if channel_order not in ORDERS:
            found = shown(channel_order, 40)
            raise self._error(client, f"must have a `channel_order` of first or last, not {found}")
        window = stated.get("window")
        if not is_window(window):
            found = shown(window, 40)
            raise self._error(client, f"must have a `window` of centre and width, not {found}")
        preprocessing = Preprocessing(
            tuple(shape),
            mean,
            std,
            scale,
            channel_order=channel_order,
            window=None if window is None else (window[0], window[1]),
        )
        if client not in self._encodings:
            return preprocessing
        encoding = self._encodings[client]
        if shape != [encoding.width]:
            raise self._error(
                client,
                f"takes inputs of shape {tuple(shape)}, "
                f"but encoding.json makes ({encoding.width},)",
            )
        return replace(preprocessing, encoding=encoding)

    def _read_held_out(self, client: int, tensors: dict[str, Tree]) -> HeldOut:
        known = self._read_outputs(client, tensors, "known")
        validation = self._read_outputs(client, tensors, "validation")
        return HeldOut(
            calibration=self._read_outputs(client, tensors, "calibration"),
            known=known,
            known_labels=self._read_labels(client, tensors, "known", len(known.features)),
            unseen=self._read_outputs(client, tensors, "unseen"),
            validation=validation,
            validation_labels=self._read_labels(
                client, tensors, "validation", len(validation.features)
            ),
        )

    def _read_teacher_weight(self, client: int, entry: dict[str, Any]) -> float:
        weight = entry.get("teacher_weight", 1.0)
        if not _is_number(weight) or weight < 0:
            found = shown(weight, 40)
            raise self._error(client, f"must have a `teacher_weight` of 0 or more, not {found}")
        return weight

    def _read_labels(
        self, client: int, tensors: dict[str, Tree], group: str, rows: int
    ) -> torch.Tensor:
        """Return the classes of a group of held-out rows; a group without rows may have none."""
        none = torch.zeros(0, dtype=torch.int64)
        labels = tensors.get(group, {}).get("labels", none)
        is_valid = (
            labels.dtype == torch.int64
            and labels.shape == (rows,)
            and bool(((labels >= 0) & (labels < len(self.classes))).all())
        )
        if not is_valid:
            raise self._error(client, f"has no valid labels of held-out rows ({group})")
        return labels

    def _read_outputs(self, client: int, tensors: dict[str, Tree], group: str) -> Outputs:
        """Return the outputs for a group of held-out rows; no rows if there were none."""
        stored = tensors.get(group, {})
        features = stored.get("features", torch.zeros(0, self.dim))
        logits = stored.get("logits", torch.zeros(0, len(self.classes)))
        teacher = stored.get("teacher")
        rows = len(features) if features.dim() else -1
        scores = logits if teacher is None else teacher
        is_valid = (
            features.shape == (rows, self.dim)
            and logits.shape == scores.shape == (rows, len(self.classes))
            and features.dtype == logits.dtype == scores.dtype == torch.float32
        )
        if not is_valid:
            raise self._error(
                client,
                f"must have outputs of {self.dim} features and {len(self.classes)} logits "
                f"per held-out row ({group})",
            )
        return Outputs(features, logits, teacher)


def find_most_experienced(experience: Sequence[tuple[int, int]]) -> int:
    """Return the first client with the most classes, and of these the most training rows.

    `experience` holds the number of classes and of training rows of each client.
    """
    return experience.index(max(experience))


def _read_names(clients: list[Any], where: str) -> tuple[str, ...]:
    """Return what the clients of an index are called; one without a name by its number."""
    names = []
    for number, entry in enumerate(clients):
        name = entry.get("name", str(number)) if isinstance(entry, dict) else str(number)
        if not isinstance(name, str) or not is_plain(name):
            raise RunFolderError(
                f"{where} is damaged: the name of client {number} must be a line of text, "
                f"not {shown(name, 80)}"
            )
        names.append(name)
    if len(set(names)) < len(names):
        raise RunFolderError(f"{where} is damaged: two clients have one name")
    return tuple(names)


def _explain_missing_index(folder: RunFolder) -> str:
    if folder.result() is None:
        return (
            f"{folder.path} has not finished, so its models are not there yet: "
            f"`fedproto resume {folder.path}` finishes it"
        )
    return (
        f"{folder.path} keeps no models, because it was run with checkpoint_every=0: "
        "run it again with checkpoint_every above 0"
    )


# --- what the index must hold


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_whole_number(minimum: int, maximum: int) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and minimum <= value <= maximum

    return accepts


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_number(each) for each in value)


def _are_sizes(value: Any) -> bool:
    is_size = _is_whole_number(1, MAX_COUNT)
    return isinstance(value, list) and bool(value) and all(is_size(each) for each in value)


_TEXT = Entry(_is(str), "text")
_FLAG = Entry(_is(bool), "true or false")
_LIST = Entry(_is(list), "a list")
_OBJECT = Entry(_is(dict), "an object")
_NAMES = Entry(are_plain_names, "a list of different names")
_COUNT = Entry(_is_whole_number(1, MAX_COUNT), f"a whole number from 1 to {MAX_COUNT}")

_INDEX = {
    "run": _TEXT,
    "round": _COUNT,
    "algorithm": _TEXT,
    "classes": _NAMES,
    "dim": _COUNT,
    "has_prototypes": _FLAG,
    "threads": Entry(_is_whole_number(1, MAX_THREADS), f"a whole number from 1 to {MAX_THREADS}"),
    "precision": _TEXT,
    "layouts": _LIST,
    "clients": _LIST,
}
_CLIENT = {
    "dataset": _TEXT,
    "model": _TEXT,
    "is_from_python": _FLAG,
    "own_classes": _NAMES,
    "train": _COUNT,
    "preprocessing": _OBJECT,
    "accuracy": _OBJECT,
    "shard": Entry(_is_whole_number(0, MAX_SHARDS - 1), "the number of a shard"),
    "layout": Entry(_is_whole_number(0, MAX_COUNT), "the number of a layout"),
}
_PREPROCESSING = {
    "shape": Entry(_are_sizes, "a list of sizes"),
    "mean": Entry(_are_numbers, "a list of numbers"),
    "std": Entry(_are_numbers, "a list of numbers"),
    "scale": Entry(_is_number, "a number"),
}
