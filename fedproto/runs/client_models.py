"""The clients' trained models in a run folder, for use without the run's data and engine.

models/index.json               how each client's model is built, what it takes, and in which
                                shard its tensors are
models/round-R-N.safetensors    shard N: weights as they are evaluated after round R, and what
                                the models make of held-out test rows

A tensor that several clients share, such as the server's model, is stored once. Shards are written
before the index, so an index never names a shard that is not there. A file holds no code: a model
is built from its configured text, or its module is passed by the caller.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core import rng
from fedproto.core.class_names import is_plain
from fedproto.core.federation import Examples, Member
from fedproto.core.files import hash_tensors, read_tensors, remove_leftovers, write_tensors
from fedproto.core.local_training import EVALUATION_BATCH
from fedproto.core.tensors import split_groups
from fedproto.core.types import Tree
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, RunFolderError, shown
from fedproto.runs.folder import CLIENT_MODELS, RunFolder
from fedproto.runs.from_settings import FROM_PYTHON

if TYPE_CHECKING:
    from fedproto.runs.experiment import Experiment

INDEX = f"{CLIENT_MODELS}/index.json"
SHARD_FORMAT = "models"
SHARD_VERSION = 1
SHARD_BYTES = 32 * 2**20  # a shard is closed once it holds this much
MAX_HELD_OUT_ROWS = 1000  # per client, to calibrate on, and as many to see what that is worth
MAX_UNSEEN_ROWS_PER_RUN = 20_000  # test rows of classes that a client lacks, over all clients
MAX_COUNT = 2**31  # of anything that an index counts
MAX_THREADS = 4096
WEIGHTS = "weights"
OWN = "own"  # stands in a layout for the client whose layout it is


class Outputs(NamedTuple):
    """What a model makes of n inputs."""

    features: Tensor  # (n, dim)
    logits: Tensor  # (n, classes)


@dataclass(frozen=True)
class HeldOut:
    """What a client's model makes of test rows, none of which it was trained on."""

    calibration: Outputs  # one half of its own test rows
    known: Outputs  # the other half
    known_labels: Tensor  # (n,) the classes of that half, numbered as in the federation
    unseen: Outputs  # rows of classes of which the client has no training rows


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


# --- held-out rows


def split_test_rows(member: Member) -> tuple[Examples, Examples]:
    """Return a client's test rows in two halves: to calibrate on, and to see what that is worth."""
    rows = member.test.rows.cpu()
    order = torch.from_numpy(rng.generator(0, "calibration").permutation(len(rows)))
    half = len(rows) // 2
    calibration = Examples(member.test.x, member.test.y, rows[order[:half]])
    known = Examples(member.test.x, member.test.y, rows[order[half:]])
    return calibration, known


def find_unseen_rows(member: Member, max_rows: int) -> Tensor:
    """Return test rows of the client's source whose classes it lacks, drawn if there are more."""
    own = torch.tensor(member.classes, device=member.test.y.device)
    rows = (~torch.isin(member.test.y, own)).nonzero().flatten().cpu()
    if len(rows) <= max_rows:
        return rows
    order = rng.generator(0, "unseen").permutation(len(rows))[:max_rows]
    return rows[torch.from_numpy(order)]


@torch.no_grad()
def compute_outputs(module: nn.Module, x: Tensor) -> Outputs:
    """Return features and logits of preprocessed inputs, on the CPU in float32."""
    like = next(module.parameters(), torch.zeros(()))
    features = []
    logits = []
    for part in x.split(EVALUATION_BATCH):
        some_features, some_logits = module(part.to(like))
        features.append(some_features)
        logits.append(some_logits)
    return Outputs(torch.cat(features).float().cpu(), torch.cat(logits).float().cpu())


def _compute_held_out(module: nn.Module, member: Member, max_unseen_rows: int) -> Tree:
    """Return the tensors of a `HeldOut`, `GROUP.NAME`; those without rows are left out."""
    calibration, known = split_test_rows(member)
    known_rows = known.rows[:MAX_HELD_OUT_ROWS]
    rows_of = {
        "calibration": calibration.rows[:MAX_HELD_OUT_ROWS],
        "known": known_rows,
        "unseen": find_unseen_rows(member, max_unseen_rows),
    }
    tensors = {}
    for group, rows in rows_of.items():
        if not len(rows):
            continue
        outputs = compute_outputs(module, member.test.x[rows.to(member.test.x.device)])
        tensors[f"{group}.features"] = outputs.features
        tensors[f"{group}.logits"] = outputs.logits
    tensors["known.labels"] = member.test.y.cpu()[known_rows]
    return tensors


# --- writing


