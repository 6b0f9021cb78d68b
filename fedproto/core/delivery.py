"""Uploads on their way in asynchronous rounds: kept until they arrive, then made to fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from fedproto.core.asynchronous import Version
from fedproto.core.staleness import age_uploads, apply_changes, take_changes, weigh_staleness
from fedproto.core.tensors import select_rows
from fedproto.core.types import GroupLayout, State, Upload
from fedproto.core.uploads import LatestUploads


class Delivery:
    """Holds back the uploads of a round that arrive later, and delivers those that arrive in it.

    version    what happens in the round
    in_flight  the uploads that have started and not arrived; of models, their changes
    layouts    those of the groups of an upload
    once       the groups that are sent once, which do not age
    staleness  the exponent by which late uploads count less
    send_to    clients -> what the server sends them in this round, with a leading axis over them
    """

    def __init__(
        self,
        version: Version,
        in_flight: LatestUploads,
        layouts: Mapping[str, GroupLayout],
        once: Collection[str],
        staleness: float,
        send_to: Callable[[Tensor], State],
    ) -> None:
        self.version = version
        self.in_flight = in_flight
        self.layouts = layouts
        self.once = once
        self.staleness = staleness
        self.send_to = send_to
        self.is_relative = any(layout.relative for layout in layouts.values())

    def hold_back(self, speakers: Tensor, uploads: Upload) -> tuple[Tensor, Upload]:
        """Keep the uploads that do not arrive in this round; return the others.

        uploads  of clients that start in this round, with a leading axis over the speakers
        """
        arrives = torch.isin(speakers, self.version.arrived)
        if arrives.all():
            return speakers, uploads
        later = (~arrives).nonzero().flatten()
        changes = select_rows(uploads, later)
        if self.is_relative:
            changes = take_changes(changes, self.send_to(speakers[later]), self.layouts)
        self.in_flight.store(speakers[later], changes, self.version.round)
        sooner = arrives.nonzero().flatten()
        return speakers[sooner], select_rows(uploads, sooner)

    def deliver_late(self) -> tuple[Tensor, Upload]:
        """Return the clients that started in earlier rounds and arrive in this one, and uploads.

        A model is the one that the server would send now, with the client's change. Everything
        that ages counts less.
        """
        is_late = self.version.started < self.version.round
        clients = self.version.arrived[is_late]
        stored = self.in_flight.uploads
        if not len(clients) or stored is None:
            return clients, {}
        uploads = select_rows(stored, clients)
        for client in clients.tolist():
            self.in_flight.remove(client)
        if self.is_relative:
            uploads = apply_changes(uploads, self.send_to(clients), self.layouts)
        factors = weigh_staleness(self.version.staleness[is_late], self.staleness)
        return clients, age_uploads(uploads, factors, self.once)
