"""Experiment tracking: a round as plain numbers by name, and those numbers in TensorBoard.

for found in fedproto.stream(dataset="mnist5k", rounds=50):
    wandb.log(scalars(found))
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedproto.core.rounds import RoundResult
from fedproto.core.types import Tree
from fedproto.errors import need
from fedproto.runs.metric_contents import shown_metrics
from fedproto.runs.result import Result


def scalars(found: RoundResult | Result, *, clients: bool = False) -> dict[str, float]:
    """Return the numbers of a round, or of a finished run under `final/`, by name.

    Accuracies are means over clients. With `clients`, those of each client follow under
    `client/NUMBER/`, in rounds that were evaluated on test rows.
    """
    if isinstance(found, Result):
        return _scalars_of_run(found)
    numbers: dict[str, float] = {"round": found.round}
    for name, value in found.loss.items():
        numbers[f"loss/{name}"] = value
    numbers |= _mean_accuracies("accuracy", found.accuracy or {})
    numbers |= _mean_accuracies("validation", found.validation or {})
    numbers["bytes_up"] = found.bytes_up
    numbers["bytes_down"] = found.bytes_down
    numbers["seconds"] = found.seconds
    if clients and found.clients is not None:
        numbers |= _client_accuracies(found.clients)
    return numbers


def _client_accuracies(accuracies: Tree) -> dict[str, float]:
    """Return the accuracies of single clients; one without such rows has none."""
    numbers = {}
    for name, values in accuracies.items():
        for client, value in enumerate(values.tolist()):
            if math.isfinite(value):
                numbers[f"client/{client}/accuracy/{name}"] = value
    return numbers


def _scalars_of_run(result: Result) -> dict[str, float]:
    numbers: dict[str, float] = {"round": result.data["rounds"]}
    numbers |= _mean_accuracies("final/accuracy", result.accuracy)
    numbers |= _final_metrics(result.data.get("metrics", {}))
    if "validation" in result.data:
        numbers |= _mean_accuracies("final/validation", result.data["validation"]["accuracy"])
        numbers["final/best_round"] = result.data["best_round"]
    numbers["final/bytes_up"] = result.communication["bytes_up"]
    numbers["final/bytes_down"] = result.communication["bytes_down"]
    return numbers


def _final_metrics(metrics: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the means over clients and the worst clients' values of the metrics that have them."""
    numbers = {}
    for way, values in metrics.items():
        for name in shown_metrics(values):
            for statistic in ("mean", "worst"):
                value = values[name][statistic]
                if value is not None:
                    suffix = "" if statistic == "mean" else "/worst"
                    numbers[f"final/{name}/{way}{suffix}"] = value
    return numbers


def _mean_accuracies(prefix: str, accuracy: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"{prefix}/{name}": value["mean"] for name, value in accuracy.items()}


def tensorboard(
    folder: str | Path, *, clients: bool = False
) -> Callable[[RoundResult | Result], None]:
    """Return an `on_round` that writes each round's numbers to a folder for TensorBoard.

    With `clients`, there is a curve for every client, too.
    Called with the `Result` at the end, it writes the metrics of the finished run.
    """
    need("tensorboard", "'.[tensorboard]'", "tracking by TensorBoard")
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def on_round(found: RoundResult | Result) -> None:
        numbers = scalars(found, clients=clients)
        round = int(numbers.pop("round"))
        for name, value in numbers.items():
            writer.add_scalar(name, value, round)
        writer.flush()  # so that a run can be watched, and nothing is lost if it is killed

    return on_round