def write_client_models(
    folder: RunFolder,
    experiment: Experiment,
    own_states: Sequence[Tree],
    accuracies: Sequence[Mapping[str, float]],
) -> None:
    """Write the models of a finished run; nothing if the run keeps no checkpoints either.

    `own_states` and `accuracies` are those of all clients, in order.
    """
    if experiment.config.checkpoint_every == 0:
        return
    members = experiment.federation.members
    max_unseen_rows = max(1, MAX_UNSEEN_ROWS_PER_RUN // len(members))
    modules: dict[int, nn.Module] = {}
    writer = _ShardWriter(folder, experiment.progress.round)
    clients = []
    for member, own_state, accuracy in zip(members, own_states, accuracies, strict=True):
        state = experiment.as_evaluated(member, own_state)
        if id(member.module) not in modules:
            modules[id(member.module)] = copy.deepcopy(member.module).eval()
        module = modules[id(member.module)]
        # Of a layer that is there twice, the state has the first name only.
        module.load_state_dict(state, strict=False)
        held_out = _compute_held_out(module, member, max_unseen_rows)
        place = writer.add(member.id, state, held_out)
        clients.append(place | _describe_client(member, experiment, accuracy))
    writer.close()
    index = {
        "run": _hash_config(folder),
        "round": experiment.progress.round,
        "algorithm": experiment.algorithm.name,
        "classes": list(experiment.federation.classes),
        "dim": experiment.federation.task.dim,
        "has_prototypes": "prototypes" in experiment.progress.server,
        "threads": experiment.config.threads,
        "precision": experiment.config.precision,
        "layouts": writer.layouts,
        "clients": clients,
    }
    folder.write_json(INDEX, index)
    writer.remove_other_shards()


def _describe_client(
    member: Member, experiment: Experiment, accuracy: Mapping[str, float]
) -> dict[str, Any]:
    names = experiment.federation.classes
    preprocessing = member.preprocessing
    return {
        "dataset": member.dataset,
        "model": member.model,
        "is_from_python": experiment.config.model == (FROM_PYTHON,),
        "own_classes": [names[label] for label in member.classes],
        "preprocessing": {
            "shape": list(preprocessing.shape),
            "mean": [float(value) for value in preprocessing.mean],
            "std": [float(value) for value in preprocessing.std],
            "scale": float(preprocessing.scale),
        },
        "accuracy": dict(accuracy),
    }


class _ShardWriter:
    """Packs clients into shards, and stores equal weights once.

    A layout says of each of a client's weights in whose entry it is; most clients share a layout.
    """

    def __init__(self, folder: RunFolder, round: int) -> None:
        self.layouts: list[dict[str, int | str]] = []
        self._folder = folder
        self._round = round
        self._shard = 0
        self._pending: Tree = {}
        self._pending_bytes = 0
        self._owner_of: dict[str, int] = {}  # by the hash of a tensor with its name
        self._written: set[str] = set()
        path = folder.path / CLIENT_MODELS
        path.mkdir(exist_ok=True)
        remove_leftovers(path)

    def add(self, client: int, state: Tree, held_out: Tree) -> dict[str, int]:
        """Add a client; return the numbers of its shard and of its layout."""
        layout: dict[str, int | str] = {}
        for name, value in state.items():
            digest = hash_tensors({name: value})
            owner = self._owner_of.setdefault(digest, client)
            layout[name] = OWN if owner == client else owner
            if owner == client:
                self._append(f"{client}.{WEIGHTS}.{name}", value)
        for name, value in held_out.items():
            self._append(f"{client}.{name}", value)
        if layout not in self.layouts:
            self.layouts.append(layout)
        place = {"shard": self._shard, "layout": self.layouts.index(layout)}
        if self._pending_bytes >= SHARD_BYTES:
            self.close()
        return place

    def _append(self, key: str, value: Tensor) -> None:
        self._pending[key] = value
        self._pending_bytes += value.nbytes

    def close(self) -> None:
        """Write the tensors added since the last shard as a shard of their own."""
        if not self._pending:
            return
        path = _shard_path(self._folder, self._round, self._shard)
        header = {"run": _hash_config(self._folder)}
        write_tensors(path, self._pending, SHARD_FORMAT, SHARD_VERSION, header)
        self._written.add(path.name)
        self._pending = {}
        self._pending_bytes = 0
        self._shard += 1

    def remove_other_shards(self) -> None:
        """Delete the shards of an earlier index."""
        for path in (self._folder.path / CLIENT_MODELS).glob("*.safetensors"):
            if path.name not in self._written:
                path.unlink()


def _hash_config(folder: RunFolder) -> str:
    return hashlib.sha256((folder.path / "config.toml").read_bytes()).hexdigest()


def _shard_path(folder: RunFolder, round: int, shard: int) -> Path:
    return folder.path / CLIENT_MODELS / f"round-{round:08d}-{shard:05d}.safetensors"


# --- reading


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
        shard = self._entry(client).index("shard", 10**5)
        path = _shard_path(self.folder, self.round, shard)
        tensors, header = read_tensors(path, SHARD_FORMAT, SHARD_VERSION)
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
