"""What is asked of trained models, once a run is over: its folder's checkpoint is opened again."""

from __future__ import annotations

import io
import json
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from fedproto.core.files import seal, write_atomically
from fedproto.core.local_training import embed, evaluate
from fedproto.core.prototypes import class_means, nearest
from fedproto.core.types import Tree
from fedproto.errors import RunFolderError
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import VERSION, RunFolder

EACH = 20  # test images a class and client whose embeddings are kept


def look(folder: RunFolder, after: dict[str, bool]) -> None:
    """Make what is wanted of a finished run and is not there yet."""
    wanted = {
        "embeddings": ("embeddings.npz", _embeddings),
        "travel": ("travel.json", _travel),
        "before": ("before.json", _before),
    }
    for name, (file, make) in wanted.items():
        if after.get(name) and not (folder.path / file).exists():
            if not folder.checkpoint_round():
                raise RunFolderError(
                    f"{folder.path} has no checkpoint to make {file} of: delete it to run it again"
                )
            experiment, _ = reopen(folder)
            with (
                closing(experiment.engine),
                torch_settings(experiment.config.threads, experiment.config.precision),
            ):
                write_atomically(folder.path / file, make(experiment))


def _embeddings(experiment: Experiment) -> bytes:
    """Some test images' embeddings by each client's model, with the client's class means over its training images."""
    found: dict[str, list[np.ndarray]] = {
        "x": [],
        "y": [],
        "client": [],
        "local": [],
        "local_y": [],
        "local_client": [],
    }
    classes = len(experiment.federation.classes)
    for member, own in zip(experiment.federation.members, experiment.client_states(), strict=True):
        state = experiment.as_evaluated(member, own)
        x, y = embed(member.module, state, member.test)
        keep = torch.cat(
            [_some((y == label).nonzero().flatten(), member.id) for label in member.classes]
        )
        trained, labels = embed(member.module, state, member.train)
        means, counts = class_means(trained, labels, torch.ones_like(trained[:, 0]), classes)
        held = (counts > 0).nonzero().flatten()
        for name, value in {
            "x": x[keep],
            "y": y[keep],
            "local": means[held],
            "local_y": held,
        }.items():
            found[name].append(value.cpu().numpy())
        found["client"].append(np.full(len(keep), member.id))
        found["local_client"].append(np.full(len(held), member.id))
    file = io.BytesIO()
    np.savez_compressed(
        file,
        **{name: np.concatenate(parts) for name, parts in found.items()},
        **_global(experiment),
    )  # type: ignore[arg-type]
    return file.getvalue()


def _some(rows: Tensor, client: int) -> Tensor:
    """EACH of a class's images, other ones for each client: equal images would look like equal models."""
    return rows.roll(-client * EACH)[:EACH]


def _global(experiment: Experiment) -> dict[str, np.ndarray]:
    server = experiment.progress.server
    return {name: server[name].cpu().numpy() for name in ("prototypes", "known") if name in server}


def _travel(experiment: Experiment) -> bytes:
    """Each client's nearest-prototype accuracy among its own classes, with and without its share of the prototypes.

    A class that nobody else holds has no prototype then, and its images count as wrong; `covered` is the share of the
    client's classes that somebody else holds.
    """
    uploads, server = experiment.progress.latest_uploads.uploads, experiment.progress.server
    assert uploads is not None, "FedProto remembers its members' last uploads"
    sums, weights = uploads.sums["prototypes"], uploads.weights["weight"]
    clients = []
    for member, own in zip(experiment.federation.members, experiment.client_states(), strict=True):
        state = experiment.as_evaluated(member, own)
        seen = embed(member.module, state, member.test)
        others = _without(sums, weights, member.id)
        clients.append(
            {
                "id": member.id,
                "with_own": _right(*seen, server, member.classes),
                "without_own": _right(*seen, others, member.classes),
                "covered": float(others["known"][list(member.classes)].mean()),
            }
        )
    return json.dumps(seal({"clients": clients}, VERSION)).encode()


def _before(experiment: Experiment) -> bytes:
    """What the initial weights know: each client's head, and the nearest of the prototypes they would make together."""
    members, classes = experiment.federation.members, len(experiment.federation.classes)
    sums, counts = torch.tensor(0.0), torch.tensor(0.0)
    for member in members:
        x, y = embed(member.module, member.initial, member.train)
        means, held = class_means(x, y, torch.ones_like(x[:, 0]), classes)
        sums, counts = sums.to(x.device) + means * held[:, None], counts.to(x.device) + held
    server = {
        "prototypes": sums / counts.clamp(min=1)[:, None],
        "known": (counts > 0).to(sums.dtype),
    }
    clients = []
    for member in members:
        found = evaluate(member, experiment.algorithm, member.initial, server)
        clients.append({"id": member.id, **found})
    return json.dumps(seal({"clients": clients}, VERSION)).encode()


def _right(features: Tensor, y: Tensor, server: Tree, classes: tuple[int, ...]) -> float:
    """The share of images whose nearest prototype, among these classes, is their own's."""
    own = torch.zeros_like(server["known"])
    own[list(classes)] = 1
    known = server["known"] * own
    return float(
        ((nearest(features, server["prototypes"], known) == y) & (known[y] > 0)).double().mean()
    )


def _without(sums: Tensor, weights: Tensor, client: int) -> Tree:
    """The global prototypes of all but one."""
    rest = torch.arange(len(sums), device=sums.device) != client
    weight = weights[rest].sum(0)
    return {
        "prototypes": sums[rest].sum(0) / weight.clamp(min=1e-12)[:, None],
        "known": (weight > 0).to(sums.dtype),
    }
