"""What a run found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.core.types import Tree


@dataclass(frozen=True)
class Result:
    """What a run found; `data` is the content of result.json, less its version and checksum."""

    data: dict[str, Any] = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)  # a line a round
    prototypes: Tree = field(
        repr=False
    )  # the server's: `prototypes` (C, d) and `known` (C,), where it has them
    states: list[Tree] = field(repr=False)  # each client's own parameters and buffers, by name
    folder: Path | None = None

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """`head`, `head_own`, `prototype`, `prototype_own`: mean and standard deviation over clients."""
        return self.data["accuracy"]

    @property
    def clients(self) -> list[dict[str, Any]]:
        return self.data["clients"]

    @property
    def communication(self) -> dict[str, Any]:
        return self.data["communication"]

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name} {a['mean']:.2%} ± {a['std']:.2%}" for name, a in self.accuracy.items()
        )
        return f"<{self.data['algorithm']} on {self.data['dataset']}, {self.data['rounds']} rounds: {shown}>"
