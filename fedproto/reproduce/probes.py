"""Probes: what needs the trained models of a finished run, which its checkpoint holds.

embeddings  some test images' embeddings and the clients' class means (fig-tsne)
travel      accuracies with and without the client's own share of the prototypes (study-travel)
before      accuracies of the initial weights (study-before)

Each writes one file into the run folder.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedproto.core.federation import Member
from fedproto.core.files import seal, write_atomically
from fedproto.core.local_training import embed, evaluate
from fedproto.core.metrics import mark_correct
from fedproto.core.prototypes import class_means, scores
from fedproto.core.types import Tree
from fedproto.errors import RunFolderError
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import VERSION, RunFolder

#: Test images per class and client whose embeddings are kept.
IMAGES_PER_CLASS = 20


def probe_models(folder: RunFolder, wanted: dict[str, bool]) -> None:
    """Write the wanted probes of a finished run, by name, that its folder does not hold yet.

    Raises RunFolderError where the run has no checkpoint left.
    """
    for name, (file, make) in _PROBES.items():
        if not wanted.get(name) or (folder.path / file).exists():
            continue
        if not folder.checkpoint_round():
            raise RunFolderError(
                f"{folder.path} has no checkpoint to make {file} from: delete it to run it again"
            )
        experiment, _ = reopen(folder)
        config = experiment.config
        with closing(experiment.engine), torch_settings(config.threads, config.precision):
            write_atomically(folder.path / file, make(experiment))


def _members_with_states(experiment: Experiment) -> Iterator[tuple[Member, Tree]]:
    """Yield each client with its model's state as it is evaluated."""
    members = experiment.federation.members
    for member, own_state in zip(members, experiment.client_states(), strict=True):
        yield member, experiment.as_evaluated(member, own_state)


def _class_means(features: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean embedding of each class over all samples, and the number of its samples."""
    mask = torch.ones_like(features[:, 0])
    return class_means(features, y, mask, classes)


def _to_json(clients: list[dict[str, Any]]) -> bytes:
    return json.dumps(seal({"clients": clients}, VERSION)).encode()


# --- embeddings


def _make_embeddings(experiment: Experiment) -> bytes:
    """Return the npz file with some test images' embeddings and the clients' class means.

    x, y, client                  the embeddings, their classes and whose model made them
    local, local_y, local_client  the same for class means over the clients' training images
    prototypes, known             the global prototypes, where the algorithm has any
    """
    parts: dict[str, list[np.ndarray]] = {}
    classes = len(experiment.federation.classes)
    for member, state in _members_with_states(experiment):
        features, y = embed(member.module, state, member.test)
        kept = _choose_images(y, member)
        train_features, train_y = embed(member.module, state, member.train)
        means, counts = _class_means(train_features, train_y, classes)
        held = (counts > 0).nonzero().flatten()
        of_client = {
            "x": features[kept],
            "y": y[kept],
            "client": torch.full((len(kept),), member.id),
            "local": means[held],
            "local_y": held,
            "local_client": torch.full((len(held),), member.id),
        }
        for name, value in of_client.items():
            parts.setdefault(name, []).append(value.cpu().numpy())
    arrays: dict[str, Any] = {}
    for name, values in parts.items():
        arrays[name] = np.concatenate(values)
    server = experiment.progress.server
    for name in ("prototypes", "known"):
        if name in server:
            arrays[name] = server[name].cpu().numpy()
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _choose_images(y: Tensor, member: Member) -> Tensor:
    """Return the rows of IMAGES_PER_CLASS test images of each of the client's classes.

    They differ between clients: equal images would look like equal models.
    """
    chosen = []
    for label in member.classes:
        rows = (y == label).nonzero().flatten()
        chosen.append(rows.roll(-member.id * IMAGES_PER_CLASS)[:IMAGES_PER_CLASS])
    return torch.cat(chosen)


# --- travel


def _make_travel(experiment: Experiment) -> bytes:
    """Return each client's accuracy by the nearest prototype among its own classes, as JSON.

    with_own     with the global prototypes
    without_own  with those that the other clients' uploads make; a class that no other client
                 holds has no prototype then, and its images count as wrong
    covered      the fraction of the client's classes that some other client holds
    """
    uploads = experiment.progress.latest_uploads.uploads
    assert uploads is not None, "FedProto keeps its clients' latest uploads"
    sums = uploads["prototypes"].sums["prototypes"]
    weights = uploads["prototypes"].weight
    server = experiment.progress.server
    clients = []
    for member, state in _members_with_states(experiment):
        features, y = embed(member.module, state, member.test)
        others = _aggregate_without(sums, weights, member.id)
        own_classes = list(member.classes)
        clients.append(
            {
                "id": member.id,
                "with_own": _measure_accuracy(features, y, server, own_classes),
                "without_own": _measure_accuracy(features, y, others, own_classes),
                "covered": float(others["known"][own_classes].mean()),
            }
        )
    return _to_json(clients)


def _aggregate_without(sums: Tensor, weights: Tensor, client: int) -> Tree:
    """Return the global prototypes that all clients but one make.

    sums     (clients, C, d) weight × prototype
    weights  (clients, C)
    """
    is_other = torch.arange(len(sums), device=sums.device) != client
    weight = weights[is_other].sum(0)
    return {
        "prototypes": sums[is_other].sum(0) / weight.clamp(min=1e-12)[:, None],
        "known": (weight > 0).to(sums.dtype),
    }


def _measure_accuracy(features: Tensor, y: Tensor, server: Tree, own_classes: list[int]) -> float:
    """Return the fraction of images whose nearest prototype, among these classes, is their own."""
    prototype_scores = scores(features, server["prototypes"], server["known"])
    is_own = torch.zeros_like(server["known"], dtype=torch.bool)
    is_own[own_classes] = True
    correct = mark_correct({"prototype": prototype_scores}, y, is_own)
    return float(correct["prototype_own"].double().mean())


# --- before


def _make_before(experiment: Experiment) -> bytes:
    """Return each client's accuracies with its initial weights, as JSON.

    The prototypes are those that the initial weights of all clients would make together.
    """
    members = experiment.federation.members
    classes = len(experiment.federation.classes)
    sums = torch.zeros((), device=experiment.federation.device)
    counts = torch.zeros((), device=experiment.federation.device)
    for member in members:
        x, y = embed(member.module, member.initial, member.train)
        means, held = _class_means(x, y, classes)
        sums = sums + means * held[:, None]
        counts = counts + held
    server = {
        "prototypes": sums / counts.clamp(min=1)[:, None],
        "known": (counts > 0).to(sums.dtype),
    }
    clients = []
    for member in members:
        accuracies = evaluate(member, experiment.algorithm, member.initial, server)
        clients.append({"id": member.id, **accuracies})
    return _to_json(clients)


#: The file of each probe, and what makes its content.
_PROBES: dict[str, tuple[str, Callable[[Experiment], bytes]]] = {
    "embeddings": ("embeddings.npz", _make_embeddings),
    "travel": ("travel.json", _make_travel),
    "before": ("before.json", _make_before),
}
