"""Rates, intervals and bounds, against closed forms, published values and another library."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.proportion import proportion_confint

from fedproto.audit import statistics as tests


@given(st.integers(1, 500), st.data())
def test_intervals_are_those_of_statsmodels(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    rate = tests.clopper_pearson(successes, trials)
    low, high = proportion_confint(successes, trials, alpha=0.05, method="beta")
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=1e-9)
    assert rate.low <= rate.value <= rate.high


def test_the_interval_without_a_success_has_a_closed_form() -> None:
    rate = tests.clopper_pearson(0, 20)
    assert rate == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 20)))


def test_no_trial_says_nothing() -> None:
    rate = tests.clopper_pearson(0, 0)
    assert (rate.low, rate.high) == (0, 1)


@pytest.mark.parametrize(
    ("trials", "guesses", "correct", "delta", "published"),
    [
        (1000, 100, 75, 1e-4, 0.673),  # Steinke, Nasr and Jagielski (2023), appendix D
        (100_000, 1510, 1439, 1e-5, 2.675),  # the same, section 7
    ],
)
def test_bounds_on_epsilon_are_the_published_ones(
    trials: int, guesses: int, correct: int, delta: float, published: float
) -> None:
    assert tests.epsilon_bound(correct, guesses, trials, delta) == pytest.approx(
        published, abs=1e-3
    )


def test_a_bound_without_delta_is_where_the_binomial_reaches_the_error() -> None:
    """All of ten guesses right: (e^ε / (1 + e^ε))^10 = 0.05."""
    chance = 0.05**0.1
    assert tests.epsilon_bound(10, 10, 10) == pytest.approx(np.log(chance / (1 - chance)), abs=1e-5)


@given(st.integers(0, 60), st.floats(0, 1e-3))
def test_bounds_grow_with_correct_guesses_and_fall_with_delta(correct: int, delta: float) -> None:
    bound = tests.epsilon_bound(correct, 60, 60, delta)
    assert bound <= tests.epsilon_bound(min(60, correct + 1), 60, 60, delta) + 1e-6
    assert bound <= tests.epsilon_bound(correct, 60, 60) + 1e-6


def test_rates_and_advantage_of_a_hand_made_curve() -> None:
    """Members score 4, 3, 2, 0, the others 1, −1, −2, −3, so three members come first."""
    scores = np.array([4.0, 3, 2, 0, 1, -1, -2, -3])
    included = np.array([1, 1, 1, 1, 0, 0, 0, 0], bool)
    assert tests.true_positives_at(scores, included, 0.0).value == 0.75
    assert tests.true_positives_at(scores, included, 0.25).value == 1.0
    assert tests.area_under_curve(scores, included) == 15 / 16
    advantage = tests.advantage_at(scores, included, threshold=1.5)
    assert advantage.value == 0.75
    assert advantage.low < 0.75 < advantage.high


def test_random_scores_refute_nothing_and_perfect_ones_much() -> None:
    generator = np.random.default_rng(0)
    included = generator.integers(0, 2, 4000).astype(bool)
    assert tests.epsilon_bound_of_scores(generator.normal(size=4000), included) < 0.3
    assert tests.epsilon_bound_of_scores(included * 1.0, included) > 4


def test_the_bound_never_exceeds_the_promise_of_randomised_response() -> None:
    """Each coin is told with probability e / (1 + e), which is exactly epsilon = 1."""
    generator = np.random.default_rng(1)
    exceeded = 0
    for _ in range(40):
        included = generator.integers(0, 2, 2000).astype(bool)
        is_true = generator.random(2000) < np.e / (1 + np.e)
        told = np.where(is_true, included, ~included)
        bound = tests.epsilon_bound_of_scores(told + 0.001 * generator.random(2000), included)
        exceeded += bound > 1
        assert bound > 0.5  # and it has power
    assert exceeded <= 4  # 5% of 40, and some luck
