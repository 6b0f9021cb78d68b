"""Where a federation stands: the server's state, the traffic so far, and the latest uploads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedproto.core.engine import errors_named
from fedproto.core.federation import Federation
from fedproto.core.tensors import FLOATS, flat, misfit, parted
from fedproto.core.traffic import Ledger
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.core.uploads import Memory
from fedproto.errors import shown


@dataclass
class Progress:
    """All that a run is, apart from the clients' own states: kept in a checkpoint, continued from one."""

    server: Tree
    ledger: Ledger
    memory: Memory
    round: int = 0
    smallest_loss: dict[str, float] = field(default_factory=dict)  # of each term, of all rounds so far: the mean
    diverged: dict[int, int] = field(default_factory=dict)  # clients whose loss exploded, and when it first did

    @classmethod
    def start(cls, federation: Federation, algorithm: Algorithm) -> Progress:
        clients = len(federation.members)
        with errors_named(f"the server of {algorithm.name}, before round 1"):
            server = _tree(algorithm.init(federation.members[0].initial, federation.task), "init")
        return cls(server, Ledger(clients), Memory(clients))

    def look_back(self, lines: Sequence[dict[str, Any]]) -> None:
        """Learn from the lines of earlier rounds how small the losses were, and whose exploded."""
        self.smallest_loss = {}
        self.diverged = {}
        for line in lines:
            self.note_losses(line["loss"])
            for client in line.get("diverged", ()):
                self.diverged.setdefault(client, line["round"])

    def note_losses(self, means: dict[str, float]) -> None:
        """Remember the smallest positive mean of each term."""
        for name, mean in means.items():
            if mean > 0:
                self.smallest_loss[name] = min(mean, self.smallest_loss.get(name, mean))

    def export(self) -> Tree:
        tree = flat({"server": self.server}) | {"ledger": self.ledger.counts, "last": self.memory.last}
        return tree if self.memory.uploads is None else tree | flat(self.memory.uploads._asdict())

    def restore(self, tree: Tree, round: int) -> None:
        """Take up what `export` gave; ValueError says what does not fit."""
        parts = parted(tree)
        self._refuse_misfits(tree, parts)
        self.server = {name: value.to(self.server[name].device) for name, value in parts.get("server", {}).items()}
        self.ledger.counts, self.memory.last, self.round = tree["ledger"], tree["last"], round
        device = next((value.device for value in self.server.values()), torch.device("cpu"))
        sums, weights = ({n: v.to(device) for n, v in parts.get(group, {}).items()} for group in Upload._fields)
        self.memory.uploads = Upload(sums, weights) if sums else None

    def _refuse_misfits(self, tree: Tree, parts: dict[str, Tree]) -> None:
        """Refuse tensors of other names, shapes or types than this federation's."""
        counts = {"ledger": self.ledger.counts, "last": self.memory.last}
        found = {name: tree[name] for name in counts if name in tree}
        odd = misfit(self.server, parts.get("server", {})) or misfit(counts, found)
        strangers = parts.keys() - {"server", "client", *counts, *Upload._fields}
        if strangers:
            odd = f"it has no {shown(min(strangers), 80)}"
        if odd is None:
            odd = self._find_odd_upload(Upload(*(parts.get(group, {}) for group in Upload._fields)))
        if odd is not None:
            raise ValueError(odd)

    def _find_odd_upload(self, uploads: Upload) -> str | None:
        """What is wrong with remembered uploads: each has a row per client, like the server's own tensors."""
        if not uploads.sums and not uploads.weights:
            return None
        if "weight" not in uploads.weights:
            return "there is no weights.weight"
        rows = uploads.weights["weight"].shape
        for group, values in uploads._asdict().items():
            for name, value in values.items():
                wanted = (len(self.memory.last), *self.server[name].shape) if name in self.server else value.shape
                fits = value.shape == wanted and value.shape[: len(rows)] == rows and value.dtype in FLOATS
                if not fits or len(value) != len(self.memory.last):
                    return f"{group}.{shown(name, 80)} is {tuple(value.shape)} of {value.dtype}"
        return None


def _tree(made: Any, function: str) -> Tree:
    """The server's state; an algorithm from outside may return anything."""
    if not isinstance(made, dict) or not all(isinstance(value, Tensor) for value in made.values()):
        raise TypeError(f"{function} must return a dict of tensors by name, not {type(made).__name__}")
    return made
