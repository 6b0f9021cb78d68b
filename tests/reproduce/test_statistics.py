"""The statistical tests behind the verdicts, against scipy, statsmodels and published examples."""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from fedproto.reproduce.statistics import (
    Comparison,
    Measurement,
    Outcome,
    compare,
    decide_family,
    equivalence_p,
    exact,
    holm,
    mean_interval,
)

numbers = st.floats(-100, 100).map(lambda value: round(value, 3))
samples = st.lists(st.tuples(numbers, numbers), min_size=3, max_size=12)


def seeds(values, column="a"):
    return exact({(column, seed): value for seed, value in enumerate(values)})


def outcome(comparison):
    (decision,) = decide_family([comparison])
    return decision.outcome


# --- against other implementations and published examples


@settings(max_examples=40, deadline=None)
@given(samples)
def test_differences_agree_with_scipys_paired_test(pairs):
    ours, theirs = zip(*pairs, strict=True)
    found = compare(seeds(ours), seeds(theirs), margin=0.3)
    if found.reason:
        assert np.ptp(np.subtract(ours, theirs)) < 1e-6
        return
    test = stats.ttest_rel(ours, theirs)
    low, high = test.confidence_interval(0.95)
    assert found.p_difference == pytest.approx(test.pvalue, rel=1e-6, abs=1e-12)
    assert found.interval() == pytest.approx((low, high), rel=1e-6, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(samples, st.floats(0.01, 50))
def test_equivalence_agrees_with_tost_in_statsmodels(pairs, margin):
    ours, theirs = (np.array(values) for values in zip(*pairs, strict=True))
    if np.ptp(ours - theirs) < 1e-6:
        return
    theirs_p, _, _ = ttost_paired(ours, theirs, -margin, margin)
    assert compare(seeds(ours), seeds(theirs), margin=margin).p_equivalence == pytest.approx(
        theirs_p, abs=1e-9
    )


def test_tost_of_ten_differences_is_as_computed_by_hand():
    """Mean 0.1, deviation 0.2, n = 10, margin 0.3: with 9 degrees of freedom p = 0.0058.

    The two t are 3.162 and -6.325.
    """
    values = np.linspace(-1, 1, 10)
    values = 0.1 + 0.2 * values / values.std(ddof=1)
    se = 0.2 / math.sqrt(10)
    larger = max(stats.t.sf((0.1 + 0.3) / se, 9), stats.t.cdf((0.1 - 0.3) / se, 9))
    assert equivalence_p(values, 0.3) == pytest.approx(larger) == pytest.approx(0.0058, abs=1e-4)


def test_holms_published_example():
    """Wikipedia (Holm-Bonferroni method): the first and the last hypothesis are rejected."""
    adjusted = holm([0.01, 0.04, 0.03, 0.005])
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [p < 0.05 for p in adjusted] == [True, False, False, True]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_agrees_with_statsmodels(p_values):
    with mock.patch("gc.collect"):  # statsmodels asks for it, which takes a second in a long test
        expected = multipletests(p_values, method="holm")[1]
    assert holm(p_values) == pytest.approx(expected, abs=1e-12)


def test_intervals_agree_with_scipy():
    values = [1.0, 2.5, 2.0, 4.0]
    mean, half = mean_interval(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert math.isnan(mean_interval([1.0])[1])


# --- three outcomes


TIGHT = (-0.02, 0.01, 0.0, 0.02, -0.01)
WIDE = (-4.0, 5.0, 0.0, 3.0, -3.5)


@pytest.mark.parametrize(
    ("mean", "spread", "expected"),
    [
        (2.0, TIGHT, Outcome.BETTER),
        (-2.0, TIGHT, Outcome.WORSE),
        (0.0, TIGHT, Outcome.EQUIVALENT),
        (0.1, TIGHT, Outcome.EQUIVALENT),  # real (p < 0.001), but too small to matter
        (0.0, WIDE, Outcome.UNDECIDED),  # a large p shows nothing
        (0.1, WIDE, Outcome.UNDECIDED),  # the mean lies within the margin, its interval does not
        (0.3, TIGHT, Outcome.BETTER),  # at the margin is not within it
    ],
)
def test_outcome_by_mean_and_spread(mean, spread, expected):
    found = compare(seeds([90 + mean + each for each in spread]), seeds([90.0] * 5), margin=0.3)
    assert outcome(found) is expected


def test_smaller_may_be_better():
    found = compare(
        seeds([1.0, 1.1, 0.9]), seeds([5.0, 5.0, 5.0]), margin=0.3, smaller_is_better=True
    )
    assert outcome(found) is Outcome.BETTER and found.effect == pytest.approx(-4)


@pytest.mark.parametrize("values", [(20.0,), (20.0, 20.0, 20.0), (40.0, 40.0, 40.0)])
def test_one_seed_and_equal_differences_are_undecided(values):
    """No spread over seeds is not certainty: that the next seed gives the same is not known."""
    found = compare(seeds(values), seeds([40.0] * len(values)), margin=0.3)
    assert outcome(found) is Outcome.UNDECIDED
    assert found.reason in ("one seed", "the same difference in every seed")
    assert "±" not in found.text()


def test_without_a_margin_nothing_is_equivalent():
    assert (
        outcome(compare(seeds([90.01, 90.0, 89.99]), seeds([90.0] * 3), margin=None))
        is Outcome.UNDECIDED
    )


@given(samples, st.floats(0.01, 50))
def test_swapping_the_methods_swaps_the_outcome(pairs, margin):
    ours, theirs = zip(*pairs, strict=True)
    one = compare(seeds(ours), seeds(theirs), margin=margin)
    other = compare(seeds(theirs), seeds(ours), margin=margin)
    mirrored = {Outcome.BETTER: Outcome.WORSE, Outcome.WORSE: Outcome.BETTER}
    assert outcome(other) is mirrored.get(outcome(one), outcome(one))


@given(samples, st.floats(0.01, 10), st.floats(0.01, 10))
def test_a_wider_margin_never_makes_equivalence_harder(pairs, margin, more):
    differences = [a - b for a, b in pairs]
    if np.ptp(differences) > 1e-6:
        assert equivalence_p(differences, margin + more) <= equivalence_p(differences, margin)


def test_the_settings_of_a_seed_count_as_one_number():
    """Thirty federations of five seeds are five numbers, whatever the settings share."""
    ours = {
        (column, seed): 90 + seed + shift
        for seed in range(4)
        for column, shift in (("a", 0), ("b", 2))
    }
    theirs = {key: 89 + 0.5 * key[1] ** 2 for key in ours}
    found = compare(exact(ours), exact(theirs), margin=0.3)
    test = stats.ttest_rel(
        [91 + seed for seed in range(4)], [89 + 0.5 * seed**2 for seed in range(4)]
    )
    assert found.p_difference == pytest.approx(test.pvalue)
    assert (found.higher, found.federations, found.seeds) == (7, 8, 4)


def test_only_federations_that_both_methods_ran_are_compared():
    ours = exact({("a", 0): 1.0, ("a", 1): 5.0, ("b", 0): 3.0})
    found = compare(ours, exact({("a", 0): 0.0, ("b", 0): 1.0}), margin=0.3)
    assert (found.effect, found.federations, found.seeds) == (1.5, 2, 1)
    assert compare({}, ours, margin=0.3).text() == "–"


# --- families


def test_a_family_is_corrected():
    """Alone each would be believed (p = 0.03); as one of ten it is not."""
    differences = [0.5, 1.0, 2.1, 0.3, 1.4]
    alone = compare(seeds(differences), seeds([0.0] * 5), margin=0.01)
    assert 0.005 < alone.p_difference < 0.05
    assert outcome(alone) is Outcome.BETTER
    ten = decide_family([alone] * 10)
    assert {decision.outcome for decision in ten} == {Outcome.UNDECIDED}
    assert ten[0].p_difference == pytest.approx(min(1, 10 * alone.p_difference))


def test_equivalence_is_corrected_as_well():
    close = compare(seeds([0.3, -0.2, 0.25, -0.3, 0.1]), seeds([0.0] * 5), margin=0.4)
    assert outcome(close) is Outcome.EQUIVALENT
    assert {decision.outcome for decision in decide_family([close] * 20)} == {Outcome.UNDECIDED}


# --- bounds and diverged runs


def censored(values, last):
    """Return rounds to a goal; None stands for a run that never reached it in `last` rounds."""
    found = {}
    for seed, value in enumerate(values):
        found["a", seed] = Measurement(last, at_least=True) if value is None else Measurement(value)
    return found


def rounds(ours, theirs):
    return compare(ours, theirs, margin=10, smaller_is_better=True)


def test_a_method_that_never_reaches_the_goal_is_slower_by_a_bound():
    found = rounds(seeds([10, 12, 11, 9, 10]), censored([None] * 5, 100))
    assert (found.bounded, found.censored_second) == (-1, 5)
    assert found.text(1).startswith("≤ -89.6") and outcome(found) is Outcome.BETTER


def test_a_bound_never_shows_the_opposite_or_equivalence():
    """The rival stopped after 5 rounds without reaching the goal: it need not be faster."""
    faster = rounds(seeds([90, 92, 91, 89, 90]), censored([None] * 5, 5))
    assert faster.effect > 80 and outcome(faster) is Outcome.UNDECIDED
    level = rounds(seeds([99, 100, 101, 100, 100]), censored([100, 100, None, 99, 101], 100))
    assert level.p_equivalence == 1 and outcome(level) is Outcome.UNDECIDED


def test_bounds_on_both_sides_show_nothing():
    found = rounds(censored([10, None, 11, 12, 13], 20), censored([80, 90, 85, None, 88], 100))
    assert found.bounded is None and outcome(found) is Outcome.UNDECIDED


def test_federations_in_which_neither_reached_the_goal_are_left_out():
    found = rounds(censored([10, None], 100), censored([40, None], 100))
    assert (found.federations, found.seeds) == (1, 1)


def test_a_diverged_run_counts_like_the_worst():
    """Four seeds lose 20 to 23 points, and the fifth diverged: it counts like the worst."""
    broken = seeds([78.0, 77.0, 76.0, 75.0, 0.0]) | {("a", 4): Measurement(None)}
    found = compare(broken, seeds([98.0] * 5), margin=0.3)
    assert (found.seeds, found.federations, found.diverged_first) == (5, 5, 1)
    assert found.effect == pytest.approx((-20 - 21 - 22 - 23 - 23) / 5)
    assert found.text().startswith("≤ -21.80") and outcome(found) is Outcome.WORSE


def test_a_method_that_diverged_is_neither_better_nor_equivalent():
    good = seeds([99.0, 98.9, 99.1, 99.2, 0.0]) | {("a", 4): Measurement(None)}
    assert (
        outcome(compare(good, seeds([95.0, 95.1, 94.9, 95.0, 95.0]), margin=0.3))
        is Outcome.UNDECIDED
    )
    close = seeds([95.0, 95.01, 94.99, 95.0, 0.0]) | {("a", 4): Measurement(None)}
    assert outcome(compare(close, seeds([95.0] * 5), margin=0.3)) is Outcome.UNDECIDED


def test_divergence_of_the_second_method_counts_for_the_first():
    other = seeds([94.0, 94.1, 93.9, 94.2, 0.0]) | {("a", 4): Measurement(None)}
    found = compare(seeds([95.0] * 5), other, margin=0.3)
    assert found.bounded == 1 and found.diverged_second == 1 and outcome(found) is Outcome.BETTER


def test_seeds_in_which_both_diverged_are_left_out():
    none = {("a", 0): Measurement(None)}
    found = compare(none, none, margin=0.3)
    assert isinstance(found, Comparison) and outcome(found) is Outcome.UNDECIDED
    assert found.reason == "no federation that both finished"
