"""The clients' trained models in a run folder, for use without the run's data and engine.

models/index.json               how each client's model is built, what it takes, and in which
                                shard its tensors are
models/round-R-N.safetensors    shard N: weights as they are evaluated after round R, what the
                                models make of held-out test rows, and what is near the hardest

A tensor that several clients share, such as the server's model, is stored once. Shards are written
before the index, so an index never names a shard that is not there. A file holds no code: a model
is built from its configured text, or its module is passed by the caller.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedproto.core.federation import Member
from fedproto.core.files import TensorFormat, hash_tensors, remove_leftovers, write_tensors
from fedproto.core.types import Tree
from fedproto.runs import held_out
from fedproto.runs.folder import CLIENT_MODELS, RunFolder
from fedproto.runs.from_settings import FROM_PYTHON
from fedproto.runs.hard_rows import find_hard_rows
from fedproto.runs.teacher_files import TEACHER_FILE, teacher_of, write_teacher

if TYPE_CHECKING:
    from fedproto.runs.experiment import Experiment

INDEX = f"{CLIENT_MODELS}/index.json"
SHARD_FORMAT = TensorFormat("models", 1)
SHARD_BYTES = 32 * 2**20  # a shard is closed once it holds this much
WEIGHTS = "weights"
OWN = "own"  # stands in a layout for the client whose layout it is


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
    max_unseen_rows = max(1, held_out.MAX_UNSEEN_ROWS_PER_RUN // len(members))
    modules: dict[int, nn.Module] = {}
    teacher = teacher_of(experiment)
    weights = experiment.teacher_weights()
    writer = _ShardWriter(folder, experiment.best_round)
    clients = []
    for member, own_state, accuracy in zip(members, own_states, accuracies, strict=True):
        state = experiment.as_evaluated(member, own_state)
        if id(member.module) not in modules:
            modules[id(member.module)] = copy.deepcopy(member.module).eval()
        module = modules[id(member.module)]
        # Of a layer that is there twice, the state has the first name only.
        module.load_state_dict(state, strict=False)
        own_teacher = None if teacher is None else teacher.of_client(member.id)
        outputs = held_out.compute_held_out(module, member, max_unseen_rows, own_teacher)
        outputs |= find_hard_rows(
            module,
            member,
            experiment.federation.partition["clients"][member.id],
            outputs,
            experiment.progress.server,
            own_teacher,
            with_training=experiment.budget is None,
        )
        place = writer.add(member.id, state, outputs)
        described = _describe_client(member, experiment, accuracy)
        if teacher is not None:
            described["teacher_weight"] = weights[member.id]
        clients.append(place | described)
    writer.close()
    if teacher is not None:
        write_teacher(folder.path / TEACHER_FILE, teacher)
    index = {
        "run": folder.hash_settings(),
        "round": experiment.best_round,
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
        "name": member.name,
        "dataset": member.dataset,
        "model": member.model,
        "is_from_python": experiment.config.model == (FROM_PYTHON,),
        "own_classes": [names[label] for label in member.classes],
        "train": len(member.train),
        "preprocessing": {
            "shape": list(preprocessing.shape),
            "mean": [float(value) for value in preprocessing.mean],
            "std": [float(value) for value in preprocessing.std],
            "scale": float(preprocessing.scale),
            "channel_order": preprocessing.channel_order,
            "window": None if preprocessing.window is None else list(preprocessing.window),
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

    def add(self, client: int, state: Tree, outputs: Tree) -> dict[str, int]:
        """Add a client's weights and outputs; return the numbers of its shard and layout."""
        layout: dict[str, int | str] = {}
        for name, value in state.items():
            digest = hash_tensors({name: value})
            owner = self._owner_of.setdefault(digest, client)
            layout[name] = OWN if owner == client else owner
            if owner == client:
                self._append(f"{client}.{WEIGHTS}.{name}", value)
        for name, value in outputs.items():
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
        path = shard_path(self._folder, self._round, self._shard)
        header = {"run": self._folder.hash_settings()}
        write_tensors(path, self._pending, SHARD_FORMAT, header)
        self._written.add(path.name)
        self._pending = {}
        self._pending_bytes = 0
        self._shard += 1

    def remove_other_shards(self) -> None:
        """Delete the shards of an earlier index."""
        for path in (self._folder.path / CLIENT_MODELS).glob("*.safetensors"):
            if path.name not in self._written:
                path.unlink()


def shard_path(folder: RunFolder, round: int, shard: int) -> Path:
    return folder.path / CLIENT_MODELS / f"round-{round:08d}-{shard:05d}.safetensors"
