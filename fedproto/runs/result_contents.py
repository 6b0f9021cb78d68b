"""The content of result.json: what a finished run reports about itself and about each client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fedproto.core.federation import Federation
from fedproto.core.measurement import MeasuredClient
from fedproto.core.metrics import summarise
from fedproto.core.types import Tree
from fedproto.runs.devices import describe_machine
from fedproto.runs.metric_contents import (
    describe_client_metrics,
    describe_majority,
    describe_metrics,
)

if TYPE_CHECKING:
    from fedproto.runs.experiment import Experiment


def describe_run(
    experiment: Experiment,
    lines: list[dict[str, Any]],
    accuracies: Tree,
    measured: dict[int, MeasuredClient],
) -> dict[str, Any]:
    """Return the content of result.json, apart from its version and checksum.

    Args:
        experiment: the finished run.
        lines: the lines of metrics.jsonl, one per round.
        accuracies: for each way to predict, one value per client, (clients,).
        measured: all metrics of each client, by its number.
    """
    config = experiment.config
    federation = experiment.federation
    rounds = experiment.progress.round
    traffic = experiment.progress.ledger.total()
    seconds = sum(line["seconds"] for line in lines)
    images = count_training_images(federation)
    clients = []
    for number in range(len(federation.members)):
        accuracy = {name: float(values[number]) for name, values in accuracies.items()}
        client = _describe_client(experiment, number, accuracy, images[number])
        clients.append(client | {"metrics": describe_client_metrics(measured[number])})
    return {
        "algorithm": experiment.algorithm.name,
        "transform": ",".join(str(part) for part in config.transform),
        "dataset": ",".join(part.name for part in config.dataset),
        "seed": config.seed,
        "rounds": rounds,
        "classes": list(federation.classes),
        "rows": federation.rows,
        "partition": federation.partition["sha256"],
        "clients": clients,
        "accuracy": summarise(accuracies),
        "metrics": describe_metrics(federation, measured),
        "baselines": {"majority": describe_majority(federation)},
        "diverged": _list_diverged(experiment),
        "communication": {
            "values_per_round": traffic["values_up"] / rounds,
            "bytes_up": traffic["bytes_up"],
            "bytes_down": traffic["bytes_down"],
        },
        "seconds": {"total": seconds, "per_round": seconds / rounds},
        "machine": describe_machine(federation.device),
        **_describe_privacy(experiment),
        **_describe_asynchrony(lines),
        **_describe_validation(experiment, lines),
    }


def describe_last_round(
    federation: Federation, accuracies: Tree, measured: dict[int, MeasuredClient]
) -> dict[str, Any]:
    """Return `last_round` of result.json: the last round on test rows, beside the best one.

    `accuracies` and `measured` are those of `describe_run`.
    """
    clients = []
    for number in range(len(federation.members)):
        accuracy = {name: float(values[number]) for name, values in accuracies.items()}
        metrics = describe_client_metrics(measured[number])
        clients.append({"accuracy": accuracy, "metrics": metrics})
    return {"accuracy": summarise(accuracies), "clients": clients}


def _describe_privacy(experiment: Experiment) -> dict[str, Any]:
    """Return the claim of a private run; nothing for another one."""
    claim = experiment.claim()
    return {} if claim is None else {"privacy": claim.describe()}


def _describe_asynchrony(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the simulated time and the mean staleness of all uploads that arrived.

    Nothing for a run with synchronous rounds.
    """
    if "clock" not in lines[-1]:
        return {}
    uploads = sum(len(line["participants"]) for line in lines)
    late = sum(line["staleness"] * len(line["participants"]) for line in lines)
    staleness = late / uploads if uploads else 0.0
    return {"asynchronous": {"clock": lines[-1]["clock"], "staleness": staleness}}


def _describe_validation(experiment: Experiment, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the best round was chosen by; nothing for a run without validation.

    `accuracy` is that of the best round on the validation rows. `stopped_round` is the last one.
    """
    if experiment.best_state is None:
        return {}
    best = experiment.best_state.best
    (accuracy,) = [line["validation"] for line in lines if line["round"] == best.round]
    rows = [len(member.examples_of("validation")) for member in experiment.federation.members]
    validation = {
        "select_by": best.find_name(accuracy),
        "score": best.score,
        "rows": sum(rows),
        "accuracy": accuracy,
    }
    return {
        "validation": validation,
        "best_round": best.round,
        "stopped_round": experiment.progress.round,
    }


def _describe_client(
    experiment: Experiment, number: int, accuracy: dict[str, float], images: list[int]
) -> dict[str, Any]:
    """Return a client's entry of result.json; `images` are counts per class of the client."""
    progress = experiment.progress
    member = experiment.federation.members[number]
    names = experiment.federation.classes
    described = {
        "id": number,
        "name": member.name,
        "dataset": member.dataset,
        "model": member.model,
        "classes": [names[label] for label in member.classes],
        "images": images,  # training images of each of these classes
        "train": len(member.train),
        "test": len(member.test),
        "accuracy": accuracy,
        "communication": progress.ledger.of(number),
    }
    if member.validation is not None:
        described["validation"] = len(member.validation)
    if experiment.algorithm.remembers:
        described["last_upload"] = int(progress.latest_uploads.last_round[number])
    return described


def _list_diverged(experiment: Experiment) -> list[dict[str, Any]] | None:
    """List the clients whose loss exploded and the first round in which it did, or return None."""
    members = experiment.federation.members
    listed = []
    for client, round in sorted(experiment.progress.diverged.items()):
        listed.append({"client": client, "name": members[client].name, "round": round})
    return listed or None


def count_training_images(federation: Federation) -> list[list[int]]:
    """Count each client's training images per class it has, with one wait for the device."""
    members = federation.members
    classes = len(federation.classes)
    cells = []
    for member in members:
        labels = member.train.y[member.train.rows]
        cells.append(labels + member.id * classes)
    counts = torch.bincount(torch.cat(cells), minlength=len(members) * classes)
    table = counts.view(len(members), classes).tolist()
    images = []
    for member in members:
        row = table[member.id]
        images.append([row[label] for label in member.classes])
    return images
