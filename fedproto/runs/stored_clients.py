"""Reads the trained models that `client_models.py` wrote, perhaps in a folder from a stranger."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedproto.core.class_names import is_plain
from fedproto.core.files import read_tensors
from fedproto.core.tensors import split_groups
from fedproto.core.types import Tree
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, RunFolderError, shown
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


@dataclass(frozen=True)
class StoredClient:
    """A trained client as a run folder holds it."""

    id: int
    dataset: str
    model: str  # its configured text, or the class of a module that was passed from Python
    is_from_python: bool
    own_classes: tuple[str, ...]
    preprocessing: Preprocessing
    accuracy: dict[str, float]
    state: Tree  # parameters and buffers, as they are evaluated
    held_out: HeldOut


@dataclass(frozen=True)
class ClientModels:
    """The models of a finished run; `read` gives a client's."""

    folder: RunFolder
    run: str  # a hash of the run's configuration, which its shards repeat
    round: int
    algorithm: str
    classes: tuple[str, ...]  # of the federation, in the order of the logits
    dim: int  # values of a feature vector
    has_prototypes: bool
    threads: int
    precision: str
    layouts: list[Any]
    clients: list[Any]

    @classmethod
    def open(cls, folder: RunFolder) -> ClientModels:
        """Read a run folder's index; refused if the run keeps no models, or has not finished."""
        if not (folder.path / INDEX).exists():
            raise RunFolderError(_explain_missing_index(folder))
        index = _Entry(folder.read_json(INDEX), str(folder.path / INDEX))
        return cls(
            folder=folder,
            run=index.text("run"),
            round=index.count("round"),
            algorithm=index.text("algorithm"),
            classes=index.names("classes"),
            dim=index.count("dim"),
            has_prototypes=index.get("has_prototypes", bool, "true or false"),
            threads=index.count("threads", MAX_THREADS),
            precision=index.text("precision"),
            layouts=index.get("layouts", list, "a list"),
            clients=index.get("clients", list, "a list"),
        )

    def __len__(self) -> int:
        return len(self.clients)

    def read(self, client: int) -> StoredClient:
        """Return one client; the shards it does not need are not read."""
        if not 0 <= client < len(self):
            raise ConfigError(
                f"there is no client {client} in {self.folder.path}: "
                f"there are clients 0 to {len(self) - 1}"
            )
        entry = self._entry(client)
        own_tensors = self._read_tensors(client)
        own_classes = entry.names("own_classes")
        unknown = set(own_classes) - set(self.classes)
        if unknown:
            raise entry.error(f"names {shown(min(unknown), 80)}, which is not among the classes")
        return StoredClient(
            id=client,
            dataset=entry.text("dataset"),
            model=entry.text("model"),
            is_from_python=entry.get("is_from_python", bool, "true or false"),
            own_classes=own_classes,
            preprocessing=self._read_preprocessing(client),
            accuracy=entry.get("accuracy", dict, "an object"),
            state=self._read_state(client, own_tensors),
            held_out=self._read_held_out(client, own_tensors),
        )

    def _entry(self, client: int) -> _Entry:
        return _Entry(self.clients[client], f"{self.folder.path / INDEX}: client {client}")

    def _read_tensors(self, client: int) -> dict[str, Tree]:
        """Return a client's tensors in groups: its weights, and the groups of held-out rows."""
        shard = self._entry(client).index("shard", MAX_SHARDS)
        path = shard_path(self.folder, self.round, shard)
        tensors, header = read_tensors(path, SHARD_FORMAT)
        if header.get("run") != self.run:
            raise RunFolderError(f"{path} belongs to another run than {self.folder.path / INDEX}")
        return split_groups(split_groups(tensors).get(str(client), {}))

    def _read_state(self, client: int, own_tensors: dict[str, Tree]) -> Tree:
        entry = self._entry(client)
        layout = self.layouts[entry.index("layout", len(self.layouts))]
        if not isinstance(layout, dict):
            raise entry.error("has a layout that is not an object")
        tensors_of = {client: own_tensors}
        state = {}
        for name, stated in layout.items():
            owner = client if stated == OWN else stated
            if not isinstance(owner, int) or not 0 <= owner < len(self):
                raise entry.error(f"takes its weights from {shown(owner, 80)}, which is no client")
            if owner not in tensors_of:
                tensors_of[owner] = self._read_tensors(owner)
            stored = tensors_of[owner].get(WEIGHTS, {})
            if name not in stored:
                raise entry.error(f"has no stored weights {shown(name, 80)}")
            state[name] = stored[name]
        return state

    def _read_preprocessing(self, client: int) -> Preprocessing:
        entry = self._entry(client)
        stated = _Entry(entry.get("preprocessing", dict, "an object"), entry.where)
        shape = stated.get("shape", list, "a list of sizes")
        if not shape or not all(_is_count(size) for size in shape):
            raise stated.error("must have a `shape` that is a list of sizes")
        mean = stated.numbers("mean", shape[0])
        std = stated.numbers("std", shape[0])
        scale = stated.get("scale", float, "a number")
        if min(std) <= 0 or not (math.isfinite(scale) and scale > 0):
            raise stated.error("must have positive `std` and `scale`")
        preprocessing = Preprocessing(tuple(shape), mean, std, scale)
        encodings = self.folder.encodings()
        if client not in encodings:
            return preprocessing
        encoding = encodings[client]
        if shape != [encoding.width]:
            raise stated.error(
                f"takes inputs of shape {tuple(shape)}, but encoding.json makes ({encoding.width},)"
            )
        return replace(preprocessing, encoding=encoding)

    def _read_held_out(self, client: int, tensors: dict[str, Tree]) -> HeldOut:
        known = self._read_outputs(client, tensors, "known")
        labels = tensors.get("known", {}).get("labels")
        is_valid = (
            labels is not None
            and labels.dtype == torch.int64
            and labels.shape == (len(known.features),)
            and bool(((labels >= 0) & (labels < len(self.classes))).all())
        )
        if labels is None or not is_valid:
            raise self._entry(client).error("has no valid labels of held-out rows")
        return HeldOut(
            calibration=self._read_outputs(client, tensors, "calibration"),
            known=known,
            known_labels=labels,
            unseen=self._read_outputs(client, tensors, "unseen"),
        )

    def _read_outputs(self, client: int, tensors: dict[str, Tree], group: str) -> Outputs:
        """Return the outputs for a group of held-out rows; no rows if there were none."""
        stored = tensors.get(group, {})
        features = stored.get("features", torch.zeros(0, self.dim))
        logits = stored.get("logits", torch.zeros(0, len(self.classes)))
        rows = len(features) if features.dim() else -1
        is_valid = (
            features.shape == (rows, self.dim)
            and logits.shape == (rows, len(self.classes))
            and features.dtype == logits.dtype == torch.float32
        )
        if not is_valid:
            raise self._entry(client).error(
                f"must have outputs of {self.dim} features and {len(self.classes)} logits "
                f"per held-out row ({group})"
            )
        return Outputs(features, logits)


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


