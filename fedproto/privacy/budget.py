"""Budgets: what every client has spent, and whether another round can be afforded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedproto.core.sampling import Schedule, sample_cohort
from fedproto.privacy.accounting import Release, compute_epsilon

#: (client, rounds that it took part in, times that it sent the groups that are sent once) -> what
#: its records, or the client as a whole, have been in.
Price = Callable[[int, int, int], Sequence[Release]]


@dataclass
class Budget:
    """What the clients of one federation have spent.

    A round is charged before it begins, so that a run that is killed in it has paid for it: noise
    that is drawn anew would be a second release of the same data.

    price  what taking part costs
    delta  of all epsilons
    limit  the largest epsilon that a client may spend; None: any
    sends_once  whether there are groups that clients send once
    """

    price: Price
    delta: float
    limit: float | None
    sends_once: bool
    rounds: Tensor  # (clients,) that each took part in
    once: Tensor  # (clients,) times that each sent the groups that are sent once
    #: Called after each charge, before anything is computed, to put it on record.
    on_charge: Callable[[], None] = field(default=lambda: None, repr=False)

    @classmethod
    def start(
        cls, price: Price, delta: float, limit: float | None, sends_once: bool, clients: int
    ) -> Budget:
        """Return the budget of clients that have spent nothing."""
        zeros = torch.zeros(clients, dtype=torch.int64)
        return cls(price, delta, limit, sends_once, zeros, zeros.clone())

    def affords(self, clients: Tensor, once_due: Tensor) -> bool:
        """Return whether these clients can take part in a round; `once_due` is one flag each."""
        if self.limit is None:
            return True
        for client, is_due in zip(clients.tolist(), once_due.tolist(), strict=True):
            rounds = int(self.rounds[client]) + 1
            once = int(self.once[client]) + int(is_due and self.sends_once)
            if self._compute(client, rounds, once) > self.limit:
                return False
        return True

    def charge(self, clients: Tensor, once_due: Tensor) -> None:
        """Count a round of these clients."""
        self.rounds[clients] += 1
        if self.sends_once:
            self.once[clients] += once_due.to(torch.int64)
        self.on_charge()

    def epsilons(self) -> list[float]:
        """Return what every client has spent."""
        spent = []
        for client in range(len(self.rounds)):
            rounds = int(self.rounds[client])
            spent.append(self._compute(client, rounds, int(self.once[client])))
        return spent

    def count_releases(self) -> list[int]:
        """Return in how many Gaussian releases every client's data was."""
        counts = []
        for client in range(len(self.rounds)):
            releases = self.price(client, int(self.rounds[client]), int(self.once[client]))
            counts.append(sum(release.times for release in releases))
        return counts

    def _compute(self, client: int, rounds: int, once: int) -> float:
        return compute_epsilon(self.price(client, rounds, once), self.delta)


def plan_participation(schedule: Schedule, clients: int) -> tuple[Tensor, Tensor]:
    """Return in how many rounds each client will take part, and how often it sends what is once.

    Both are (clients,). A group that is sent once is repeated until an upload arrives. Where
    cohorts are secret, every round counts for everybody.
    """
    if schedule.secret is not None:
        every_round = torch.full((clients,), schedule.rounds, dtype=torch.int64)
        return every_round, torch.zeros(clients, dtype=torch.int64)
    rounds = torch.zeros(clients, dtype=torch.int64)
    once = torch.zeros(clients, dtype=torch.int64)
    has_arrived = torch.zeros(clients, dtype=torch.bool)
    for round in range(1, schedule.rounds + 1):
        cohort = sample_cohort(clients, schedule, round)
        rounds[cohort.sampled] += 1
        once[cohort.sampled] += (~has_arrived[cohort.sampled]).to(torch.int64)
        arrived = cohort.sampled[~torch.isin(cohort.sampled, cohort.lost)]
        has_arrived[arrived] = True
    return rounds, once
