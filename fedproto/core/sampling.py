"""Who takes part in a round: the cohort, lost uploads and stragglers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.engine import Cohort
from fedproto.core.entropy import Entropy


@dataclass(frozen=True)
class Schedule:
    """How many rounds there are, who takes part in them, and which are evaluated."""

    rounds: int
    participation: float = 1.0  # fraction of the clients sampled each round
    lost_uploads: float = 0.0  # fraction of the uploads that do not arrive
    stragglers: float = 0.0  # fraction of the sampled clients that do half their steps
    eval_every: int = 10
    seed: int = 0
    #: Of asynchronous rounds, whose cohorts core/asynchronous.py tells. The uploads that a round
    #: waits for; 0: rounds are synchronous.
    buffer: int = 0
    concurrency: int = 0  # clients that train at a time
    staleness: float = 0.5  # an upload from τ versions ago counts (1 + τ)^(-staleness) times
    speed_spread: float = 0.0  # standard deviation of the logarithm of the durations of training
    #: Where secret samples come from: each client is in a round with the probability
    #: `participation`, independently of the others. None: the seed draws as many in every round.
    secret: Entropy | None = None


def sample_cohort(clients: int, schedule: Schedule, round: int) -> Cohort:
    """Return who takes part in a round, whose upload is lost, and who does half its steps.

    A secret sample is another one each time.
    """
    if schedule.secret is not None:
        return _sample_independently(clients, schedule, schedule.secret, round)

    def sample(purpose: str, population: Tensor, fraction: float, at_least: int) -> Tensor:
        count = count_fraction(fraction, len(population), at_least)
        if count in (0, len(population)):
            return population[:count]
        key = rng.key(schedule.seed, purpose, round)
        return population[rng.sample(key, len(population), count)]

    everybody = torch.arange(clients)
    sampled = sample("sample", everybody, schedule.participation, at_least=1)
    lost = sample("lost uploads", sampled, schedule.lost_uploads, at_least=0)
    slow = sample("stragglers", sampled, schedule.stragglers, at_least=0)
    return Cohort(sampled, lost, slow)


def sample_present(
    present: Tensor, fraction: float, at_least: int, seed: int, round: int
) -> Tensor:
    """Return who takes part in a round, of the clients that are present, as sorted numbers.

    They are a fraction of those present, but no fewer than `at_least`, if there are so many. Each
    client has a draw of its own in each round, so who else is present changes the cohort as little
    as possible. If all are present, it is the one of `sample_cohort`.
    """
    count = min(len(present), count_fraction(fraction, len(present), at_least))
    if count == len(present):
        return present.sort().values
    draws = rng.bits(rng.key(seed, "sample", round), int(present.max()) + 1)[present]
    smallest = draws.topk(count, largest=False, sorted=False).indices
    return present[smallest].sort().values


def _sample_independently(clients: int, schedule: Schedule, secret: Entropy, round: int) -> Cohort:
    """Return a cohort in which nothing about a client depends on who else is in it.

    That nobody is in it is possible. Whose uploads would be lost, and who would be slow, is drawn
    for every client, in the cohort or not: a number of lost uploads that went by the size of the
    cohort would tell of others.
    """
    everybody = torch.arange(clients)
    draws = secret.uniform((clients,), "sample of clients", round)
    sampled = everybody[draws < schedule.participation]

    def choose(purpose: str, fraction: float) -> Tensor:
        key = rng.key(schedule.seed, purpose, round)
        return sampled[(rng.uniform(key, clients) < fraction)[sampled]]

    lost = choose("lost uploads", schedule.lost_uploads)
    slow = choose("stragglers", schedule.stragglers)
    return Cohort(sampled, lost, slow)


def count_fraction(fraction: float, count: int, at_least: int = 1) -> int:
    """Return how many a fraction of so many is, rounded; Python's round(0.5) is 0, this gives 1."""
    return max(at_least, int(fraction * count + 0.5))
