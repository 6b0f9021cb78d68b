"""Runs for whoever keeps track of them: a round as plain numbers by name, and those numbers in TensorBoard.

for found in fedproto.stream(dataset="mnist5k", rounds=50):
    wandb.log(scalars(found))
"""

from __future__ import annotations

import importlib
from pathlib import Path

from fedproto.core.rounds import RoundResult
from fedproto.errors import need
from fedproto.runs.experiment import OnRound
from fedproto.runs.result import Result


def scalars(found: RoundResult | Result) -> dict[str, float]:
    """The numbers of a round, or of a finished run under `final/`, by name; accuracies are means over clients."""
    if isinstance(found, Result):
        traffic = {
            f"final/{name}": found.communication[name] for name in ("bytes_up", "bytes_down")
        }
        return {
            "round": found.data["rounds"],
            **_accuracies("final/accuracy", found.accuracy),
            **traffic,
        }
    return {
        "round": found.round,
        **{f"loss/{name}": value for name, value in found.loss.items()},
        **_accuracies("accuracy", found.accuracy or {}),
        "bytes_up": found.bytes_up,
        "bytes_down": found.bytes_down,
        "seconds": found.seconds,
    }


def _accuracies(prefix: str, accuracy: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"{prefix}/{name}": value["mean"] for name, value in accuracy.items()}


def tensorboard(folder: str | Path) -> OnRound:
    """What `on_round` takes to write each round's numbers to a folder that TensorBoard shows."""
    need("tensorboard", "'fedproto[tensorboard]'", "tracking by TensorBoard")
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def on_round(result: RoundResult) -> None:
        for name, value in scalars(result).items():
            if name != "round":
                writer.add_scalar(name, value, result.round)
        writer.flush()  # so that a run can be watched, and nothing is lost with it

    return on_round
