"""The simulated clock of asynchronous rounds: who starts when, and which uploads arrive when.

As in FedBuff (Nguyen et al. 2022), `concurrency` clients train at a time, and the server makes a
new version of its state out of every `buffer` uploads that arrive. A round of an asynchronous run
leads from one version to the next. When something happens depends on draws and on numbers of local
steps, never on what is trained, so that all of it is known beforehand.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.engine import Cohort
from fedproto.core.sampling import Schedule

#: How many starts of every client, and how many replacements, are drawn at once.
_DRAWN_STARTS = 16
_DRAWN_REPLACEMENTS = 64


class Version(NamedTuple):
    """What happens in one asynchronous round, until the server has its next version."""

    round: int
    #: Who starts from the version before this round, and which of their uploads will be lost.
    cohort: Cohort
    arrived: Tensor  # sorted, the clients whose uploads arrive
    started: Tensor  # the round in which each of them started
    clock: float  # at the end of the round; 1 is the median client's local training

    @property
    def staleness(self) -> Tensor:
        """How many versions the server has made since each arriving client started."""
        return self.round - self.started

    @property
    def mean_staleness(self) -> float:
        """The mean of `staleness`; 0 if nothing arrives."""
        return float(self.staleness.double().mean()) if len(self.arrived) else 0.0


def iterate_versions(steps: Tensor, schedule: Schedule) -> Iterator[Version]:
    """Yield all rounds of an asynchronous run, one after the other and without end.

    steps  (clients,) the local steps of each client in a round

    Whoever has finished is replaced at once by an idle client, drawn at random. A client whose
    upload has arrived, or was lost, is idle again from the next version on, so that nobody starts
    twice from the same one. Uploads that arrive at the same moment are taken before anybody starts.
    A round ends with the arrival number `buffer`, or when nobody is left to wait for.
    """
    everybody = range(len(steps))
    durations = _Durations(steps, schedule)
    training: list[tuple[float, int]] = []  # a heap: when somebody will have finished, and who
    idle = list(everybody)  # sorted
    started = torch.zeros(len(steps), dtype=torch.int64)
    is_lost = [False for _ in everybody]
    now = 0.0

    def start(clients: list[int], round: int) -> None:
        for client in clients:
            duration, is_lost[client] = durations.draw(client)
            heappush(training, (now + duration, client))
            idle.remove(client)
            started[client] = round

    for round in count(1):
        cohort = _sample_idle(idle, schedule.concurrency - len(training), schedule.seed, round)
        start(cohort, round)
        replacements = _Replacements(schedule.seed, round)
        arrived: list[int] = []
        finished: list[int] = []
        while training and len(arrived) < schedule.buffer:
            now = training[0][0]
            while training and training[0][0] == now and len(arrived) < schedule.buffer:
                client = heappop(training)[1]
                finished.append(client)
                if not is_lost[client]:
                    arrived.append(client)
            if len(arrived) < schedule.buffer:
                new = replacements.draw(idle, schedule.concurrency - len(training))
                start(new, round)
                cohort += new
        arrived.sort()
        lost = [client for client in sorted(cohort) if is_lost[client]]
        yield Version(
            round,
            Cohort(torch.tensor(sorted(cohort)), _numbers(lost), _numbers([])),
            _numbers(arrived),
            started[arrived],
            now,
        )
        for client in finished:
            insort(idle, client)


def _numbers(clients: list[int]) -> Tensor:
    return torch.tensor(clients, dtype=torch.int64)


def _sample_idle(idle: list[int], wanted: int, seed: int, round: int) -> list[int]:
    """Return idle clients that start with a new version, drawn as a synchronous round's cohort."""
    if wanted >= len(idle):
        return list(idle)
    places = rng.sample(rng.key(seed, "sample", round), len(idle), wanted)
    return [idle[place] for place in places.tolist()]


class _Replacements:
    """Draws idle clients that take the places of others within a round."""

    def __init__(self, seed: int, round: int) -> None:
        self.key = rng.key(seed, "replacement", round)
        self.draws: list[float] = []
        self.used = 0

    def draw(self, idle: list[int], wanted: int) -> list[int]:
        """Return as many idle clients as are wanted, or all if they are fewer."""
        left = list(idle)
        chosen = []
        for _ in range(min(wanted, len(left))):
            place = int(self._draw_fraction() * len(left))
            chosen.append(left.pop(place))
        return chosen

    def _draw_fraction(self) -> float:
        """Return the next number in [0, 1)."""
        if self.used == len(self.draws):
            self.draws += rng.uniform(self.key, _DRAWN_REPLACEMENTS, start=self.used).tolist()
        self.used += 1
        return self.draws[self.used - 1]


class _Durations:
    """Draws how long each start of each client takes, and whether its upload is lost.

    A duration is the client's number of steps, divided by the median client's, times a log-normal
    factor: ln(factor) has the standard deviation `speed_spread`. Half of its variance is between
    clients, and half between the starts of one client.
    """

    def __init__(self, steps: Tensor, schedule: Schedule) -> None:
        clients = torch.arange(len(steps))
        self.schedule = schedule
        counted = steps.double().clamp(min=1)
        self.base = counted / counted.quantile(0.5)
        self.own_draws = _normal(rng.key(schedule.seed, "speed", clients), 1)
        self.duration_keys = rng.key(schedule.seed, "duration", clients)
        self.lost_keys = rng.key(schedule.seed, "lost uploads", clients)
        self.starts = [0] * len(steps)  # so far, per client
        self.durations: list[list[float]] = [[] for _ in steps]
        self.lost: list[list[bool]] = [[] for _ in steps]

    def draw(self, client: int) -> tuple[float, bool]:
        """Return the duration of a client's next start, and whether its upload is lost."""
        number = self.starts[client]
        self.starts[client] += 1
        if number >= len(self.durations[client]):
            self._draw_more(len(self.durations[client]))
        return self.durations[client][number], self.lost[client][number]

    def _draw_more(self, first: int) -> None:
        """Draw the next starts of every client at once."""
        draws = _normal(self.duration_keys, _DRAWN_STARTS, first)
        exponent = self.schedule.speed_spread * (self.own_draws + draws) / math.sqrt(2)
        durations = self.base[:, None] * exponent.exp()
        lost = rng.uniform(self.lost_keys, _DRAWN_STARTS, first) < self.schedule.lost_uploads
        for client, (more_durations, more_lost) in enumerate(
            zip(durations.tolist(), lost.tolist(), strict=True)
        ):
            self.durations[client] += more_durations
            self.lost[client] += more_lost


def _normal(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """Return `count` standard normal draws for each key, like `rng.uniform`."""
    above_zero = rng.uniform(keys, count, start).clamp(min=2.0**-54)
    return torch.special.ndtri(above_zero)
