"""The schedule of a run's rounds, synchronous or asynchronous, as its settings say."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedproto.config.settings import Config
from fedproto.core.batches import Training, count_round_steps
from fedproto.core.entropy import Entropy
from fedproto.core.federation import Federation
from fedproto.core.sampling import Schedule, count_fraction
from fedproto.core.types import Algorithm, GroupLayout
from fedproto.errors import ConfigError


def build_schedule(config: Config, clients: int) -> Schedule:
    """Return the schedule of a run's rounds."""
    concurrency = config.concurrency or count_fraction(config.participation, clients)
    secret = None
    if config.client_sampling == "poisson":
        secret = Entropy(seed=config.seed if config.noise_source == "seeded" else None)
    return Schedule(
        config.rounds,
        config.participation,
        config.lost_uploads,
        config.stragglers,
        config.eval_every,
        config.seed,
        config.buffer,
        concurrency,
        config.staleness,
        config.speed_spread,
        secret,
    )


def count_local_steps(federation: Federation, algorithm: Algorithm, training: Training) -> Tensor:
    """Return each client's number of local steps in a round, (clients,)."""
    steps = [count_round_steps(member, algorithm, training) for member in federation.members]
    return torch.tensor(steps)


def refuse_asynchrony(
    config: Config, clients: int, algorithm: Algorithm, layouts: Mapping[str, GroupLayout]
) -> None:
    """Raise ConfigError if asynchronous rounds are wanted that cannot be had."""
    if not config.buffer:
        return
    if any(layout.per == "cluster" for layout in layouts.values()):
        raise ConfigError(
            f"{algorithm.name} compares all uploads of a round, which asynchronous rounds do not "
            "have: leave buffer out"
        )
    concurrency = build_schedule(config, clients).concurrency
    if concurrency > clients:
        raise ConfigError(
            f"concurrency is {concurrency}, but there are only {clients} clients, each of which "
            "trains once at a time"
        )
    if config.buffer > concurrency:
        raise ConfigError(
            f"buffer is {config.buffer}, but only {concurrency} clients train at a time: at most "
            "concurrency uploads can be waited for"
        )


def refuse_lost_sums(config: Config, clients: int, algorithm: Algorithm) -> None:
    """Raise ConfigError if the uploads of a round could not be added where nobody sees them.

    As many uploads are lost in every round as in the first, so all rounds would fail.
    """
    if algorithm.summation is None:
        return
    sampled = count_fraction(config.participation, clients)
    lost = count_fraction(config.lost_uploads, sampled, at_least=0)
    algorithm.summation.check(sampled, sampled - lost)
