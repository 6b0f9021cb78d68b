"""How far a federation has come: the server's state, the traffic so far, and the latest uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedproto.core.engine import errors_named
from fedproto.core.federation import Federation
from fedproto.core.tensors import (
    find_mismatch,
    flatten_groups,
    flatten_state,
    split_groups,
    unflatten_state,
)
from fedproto.core.traffic import Ledger
from fedproto.core.types import Algorithm, GroupLayout, State, Tree
from fedproto.core.uploads import LatestUploads
from fedproto.errors import shown

#: The group of exported tensors of what clients send once.
_ONCE = "once"


@dataclass
class Progress:
    """The state of a run apart from the clients' own states; a checkpoint holds both."""

    server: State
    ledger: Ledger
    latest_uploads: LatestUploads
    layouts: Mapping[str, GroupLayout]  # of the groups of an upload
    round: int = 0  # the last completed round
    #: The groups that clients send once; empty unless the algorithm has such groups.
    once_uploads: LatestUploads = field(default_factory=lambda: LatestUploads(0))
    #: The smallest mean of each term over the rounds so far.
    smallest_loss: dict[str, float] = field(default_factory=dict)
    #: Clients whose loss exploded, and the round in which it first did.
    diverged: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, federation: Federation, algorithm: Algorithm) -> Progress:
        """Return the progress of a federation before its first round."""
        clients = len(federation.members)
        with errors_named(f"the server of {algorithm.name}, before round 1"):
            first = federation.members[0].initial
            server = algorithm.init(first, federation.task)
            check_server_state(server, "init")
            layouts = algorithm.declare(first, federation.task)
        progress = cls(server, Ledger(clients), LatestUploads(clients), layouts)
        progress.once_uploads = LatestUploads(clients)
        return progress

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
        tree = flatten_groups({"server": flatten_state(self.server)})
        tree["ledger"] = self.ledger.counts
        tree |= self.latest_uploads.export()
        if self.once_uploads.uploads is not None:
            tree |= flatten_groups({_ONCE: self.once_uploads.export()})
        return tree

    def restore(self, tree: Tree, round: int) -> None:
        """Continue from what `export` returned after a round; ValueError says what does not fit."""
        groups = split_groups(tree)
        stored = groups.get("server", {})
        self._refuse_mismatches(tree, groups)
        fresh = flatten_state(self.server)
        server = {name: value.to(fresh[name].device) for name, value in stored.items()}
        clients = len(self.latest_uploads.last_round)
        device = next((value.device for value in server.values()), torch.device("cpu"))
        self.latest_uploads = LatestUploads.restore(tree, clients, self.layouts, device)
        self.once_uploads = LatestUploads(clients)
        if _ONCE in groups:
            stored_once = LatestUploads.restore(groups[_ONCE], clients, self.layouts, device)
            self.once_uploads = stored_once
        self.server = unflatten_state(server)
        self.ledger.counts = tree["ledger"]
        self.round = round

    def _refuse_mismatches(self, tree: Tree, groups: dict[str, Tree]) -> None:
        """Refuse tensors whose names, shapes or types are not those of this federation."""
        unexpected = groups.keys() - {"server", "client", "ledger", "last", "uploads", _ONCE}
        if unexpected:
            raise ValueError(f"it has no {shown(min(unexpected), 80)}")
        ledger = {name: value for name, value in tree.items() if name == "ledger"}
        mismatch = find_mismatch(flatten_state(self.server), groups.get("server", {}))
        mismatch = mismatch or find_mismatch({"ledger": self.ledger.counts}, ledger)
        if mismatch is not None:
            raise ValueError(mismatch)


def check_server_state(state: Any, function: str) -> State:
    """Return the state that an algorithm's function made.

    Raises TypeError unless it is a dict of tensors, or of trees of tensors.
    """
    if isinstance(state, dict):
        flat = flatten_state(state)
        if all(isinstance(value, Tensor) for value in flat.values()):
            return state
    kind = type(state).__name__
    raise TypeError(f"{function} must return a dict of tensors by name, not {kind}")
