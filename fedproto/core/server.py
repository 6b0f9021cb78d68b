"""How far a federation has come: the server's state, the traffic so far, and the latest uploads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedproto.core.engine import errors_named
from fedproto.core.federation import Federation
from fedproto.core.tensors import find_mismatch, flatten_groups, split_groups
from fedproto.core.traffic import Ledger
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.errors import shown


@dataclass
class Progress:
    """The state of a run apart from the clients' own states; a checkpoint holds both."""

    server: Tree
    ledger: Ledger
    latest_uploads: LatestUploads
    round: int = 0  # the last completed round
    #: The smallest mean of each term over the rounds so far.
    smallest_loss: dict[str, float] = field(default_factory=dict)
    #: Clients whose loss exploded, and the round in which it first did.
    diverged: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, federation: Federation, algorithm: Algorithm) -> Progress:
        """Return the progress of a federation before its first round."""
        clients = len(federation.members)
        with errors_named(f"the server of {algorithm.name}, before round 1"):
            server = algorithm.init(federation.members[0].initial, federation.task)
            check_server_state(server, "init")
        return cls(server, Ledger(clients), LatestUploads(clients))

    def look_back(self, lines: Sequence[dict[str, Any]]) -> None:
        """Read from the lines of earlier rounds how small the losses were, and whose exploded."""
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
        """Return everything a checkpoint holds of the server, as one flat tree."""
        tree = flatten_groups({"server": self.server})
        tree["ledger"] = self.ledger.counts
        return tree | self.latest_uploads.export()

    def restore(self, tree: Tree, round: int) -> None:
        """Continue from what `export` returned after a round; ValueError says what does not fit."""
        groups = split_groups(tree)
        stored = groups.get("server", {})
        self._refuse_mismatches(tree, groups)
        server = {name: value.to(self.server[name].device) for name, value in stored.items()}
        self.latest_uploads = LatestUploads.restore(
            tree,
            clients=len(self.latest_uploads.last_round),
            row_shapes={name: value.shape for name, value in server.items()},
            device=next((value.device for value in server.values()), torch.device("cpu")),
        )
        self.server = server
        self.ledger.counts = tree["ledger"]
        self.round = round

    def _refuse_mismatches(self, tree: Tree, groups: dict[str, Tree]) -> None:
        """Refuse tensors whose names, shapes or types are not those of this federation."""
        unexpected = groups.keys() - {"server", "client", "ledger", "last", *Upload._fields}
        if unexpected:
            raise ValueError(f"it has no {shown(min(unexpected), 80)}")
        ledger = {name: value for name, value in tree.items() if name == "ledger"}
        mismatch = find_mismatch(self.server, groups.get("server", {}))
        mismatch = mismatch or find_mismatch({"ledger": self.ledger.counts}, ledger)
        if mismatch is not None:
            raise ValueError(mismatch)


def check_server_state(state: Any, function: str) -> Tree:
    """Return the state an algorithm's function made; TypeError unless it is a dict of tensors."""
    if isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values()):
        return state
    kind = type(state).__name__
    raise TypeError(f"{function} must return a dict of tensors by name, not {kind}")
