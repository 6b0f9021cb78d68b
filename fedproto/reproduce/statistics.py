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

#: The chance of a wrong statement in a family, for each of the two kinds of tests.
LEVEL = 0.05
#: The confidence of each interval by itself; intervals are not corrected for their family.
CONFIDENCE = 0.95
#: Points. In the median of the paper's 18 settings FedProto leads the best other method by 0.8
#: points; a difference of less than about a third of such a lead does not matter.
ACCURACY_MARGIN = 0.3
#: Points. A standard deviation of 1 point over 20 clients, as on MNIST, is itself only known to
#: about 0.2 points.
DEVIATION_MARGIN = 0.2
#: Rounds. A tenth of the rounds that FedProto is given in the paper's tables; accuracy is measured
#: every 5 to 20.
ROUNDS_MARGIN = 10.0
#: Differences whose range is smaller than this are taken to be the same in every seed.
_SAME_RANGE = 1e-9


class Outcome(Enum):
    """What a comparison says about the first of its two methods."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Measurement:
    """A number of one federation.

    It is known, a lower bound of the true number (`at_least`), or None if the run diverged.
    """

    value: float | None
    at_least: bool = False


#: A federation: its setting and its seed.
Key = tuple[Any, int]
Measurements = Mapping[Key, Measurement]


@dataclass(frozen=True)
class Comparison:
    """The differences of two methods (first minus second) over the federations that both ran.

    effect           the mean over seeds; only a bound of it if `bounded` says so
    half_width       of the effect's 95% interval; None where the seeds cannot tell
    margin           differences up to this do not matter; None if no margin is stated
    p_difference     two-sided p of Student's paired test; 1 where it cannot be used
    p_equivalence    the larger p of the two one-sided tests; 1 where they cannot be used
    higher           the number of federations in which the first method is higher
    bounded          -1: the true effect is this or lower, 1: this or higher, 0: known,
                     None: unknown on both sides
    diverged_first   federations in which only the first method diverged; `_second` likewise
    censored_first   federations in which the first method's number is a lower bound
    reason           why nothing can be said, where that is so
    """

    effect: float
    half_width: float | None
    margin: float | None
    p_difference: float
    p_equivalence: float
    seeds: int
    federations: int
    higher: int
    smaller_is_better: bool = False
    bounded: int | None = 0
    diverged_first: int = 0
    diverged_second: int = 0
    censored_first: int = 0
    censored_second: int = 0
    reason: str = ""

    def interval(self) -> tuple[float, float]:
        """Return both ends of the 95% interval; NaN where there is none."""
        half_width = math.nan if self.half_width is None else self.half_width
        return self.effect - half_width, self.effect + half_width

    def text(self, digits: int = 2) -> str:
        """Return the effect with its interval, and whether it is only a bound."""
        if not self.federations:
            return "–"
        bound = _BOUND_SIGNS[self.bounded]
        effect = f"{bound}{self.effect:+.{digits}f}"
        if self.half_width is None:
            return effect
        return f"{effect} ± {self.half_width:.{digits}f}"


_BOUND_SIGNS = {-1: "≤ ", 1: "≥ ", 0: "", None: "about "}


@dataclass(frozen=True)
class Decision:
    """A comparison with its outcome, after correction for the family it belongs to."""

    comparison: Comparison
    p_difference: float
    p_equivalence: float
    outcome: Outcome


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95% interval (Student's t).

    The half-width is NaN for fewer than two values.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    factor = special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    return mean, float(factor * _standard_error(values))


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _chance_above(values: Sequence[float], bound: float) -> float:
    """Return the one-sided p of Student's test that the mean lies above a bound."""
    t = (statistics.fmean(values) - bound) / _standard_error(values)
    return float(special.stdtr(len(values) - 1, -t))


# --- one comparison


def exact(numbers: Mapping[Key, float]) -> dict[Key, Measurement]:
    """Return numbers that are all known as measurements."""
    return {key: Measurement(value) for key, value in numbers.items()}


def compare(
    first: Measurements,
    second: Measurements,
    *,
    margin: float | None,
    smaller_is_better: bool = False,
) -> Comparison:
    """Return the comparison of first minus second, over the federations that both have.

    A run that diverged counts as badly as the worst run that finished, so it is a bound.
    """
    shared = [key for key in first if key in second]
    differences, bounds = _subtract(first, second, shared)
    diverged_first = []
    diverged_second = []
    for key in shared:
        first_value = first[key].value
        second_value = second[key].value
        if first_value is None and second_value is not None:
            diverged_first.append(key)
        if second_value is None and first_value is not None:
            diverged_second.append(key)
    # The sign of a difference that speaks against the first method.
    against_first = 1 if smaller_is_better else -1
    if differences:
        extremes = {-1: min(differences.values()), 1: max(differences.values())}
        if diverged_first:
            differences |= dict.fromkeys(diverged_first, extremes[against_first])
            bounds.add(against_first)
        if diverged_second:
            differences |= dict.fromkeys(diverged_second, extremes[-against_first])
            bounds.add(-against_first)
    test = _test(_average_by_seed(differences), margin, bounds)
    higher = [difference > 0 for difference in differences.values()]
    censored_first = [first[key].at_least for key in shared]
    censored_second = [second[key].at_least for key in shared]
    return Comparison(
        effect=test.effect,
        half_width=test.half_width,
        margin=margin,
        p_difference=test.p_difference,
        p_equivalence=test.p_equivalence,
        seeds=test.seeds,
        federations=len(differences),
        higher=sum(higher),
        smaller_is_better=smaller_is_better,
        bounded=test.bounded,
        diverged_first=len(diverged_first),
        diverged_second=len(diverged_second),
        censored_first=sum(censored_first),
        censored_second=sum(censored_second),
        reason=test.reason,
    )


