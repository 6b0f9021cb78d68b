"""From settings to how a run is protected: the noise for its budget, and what a round costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.sampling import Schedule
from fedproto.core.types import Algorithm
from fedproto.errors import ConfigError
from fedproto.privacy.accounting import Release, compute_epsilon, find_noise
from fedproto.privacy.budget import Budget, plan_participation
from fedproto.privacy.conditions import is_noise_at_server
from fedproto.privacy.noisy_uploads import Protection
from fedproto.privacy.step_costs import StepPlan


@dataclass(frozen=True)
class PrivacyPlan:
    """How the uploads of a run are protected, and what that costs.

    setting     of the run: release, training or client
    protection  clipping and noise
    per_round   Gaussian releases of a client's upload per round: 1, or 0 if it sends everything
                once, or nothing that is made of records
    sends_once  whether there are groups that clients send once
    delta       of the claim
    limit       the budget of every record or client; None: whatever is spent
    steps       how the steps of training are protected; None: they are not

    Where clients are sampled in secret, `protection.sampling` is the probability for each round,
    and every round costs every client the same, whether it was in it or not.
    """

    setting: str
    protection: Protection
    per_round: int
    sends_once: bool
    delta: float
    limit: float | None
    steps: StepPlan | None = None

    def price(self, place: int, client: int, rounds: int, once: int) -> list[Release]:
        """Return the releases that a client's data is in; see `budget.Price`.

        place  of the federation among those that are trained together
        """
        protection = self.protection
        sampling = 1.0 if protection.sampling is None else protection.sampling
        releases = [Release(protection.noise, rounds * self.per_round + once, sampling)]
        if self.steps is not None:
            releases += self.steps.counts[place][client].releases(self.steps.noise, rounds)
        return releases

    def open_budget(self, place: int, clients: int) -> Budget:
        """Return the budget of a federation before its first round."""
        price = partial(self.price, place)
        return Budget.start(price, self.delta, self.limit, self.sends_once, clients)


def plan_privacy(
    config: Config,
    algorithm: Algorithm,
    groups: Sequence[str],
    schedules: Sequence[tuple[Schedule, int]],
) -> PrivacyPlan:
    """Return how runs with these settings are protected.

    Without `noise_multiplier` the noise is the least that keeps the budget in all planned rounds.
    Raises ConfigError if the budget is too small for a single round.

    groups     of an upload
    schedules  of all federations that are trained together, each with its number of clients
    """
    clip = None if config.clip == "none" else config.clip
    per_round = int(any(group not in algorithm.once for group in groups))
    if not groups:
        raise ConfigError(f"algorithm {algorithm.name} sends nothing, so nothing is private or not")
    sampling = _find_secret_sampling(algorithm, schedules)
    rate = 1.0 if sampling is None else sampling
    noise = config.noise_multiplier
    if noise is None:
        assert config.epsilon is not None
        times = count_planned_releases(algorithm, per_round, schedules)
        noise = find_noise(lambda each: [Release(each, times, rate)], config.epsilon, config.delta)
    refuse_unbounded(config, clip, noise)
    protection = Protection(
        unit="client" if config.privacy == "client" else "record",
        noise=noise,
        clip=clip,
        at="server" if is_noise_at_server(config) else "client",
        threshold=config.count_threshold,
        seeded=config.noise_source == "seeded",
        sampling=sampling,
        rounding=find_rounding(config.combiner) if is_noise_at_server(config) else 0.0,
        shape=config.noise_shape,
    )
    sends_once = bool(algorithm.once)
    first_round = per_round + int(sends_once)
    if config.epsilon is not None and noise > 0:
        spent = compute_epsilon([Release(noise, first_round, rate)], config.delta)
        if spent > config.epsilon:
            raise ConfigError(
                f"the first round with noise_multiplier={noise:g} costs an epsilon of {spent:.3g}, "
                f"more than the budget of {config.epsilon:g}: raise either, or leave "
                "noise_multiplier out"
            )
    return PrivacyPlan(
        config.privacy, protection, per_round, sends_once, config.delta, config.epsilon
    )


def find_rounding(combiner: Part) -> float:
    """Return by how much a combiner rounds each value of an upload before it adds them."""
    return float(combiner.options["error"]) if combiner.name == "secure-sum" else 0.0


def _find_secret_sampling(
    algorithm: Algorithm, schedules: Sequence[tuple[Schedule, int]]
) -> float | None:
    """Return the probability with which clients are sampled in secret; None: they are not.

    Raises ConfigError where such sampling does not count in their favour.
    """
    rates = {schedule.participation for schedule, _ in schedules if schedule.secret is not None}
    if not rates:
        return None
    if algorithm.once:
        raise ConfigError(
            "client_sampling=poisson is for what clients send anew in each round, and "
            f"{algorithm.name} sends {algorithm.once[0]} once: leave client_sampling out"
        )
    if len(rates) > 1:
        raise ConfigError(
            "client_sampling=poisson needs one participation for all federations that are trained "
            "together: run them one after the other"
        )
    return rates.pop()


def count_planned_releases(
    algorithm: Algorithm, per_round: int, schedules: Sequence[tuple[Schedule, int]]
) -> int:
    """Return the most releases that a client's data will be in, over all federations."""
    most = 1
    for schedule, clients in schedules:
        rounds, once = plan_participation(schedule, clients)
        planned = rounds * per_round
        if algorithm.once:
            planned = planned + once
        most = max(most, int(planned.max()))
    return most


def refuse_unbounded(config: Config, clip: float | None, noise: float) -> None:
    """Refuse noise on values that nothing bounds."""
    if clip is None and noise > 0:
        raise ConfigError(
            "clip is none, so that one record could move a sum by any amount, and no noise hides "
            "it: set clip to a number above 0"
        )
    if noise == 0 and config.epsilon is not None:
        raise ConfigError(
            "noise_multiplier is 0, with which no epsilon can be kept: leave epsilon out for a run "
            "without protection, or raise noise_multiplier"
        )
