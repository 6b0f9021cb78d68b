"""How far a federation has come: the server's state, the traffic so far, and the latest uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedproto.core.contract import check_declaration
from fedproto.core.engine import errors_named
from fedproto.core.federation import Federation
from fedproto.core.summation import Summation, add_round
from fedproto.core.tensors import (
    find_mismatch,
    flatten_groups,
    flatten_state,
    join_uploads,
    order_like,
    select_rows,
    split_groups,
    sum_uploads,
    unflatten_state,
)
from fedproto.core.traffic import Ledger
from fedproto.core.types import Algorithm, GroupLayout, SentOnce, State, Tree, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.errors import shown

#: The groups of exported tensors of what clients send once, and of uploads on their way.
ONCE = "once"
_IN_FLIGHT = "flight"
#: The exported tensor of `Progress.last_heard`; only where something is sent once.
_HEARD = "heard"


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
    #: The uploads of asynchronous rounds that have not arrived yet; see core/delivery.py.
    in_flight: LatestUploads = field(default_factory=lambda: LatestUploads(0))
    #: (clients,) the last round in which a client's upload arrived; 0: none has.
    last_heard: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    #: The smallest mean of each term over the rounds so far.
    smallest_loss: dict[str, float] = field(default_factory=dict)
    #: Clients whose loss exploded, and the round in which it first did.
    diverged: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, federation: Federation, algorithm: Algorithm) -> Progress:
        """Return the progress of a federation before its first round."""
        clients = len(federation.members)
        with errors_named(f"the server of {algorithm.name}, before round 1"):
            initial = federation.initial
            server = algorithm.init(initial, federation.task)
            check_server_state(server, "init")
            layouts = check_declaration(algorithm, algorithm.declare(initial, federation.task))
        progress = cls(server, Ledger(clients), LatestUploads(clients), layouts)
        progress.once_uploads = LatestUploads(clients)
        progress.in_flight = LatestUploads(clients)
        progress.last_heard = torch.zeros(clients, dtype=torch.int64)
        return progress

    def is_once_due(self, clients: Tensor) -> bool:
        """Return whether one of these clients has not sent the groups that it sends once."""
        return bool((self.once_uploads.last_round[clients] == 0).any())

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
            tree |= flatten_groups({ONCE: self.once_uploads.export()})
            tree[_HEARD] = self.last_heard
        if self.in_flight.uploads is not None:
            tree |= flatten_groups({_IN_FLIGHT: self.in_flight.export()})
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
        latest_uploads = LatestUploads.restore(tree, clients, self.layouts, device)
        once_uploads = LatestUploads(clients)
        if ONCE in groups:
            once_uploads = LatestUploads.restore(groups[ONCE], clients, self.layouts, device)
        in_flight = LatestUploads(clients)
        if _IN_FLIGHT in groups:
            in_flight = LatestUploads.restore(groups[_IN_FLIGHT], clients, self.layouts, device)
        last_heard = groups.get(_HEARD, {}).get("", torch.zeros(clients, dtype=torch.int64))
        if last_heard.shape != (clients,) or last_heard.dtype != torch.int64:
            raise ValueError(f"{_HEARD} is {tuple(last_heard.shape)} of {last_heard.dtype}")
        self.last_heard = last_heard
        self.latest_uploads = latest_uploads
        self.once_uploads = once_uploads
        self.in_flight = in_flight
        self.server = order_like(unflatten_state(server), self.server)
        self.ledger.counts = tree["ledger"]
        self.round = round

    def _refuse_mismatches(self, tree: Tree, groups: dict[str, Tree]) -> None:
        """Refuse tensors whose names, shapes or types are not those of this federation."""
        unexpected = groups.keys() - {
            "server",
            "client",
            "ledger",
            "last",
            "uploads",
            ONCE,
            _IN_FLIGHT,
            _HEARD,
        }
        if unexpected:
            raise ValueError(f"it has no {shown(min(unexpected), 80)}")
        ledger = {name: value for name, value in tree.items() if name == "ledger"}
        mismatch = find_mismatch(flatten_state(self.server), groups.get("server", {}))
        mismatch = mismatch or find_mismatch({"ledger": self.ledger.counts}, ledger)
        if mismatch is not None:
            raise ValueError(mismatch)


class RoundUploads:
    """The uploads that arrive in one round, and what they make of the server's state.

    The simulator's round loop and a deployed server both close their rounds with it.

    latest     keeps everybody's latest upload, where the algorithm remembers them
    once       keeps the groups that clients send once
    check      is called with uploads before they are summed
    keeps_all  whether `latest` keeps uploads that the algorithm does not remember, too
    members    clients that were sampled, where the algorithm has a `summation`
    """

    def __init__(
        self,
        algorithm: Algorithm,
        latest: LatestUploads,
        once: LatestUploads,
        round: int,
        check: Callable[[Upload], None] = lambda uploads: None,
        keeps_all: bool = False,
        members: int = 0,
    ) -> None:
        self.algorithm = algorithm
        self.members = members
        self.latest = latest
        self.once = once
        self.round = round
        self.check = check
        self.keeps_all = keeps_all or algorithm.remembers
        self.speakers: list[Tensor] = []
        self.uploads: Upload | None = None  # neither remembered nor sent once
        self.once_before = once.rounds()
        self.added: list[str] = []  # the groups that the algorithm's `summation` has added

    def receive(self, speakers: Tensor, uploads: Upload) -> None:
        """Add uploads to those so far, append them, or store them as the latest ones.

        uploads  with a leading axis over the speakers, or of length 1 if they are summed already
        """
        if self.algorithm.summation is None:
            uploads = self._store_once(speakers, uploads)
        if not len(speakers) or not uploads:
            return
        if self.keeps_all:
            self.latest.store(speakers, uploads, self.round)
            return
        self.speakers.append(speakers)
        if self.uploads is not None:
            uploads = join_uploads([self.uploads, uploads])
        if self.algorithm.additive:
            self.check(uploads)
            uploads = sum_uploads(uploads)
        self.uploads = uploads

    def _store_once(self, speakers: Tensor, uploads: Upload) -> Upload:
        """Keep the groups that are sent once, of clients that had not sent them; return the rest.

        This round's first uploads stay as they are: a client is due until its group has arrived.
        """
        if not self.algorithm.once or not uploads:
            return uploads
        is_due = self.once.last_round[speakers] == 0
        sent_once = {name: uploads[name] for name in self.algorithm.once if name in uploads}
        if sent_once and is_due.any():
            due_rows = is_due.nonzero().flatten()
            self.once.store(speakers[due_rows], select_rows(sent_once, due_rows), self.round)
        return {name: group for name, group in uploads.items() if name not in sent_once}

    def aggregate(self, server: State, uploads: Upload | None) -> State:
        """Return the server's new state, made out of what `combine` returned.

        Where groups that are sent once have come or gone, `aggregate_once` is called, too.
        """
        with errors_named(f"round {self.round}, the server of {self.algorithm.name}"):
            if uploads:
                state = self.algorithm.aggregate(server, uploads)
                server = check_server_state(state, "aggregate", server)
            if self.algorithm.aggregate_once is not None and self.is_once_new:
                state = self.algorithm.aggregate_once(server, self._recall_once())
                server = check_server_state(state, "aggregate_once", server)
            return server

    @property
    def is_once_new(self) -> bool:
        """Whether groups that are sent once have come or gone in this round."""
        return self.once.rounds() != self.once_before

    def _recall_once(self) -> SentOnce:
        """Return the groups that are sent once of all clients that have sent them."""
        clients = torch.tensor(self.once.clients(), dtype=torch.int64)
        groups = select_rows(self.once.uploads or {}, clients)
        return SentOnce(groups, clients, self.round)

    def combine(self) -> Upload | None:
        """Return the uploads that the server aggregates, or None if there are none.

        They are those of this round, or everybody's latest ones, and what was sent once, unless
        the algorithm has `aggregate_once` for that. If nobody spoke, they are its `silence`.
        """
        uploads = self._of_round()
        if uploads is None and self.algorithm.silence is not None:
            return self.algorithm.silence()
        if self.algorithm.summation is not None and uploads is not None:
            uploads = self._add_hidden(self.algorithm.summation, uploads)
        sent_once = self.once.recall()
        if sent_once is None or self.algorithm.aggregate_once is not None:
            return uploads
        return sent_once | (uploads or {})

    def _add_hidden(self, summation: Summation, uploads: Upload) -> Upload:
        """Return the sum of this round's uploads, which the server does not see singly."""
        speakers = torch.cat(self.speakers).sort().values
        compared = {
            name: group for name, group in uploads.items() if name not in self.algorithm.once
        }
        if compared:
            self.check(compared)
        once_groups = self.algorithm.once
        total, self.added = add_round(
            summation, speakers, uploads, self.members, self.once, once_groups, self.round
        )
        return total

    def _of_round(self) -> Upload | None:
        """Return the uploads without the groups that are sent once, or None if there are none."""
        if self.keeps_all:
            return self.latest.recall(None if self.algorithm.remembers else self.round)
        if self.uploads is None or self.algorithm.additive:
            return self.uploads
        # In the order of the clients, whatever order they were trained in: FeSEM draws seeds
        # among them.
        return select_rows(self.uploads, torch.cat(self.speakers).argsort())


def check_server_state(state: Any, function: str, before: State | None = None) -> State:
    """Return the state that an algorithm's function made, in the order of the state `before`.

    Raises TypeError unless it is a dict of tensors, or of trees of tensors, that has all tensors of
    the state `before`, if that is given, in their shapes and types.
    """
    if not isinstance(state, dict):
        kind = type(state).__name__
        raise TypeError(f"{function} must return a dict of tensors by name, not {kind}")
    flat = flatten_state(state)
    for name, value in flat.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(
                f"{function} must return a dict of tensors by name, but {name!r} is {kind}"
            )
    if before is not None:
        wanted = flatten_state(before)
        mismatch = find_mismatch(wanted, {name: flat[name] for name in wanted if name in flat})
        if mismatch is not None:
            raise TypeError(f"{function} must return a state like the one it is given: {mismatch}")
        state = order_like(state, before)
    return state
