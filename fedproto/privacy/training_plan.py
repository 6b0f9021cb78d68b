"""From settings to how a run with `privacy=training` is protected: the noise of steps and uploads.

One accountant sees everything that a record is in: the steps of training, which are Gaussian
releases of a Poisson sample, and what the client uploads of its records, such as class sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fedproto.config.settings import Config
from fedproto.core.sampling import Schedule
from fedproto.core.types import Algorithm
from fedproto.errors import ConfigError
from fedproto.privacy.accounting import Release, compute_epsilon, find_noise
from fedproto.privacy.budget import plan_participation
from fedproto.privacy.conditions import is_noise_at_server
from fedproto.privacy.noisy_uploads import Protection
from fedproto.privacy.planning import PrivacyPlan, find_rounding, refuse_unbounded
from fedproto.privacy.step_costs import StepCount, StepPlan

#: The part of epsilon that steps may use alone where uploads are noisy, too, and the settings name
#: neither noise.
SHARE_OF_STEPS = 0.5


class Case(NamedTuple):
    """Clients that are in the same releases."""

    rounds: int
    step_count: StepCount


def plan_training(
    config: Config,
    algorithm: Algorithm,
    has_releases: bool,
    schedules: Sequence[tuple[Schedule, int]],
    counts: Sequence[Sequence[StepCount]],
) -> PrivacyPlan:
    """Return how runs with these settings are protected.

    has_releases  whether uploads are made of records, and not of the trained weights alone
    schedules     of all federations that are trained together, each with its number of clients
    counts        the steps of a round, by federation and client
    """
    cases = _list_cases(schedules, counts)
    clip = None if config.clip == "none" else config.clip
    gradient_clip = None if config.gradient_clip == "none" else config.gradient_clip
    noise, step_noise = _find_noises(config, cases, has_releases)
    refuse_unbounded(config, gradient_clip, step_noise)
    if has_releases:
        refuse_unbounded(config, clip, noise)
    protection = Protection(
        unit="record",
        noise=noise,
        clip=clip,
        at="server" if is_noise_at_server(config) else "client",
        threshold=config.count_threshold,
        seeded=config.noise_source == "seeded",
        rounding=find_rounding(config.combiner) if is_noise_at_server(config) else 0.0,
        shape=config.noise_shape,
    )
    steps = StepPlan(step_noise, gradient_clip, config.noise_source == "seeded", counts)
    plan = PrivacyPlan(
        setting=config.privacy,
        protection=protection,
        per_round=int(has_releases),
        sends_once=False,
        delta=config.delta,
        limit=config.epsilon,
        steps=steps,
    )
    if config.epsilon is not None:
        _refuse_costly_round(config.epsilon, config.delta, cases, plan)
    return plan


def _list_cases(
    schedules: Sequence[tuple[Schedule, int]], counts: Sequence[Sequence[StepCount]]
) -> list[Case]:
    """Return the different clients of all federations, by what they will be in."""
    cases = set()
    for (schedule, clients), counts_of_one in zip(schedules, counts, strict=True):
        rounds, _ = plan_participation(schedule, clients)
        cases |= {Case(*each) for each in zip(rounds.tolist(), counts_of_one, strict=True)}
    return sorted(cases)


def _find_noises(config: Config, cases: Sequence[Case], has_releases: bool) -> tuple[float, float]:
    """Return the noise of uploads and that of steps.

    They are those of the settings, or the least that keep epsilon. If the settings name neither,
    steps get a part of epsilon, and uploads what is left.
    """
    noise = config.noise_multiplier
    step_noise = config.step_noise
    epsilon = config.epsilon
    if not has_releases:
        if noise is not None:
            raise ConfigError(
                "noise_multiplier is the noise of uploads that are made of records, and "
                f"{config.algorithm.name} sends none: set step_noise instead"
            )
        noise = 0.0
    if epsilon is None:
        if noise is None or step_noise is None:
            missing = "noise_multiplier" if noise is None else "step_noise"
            raise ConfigError(
                f"privacy=training of {config.algorithm.name} needs {missing}, too, or epsilon"
            )
        return noise, step_noise

    def price(case: Case, of_uploads: float, of_steps: float) -> list[Release]:
        uploads = [Release(of_uploads, case.rounds)] if has_releases else []
        return uploads + case.step_count.releases(of_steps, case.rounds)

    def steps_alone(case: Case, each: float) -> list[Release]:
        return case.step_count.releases(each, case.rounds)

    if step_noise is None:
        if noise is None:
            budget_of_steps = SHARE_OF_STEPS * epsilon
            step_noise = _find_for_all(cases, steps_alone, budget_of_steps, config.delta)
        else:
            given = noise
            step_noise = _find_for_all(
                cases, lambda case, each: price(case, given, each), epsilon, config.delta
            )
    if noise is None:
        chosen = step_noise
        noise = _find_for_all(
            cases, lambda case, each: price(case, each, chosen), epsilon, config.delta
        )
    return noise, step_noise


def _find_for_all(
    cases: Sequence[Case],
    price: Callable[[Case, float], list[Release]],
    epsilon: float,
    delta: float,
) -> float:
    """Return the least noise with which no client exceeds epsilon.

    The client that spends most is searched for; which one that is may depend on the noise.
    """
    noise = 0.0
    left = list(cases)
    while left:
        guess = noise or 1.0
        costs = [compute_epsilon(price(case, guess), delta) for case in left]
        if noise and max(costs) <= epsilon:
            break
        worst = left.pop(costs.index(max(costs)))
        found = find_noise(partial(price, worst), epsilon, delta)
        noise = max(noise, found)
    return noise


def _refuse_costly_round(
    epsilon: float, delta: float, cases: Sequence[Case], plan: PrivacyPlan
) -> None:
    """Refuse a budget that is too small for a single round."""
    assert plan.steps is not None
    for case in cases:
        releases = case.step_count.releases(plan.steps.noise)
        releases += [Release(plan.protection.noise, plan.per_round)]
        spent = compute_epsilon(releases, delta)
        if spent > epsilon:
            raise ConfigError(
                f"the first round costs an epsilon of {spent:.3g}, more than the budget of "
                f"{epsilon:g}: raise the noise, or epsilon"
            )
