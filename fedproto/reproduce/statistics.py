"""Paired tests over seeds with three outcomes: a difference, equivalence within a margin, or
undecided.

Seeds are independent; the settings of one seed share images. So every seed gives one number, the
mean of its differences, and all tests are Student's t over these numbers:

- difference: two-sided, against 0;
- equivalence: two one-sided tests (TOST, Schuirmann 1987) against a margin that is stated
  beforehand.

A family of comparisons is corrected by Holm's method, once over its tests of difference and once
over its tests of equivalence. Nothing follows from a large p.

Some numbers are known only as bounds: a run that never reached a goal needs more rounds than it
had, and a run that diverged is worse than every run that finished. A bound can only support the
conclusion that its true value would strengthen: with "at least 200 rounds" in the place of the
unknown number a method may be called slower, never faster and never equivalent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from scipy import special

LEVEL = 0.05  # the chance of a wrong statement in a family, for each of the two kinds of tests
CONFIDENCE = 0.95  # of intervals, each for itself
#: Points. In the median of the paper's 18 settings FedProto leads the best other method by 0.8
#: points; less than about a third of such a lead is no difference that matters.
ACCURACY_MARGIN = 0.3
#: Points. A standard deviation of 1 point over 20 clients, as on MNIST, is itself only known to
#: about 0.2 points.
DEVIATION_MARGIN = 0.2
#: Rounds. A tenth of the rounds that FedProto is given in the paper's tables; accuracy is measured
#: every 5 to 20.
ROUNDS_MARGIN = 10.0
_SAME = 1e-9  # differences that vary by less do not vary


class Outcome(Enum):
    """What a comparison says about the first of its two methods."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Measurement:
    """A number of one federation: known, a lower bound (`at_least`), or None if the run diverged."""

    value: float | None
    at_least: bool = False


Key = tuple[Any, int]  # a setting, and a seed
Numbers = Mapping[Key, Measurement]


@dataclass(frozen=True)
class Comparison:
    """The differences of two methods (first minus second) over the federations that both ran.

    effect                 the mean over seeds; a bound of it if `bounded` says so
    half_width             of its 95% interval; None where the seeds cannot tell
    margin                 differences up to this do not matter; None if no margin is stated
    p_difference           two-sided p of Student's paired test; 1 where it cannot be used
    p_equivalence          the larger p of the two one-sided tests; 1 where they cannot be used
    bounded                -1: the true effect is this or lower, 1: this or higher, 0: known,
                           None: unknown on both sides
    reason                 why nothing can be said, where that is so
    """

    effect: float
    half_width: float | None
    margin: float | None
    p_difference: float
    p_equivalence: float
    seeds: int
    federations: int
    higher: int  # federations in which the first is higher
    smaller_is_better: bool = False
    bounded: int | None = 0
    diverged_first: int = 0
    diverged_second: int = 0
    censored_first: int = 0
    censored_second: int = 0
    reason: str = ""

    def interval(self) -> tuple[float, float]:
        """Both ends of the 95% interval."""
        half_width = math.nan if self.half_width is None else self.half_width
        return self.effect - half_width, self.effect + half_width

    def text(self, digits: int = 2) -> str:
        """The effect and its interval, and what was not measured."""
        if not self.federations:
            return "–"
        bound = {-1: "≤ ", 1: "≥ ", 0: "", None: "about "}[self.bounded]
        half_width = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        return f"{bound}{self.effect:+.{digits}f}{half_width}"