def _subtract(
    first: Measurements, second: Measurements, keys: Sequence[Key]
) -> tuple[dict[Key, float], set[int]]:
    """Return the differences of the runs that finished, and the sides on which some are bounds."""
    differences: dict[Key, float] = {}
    bounds: set[int] = set()
    for key in keys:
        ours = first[key]
        theirs = second[key]
        if ours.value is None or theirs.value is None:
            continue
        if ours.at_least and theirs.at_least:
            continue  # neither reached the goal, so neither was first
        differences[key] = ours.value - theirs.value
        if theirs.at_least:
            bounds.add(-1)
        if ours.at_least:
            bounds.add(1)
    return differences, bounds


def _average_by_seed(differences: Mapping[Key, float]) -> list[float]:
    """Return the mean difference of each seed over its settings."""
    by_seed: dict[int, list[float]] = {}
    for (_, seed), difference in differences.items():
        by_seed.setdefault(seed, []).append(difference)
    return [statistics.fmean(each) for each in by_seed.values()]


@dataclass(frozen=True)
class _TestResult:
    """The outcome of both tests over one number per seed; see Comparison for the fields."""

    effect: float
    seeds: int
    bounded: int | None
    half_width: float | None = None
    p_difference: float = 1.0
    p_equivalence: float = 1.0
    reason: str = ""


def _test(means: Sequence[float], margin: float | None, bounds: set[int]) -> _TestResult:
    """Return the result of both tests over one number per seed.

    `bounds` are the sides on which some numbers are only bounds.
    """
    seeds = len(means)
    effect = statistics.fmean(means) if means else math.nan
    bounded = None if len(bounds) > 1 else next(iter(bounds), 0)
    reason = _why_untestable(means)
    if reason:
        return _TestResult(effect, seeds, bounded, reason=reason)
    _, half_width = mean_interval(means)
    # A bound can show a difference only on the side on which the true effect lies even farther.
    supports_difference = bounded == 0 or np.sign(effect) == bounded
    p_difference = difference_p(means) if supports_difference else 1.0
    p_equivalence = 1.0
    if bounded == 0 and margin is not None:
        p_equivalence = equivalence_p(means, margin)
    return _TestResult(effect, seeds, bounded, half_width, p_difference, p_equivalence)


def _why_untestable(means: Sequence[float]) -> str:
    """Return why no test can be made of one number per seed; nothing if it can."""
    if not means:
        return "no federation that both finished"
    if len(means) == 1:
        return "one seed"
    if np.ptp(means) < _SAME_RANGE:
        return "the same difference in every seed"
    return ""


def difference_p(values: Sequence[float]) -> float:
    """Return the two-sided p of Student's test that the mean is not 0."""
    p_above = _chance_above(values, 0)
    p_below = _chance_above([-value for value in values], 0)
    return 2 * min(p_above, p_below)


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """Return the p of two one-sided tests that the mean lies within ± margin: the larger one."""
    above_lower = _chance_above(values, -margin)
    below_upper = _chance_above([-value for value in values], -margin)
    return max(above_lower, below_upper)


# --- a family


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method (1979), in the order given."""
    count = len(p_values)
    order = sorted(range(count), key=lambda position: p_values[position])
    adjusted = [1.0] * count
    largest = 0.0
    for rank, position in enumerate(order):
        corrected = min(1.0, (count - rank) * p_values[position])
        largest = max(largest, corrected)
        adjusted[position] = largest
    return adjusted


def decide_family(comparisons: Sequence[Comparison]) -> list[Decision]:
    """Return the decision on each comparison, by p-values adjusted over the whole family."""
    differences = holm([comparison.p_difference for comparison in comparisons])
    equivalences = holm([comparison.p_equivalence for comparison in comparisons])
    decisions = []
    for comparison, p_difference, p_equivalence in zip(
        comparisons, differences, equivalences, strict=True
    ):
        outcome = _decide(comparison, p_difference, p_equivalence)
        decisions.append(Decision(comparison, p_difference, p_equivalence, outcome))
    return decisions


def _decide(comparison: Comparison, p_difference: float, p_equivalence: float) -> Outcome:
    """Return the outcome by adjusted p-values.

    Equivalence comes first: a real difference that is smaller than the margin does not matter.
    """
    if p_equivalence < LEVEL:
        return Outcome.EQUIVALENT
    if p_difference < LEVEL:
        is_better = (comparison.effect < 0) == comparison.smaller_is_better
        return Outcome.BETTER if is_better else Outcome.WORSE
    return Outcome.UNDECIDED