@dataclass(frozen=True)
class _Entry:
    """A JSON object that may come from anybody; every getter checks what it returns."""

    content: Any
    where: str

    def error(self, what: str) -> RunFolderError:
        return RunFolderError(f"{self.where} {what}")

    def get(self, key: str, kind: type, wanted: str) -> Any:
        value = self.content.get(key) if isinstance(self.content, dict) else None
        if not isinstance(value, kind):
            raise self.error(f"must have a `{key}` that is {wanted}, not {shown(value, 80)}")
        return value

    def text(self, key: str) -> str:
        return self.get(key, str, "text")

    def count(self, key: str, maximum: int = MAX_COUNT) -> int:
        value = self.get(key, int, "a positive whole number")
        if not _is_count(value) or value > maximum:
            found = shown(value, 80)
            raise self.error(f"must have a `{key}` from 1 to {maximum}, not {found}")
        return value

    def index(self, key: str, length: int) -> int:
        value = self.get(key, int, "a whole number")
        if isinstance(value, bool) or not 0 <= value < length:
            raise self.error(f"must have a `{key}` from 0 to {length - 1}, not {shown(value, 80)}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        values = self.get(key, list, "a list of different names")
        are_names = all(isinstance(value, str) and is_plain(value) for value in values)
        if not values or not are_names or len(set(values)) < len(values):
            raise self.error(f"must have a `{key}` that is a list of different names")
        return tuple(values)

    def numbers(self, key: str, channels: int) -> tuple[float, ...]:
        values = self.get(key, list, "a list of numbers")
        are_finite = all(isinstance(value, float) and math.isfinite(value) for value in values)
        if not are_finite or len(values) not in (1, channels):
            raise self.error(f"must have a `{key}` that is a list of 1 or {channels} numbers")
        return tuple(values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT
