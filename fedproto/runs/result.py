"""The result of a run, as `fedproto.run` returns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.core.types import Tree


@dataclass(frozen=True)
class Result:
    """The result of a run; `data` is the content of result.json without version and checksum."""

    data: dict[str, Any] = field(repr=False)
    #: One line of metrics.jsonl per round.
    metrics: list[dict[str, Any]] = field(repr=False)
    #: The server's `prototypes` (C, d) and `known` (C,), if the algorithm has them.
    prototypes: Tree = field(repr=False)
    #: Each client's own parameters and buffers by name.
    states: list[Tree] = field(repr=False)
    folder: Path | None = None

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """Mean and std over clients of `head`, `head_own`, `prototype` and `prototype_own`."""
        return self.data["accuracy"]

    @property
    def clients(self) -> list[dict[str, Any]]:
        """What is known of each client: data, model, classes, accuracy and traffic."""
        return self.data["clients"]

    @property
    def communication(self) -> dict[str, Any]:
        """Values sent per round, and all bytes up and down."""
        return self.data["communication"]

    def __repr__(self) -> str:
        accuracies = []
        for name, value in self.accuracy.items():
            accuracies.append(f"{name} {value['mean']:.2%} ± {value['std']:.2%}")
        run = f"{self.data['algorithm']} on {self.data['dataset']}, {self.data['rounds']} rounds"
        return f"<{run}: {', '.join(accuracies)}>"