@dataclass(frozen=True)
class Decision:
    """A comparison with its outcome, after correction for the family it belongs to."""

    comparison: Comparison
    p_difference: float
    p_equivalence: float
    outcome: Outcome


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half-width of its 95% interval (Student's t); NaN for fewer than two values."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    factor = special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    return mean, float(factor * _standard_error(values))


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _chance_above(values: Sequence[float], bound: float) -> float:
    """One-sided p of Student's test that the mean lies above a bound."""
    t = (statistics.fmean(values) - bound) / _standard_error(values)
    return float(special.stdtr(len(values) - 1, -t))


# --- one comparison


def exact(numbers: Mapping[Key, float]) -> dict[Key, Measurement]:
    """Numbers that are all known."""
    return {key: Measurement(value) for key, value in numbers.items()}


def compare(
    first: Numbers, second: Numbers, *, margin: float | None, smaller_is_better: bool = False
) -> Comparison:
    """First minus second, over the federations that both have."""
    shared = [key for key in first if key in second]
    known, bounds = _differences(first, second, shared)
    lost_first = [
        key for key in shared if first[key].value is None and second[key].value is not None
    ]
    lost_second = [
        key for key in shared if second[key].value is None and first[key].value is not None
    ]
    worst = 1 if smaller_is_better else -1  # the sign of a difference that speaks against the first
    if known:
        # A diverged run is at least as bad as the worst that finished.
        extreme = {-1: min(known.values()), 1: max(known.values())}
        known |= dict.fromkeys(lost_first, extreme[worst])
        known |= dict.fromkeys(lost_second, extreme[-worst])
        bounds |= {worst} if lost_first else set()
        bounds |= {-worst} if lost_second else set()
    tested = _test(_seed_means(known), margin, bounds)
    return Comparison(
        effect=tested.effect,
        half_width=tested.half_width,
        margin=margin,
        p_difference=tested.p_difference,
        p_equivalence=tested.p_equivalence,
        seeds=tested.seeds,
        federations=len(known),
        higher=sum(difference > 0 for difference in known.values()),
        smaller_is_better=smaller_is_better,
        bounded=tested.bounded,
        diverged_first=len(lost_first),
        diverged_second=len(lost_second),
        censored_first=sum(first[key].at_least for key in shared),
        censored_second=sum(second[key].at_least for key in shared),
        reason=tested.reason,
    )


def _differences(
    first: Numbers, second: Numbers, keys: Sequence[Key]
) -> tuple[dict[Key, float], set[int]]:
    """Differences of the runs that finished, and on which sides some of them are only bounds."""
    known: dict[Key, float] = {}
    bounds: set[int] = set()
    for key in keys:
        ours, theirs = first[key], second[key]
        if ours.value is None or theirs.value is None:
            continue
        if ours.at_least and theirs.at_least:
            continue  # neither got there: nobody was first
        known[key] = ours.value - theirs.value
        if theirs.at_least:
            bounds.add(-1)
        if ours.at_least:
            bounds.add(1)
    return known, bounds


def _seed_means(differences: Mapping[Key, float]) -> list[float]:
    by_seed: dict[int, list[float]] = {}
    for (_, seed), difference in differences.items():
        by_seed.setdefault(seed, []).append(difference)
    return [statistics.fmean(each) for each in by_seed.values()]


@dataclass(frozen=True)
class _Tested:
    effect: float
    half_width: float | None
    p_difference: float
    p_equivalence: float
    seeds: int
    bounded: int | None
    reason: str


def _test(means: Sequence[float], margin: float | None, bounds: set[int]) -> _Tested:
    """Both tests over one number per seed; `bounds` are the sides on which some are only bounds."""
    seeds = len(means)
    effect = statistics.fmean(means) if means else math.nan
    bounded = None if len(bounds) > 1 else next(iter(bounds), 0)
    if seeds < 2:
        reason = "one seed" if seeds else "no federation that both finished"
        return _Tested(effect, None, 1.0, 1.0, seeds, bounded, reason)
    if np.ptp(means) < _SAME:
        return _Tested(effect, None, 1.0, 1.0, seeds, bounded, "the same difference in every seed")
    _, half_width = mean_interval(means)
    p_above = _chance_above(means, 0)
    p_below = _chance_above([-mean for mean in means], 0)
    p_difference = 2 * min(p_above, p_below)
    if bounded is None or (bounded and np.sign(effect) != bounded):
        p_difference = 1.0
    p_equivalence = 1.0
    if margin is not None and bounded == 0:
        p_equivalence = equivalence_p(means, margin)
    return _Tested(effect, half_width, p_difference, p_equivalence, seeds, bounded, "")


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """The p of two one-sided tests that the mean lies within ± margin: the larger of both."""
    above_lower = _chance_above(values, -margin)
    below_upper = _chance_above([-value for value in values], -margin)
    return max(above_lower, below_upper)


# --- a family


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values by Holm's step-down method (1979), in the order given."""
    count = len(p_values)
    order = sorted(range(count), key=lambda position: p_values[position])
    adjusted = [1.0] * count
    largest = 0.0
    for rank, position in enumerate(order):
        largest = max(largest, min(1.0, (count - rank) * p_values[position]))
        adjusted[position] = largest
    return adjusted


def decide_family(comparisons: Sequence[Comparison]) -> list[Decision]:
    """The outcome of each comparison of a family, by p-values adjusted over all of them."""
    differences = holm([comparison.p_difference for comparison in comparisons])
    equivalences = holm([comparison.p_equivalence for comparison in comparisons])
    decisions = []
    for comparison, p_difference, p_equivalence in zip(
        comparisons, differences, equivalences, strict=True
    ):
        outcome = _outcome(comparison, p_difference, p_equivalence)
        decisions.append(Decision(comparison, p_difference, p_equivalence, outcome))
    return decisions


def _outcome(comparison: Comparison, p_difference: float, p_equivalence: float) -> Outcome:
    """Equivalence comes first: a real difference that is smaller than the margin does not matter."""
    if p_equivalence < LEVEL:
        return Outcome.EQUIVALENT
    if p_difference < LEVEL:
        is_better = (comparison.effect < 0) == comparison.smaller_is_better
        return Outcome.BETTER if is_better else Outcome.WORSE
    return Outcome.UNDECIDED
