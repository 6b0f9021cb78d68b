"""Epsilons of Gaussian releases: the library's, published ones, and an independent formula."""

import math
import sys

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedproto.errors import ConfigError, MissingExtra
from fedproto.privacy import accounting
from fedproto.privacy.accounting import Release, compute_epsilon, find_noise, fold_releases


def analytic_delta(noise: float, epsilon: float) -> float:
    """The smallest delta of one Gaussian release (Balle and Wang 2018, theorem 8)."""
    shift = 1 / (2 * noise)
    tail = math.exp(epsilon + norm.logcdf(-shift - epsilon * noise))
    return norm.cdf(shift - epsilon * noise) - tail


@pytest.mark.parametrize("noise", [0.4, 1.0, 3.7, 25.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_one_release_has_the_epsilon_of_the_analytic_gaussian_mechanism(noise, delta):
    epsilon = compute_epsilon([Release(noise)], delta)
    assert analytic_delta(noise, epsilon) == pytest.approx(delta, rel=1e-3)
    assert analytic_delta(noise, epsilon - 1e-3) > delta


def test_a_release_computed_by_hand():
    # Φ(−1/2) − e Φ(−3/2) = 0.3085375 − 2.7182818 · 0.0668072
    assert compute_epsilon([Release(1.0)], 0.1269367) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    "rows, batch, noise, epochs, delta, epsilon",
    [  # tensorflow_privacy/privacy/analysis/compute_dp_sgd_privacy_test.py
        (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    ],
)
def test_published_values_of_tensorflow_privacy(rows, batch, noise, epochs, delta, epsilon):
    steps = math.ceil(epochs * rows / batch)
    releases = [Release(noise, steps, batch / rows)]
    assert compute_epsilon(releases, delta, "rdp") == pytest.approx(epsilon, abs=1e-3)
    assert compute_epsilon(releases, delta) < epsilon  # the tighter accountant


def test_the_moments_accountants_example_is_not_exceeded():
    # Abadi et al. 2016, section 5.3: q = 0.01, σ = 4, 10,000 steps, δ = 1e-5: ε ≈ 1.26
    releases = [Release(4.0, 10_000, 0.01)]
    assert compute_epsilon(releases, 1e-5) < compute_epsilon(releases, 1e-5, "rdp") < 1.26


def test_mixed_releases_have_the_epsilon_that_the_library_gives():
    releases = [Release(6.0, 30), Release(1.5, 200, 0.05)]
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(6.0), 30)
    sampled = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5))
    accountant.compose(sampled, 200)
    assert compute_epsilon(releases, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-3)


def test_sampled_releases_with_next_to_no_noise_cost_no_less_than_a_little_more_noise():
    costs = [compute_epsilon([Release(noise, 3, 0.5)], 1e-5) for noise in (1e-9, 0.01, 0.049, 0.06)]
    assert costs == sorted(costs, reverse=True) and costs[-1] > 100
    assert math.isfinite(costs[0])


@given(st.lists(st.tuples(st.floats(0.5, 50), st.integers(1, 20)), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_folded_releases_cost_what_the_single_ones_cost(pairs):
    releases = [Release(noise, times) for noise, times in pairs]
    (folded,) = fold_releases(releases)
    rdp = dp_accounting.rdp.RdpAccountant()
    for release in releases:
        rdp.compose(dp_accounting.GaussianDpEvent(release.noise), release.times)
    once = dp_accounting.rdp.RdpAccountant()
    once.compose(dp_accounting.GaussianDpEvent(folded.noise))
    assert once.get_epsilon(1e-5) == pytest.approx(rdp.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_noise_that_is_found_just_keeps_the_budget(epsilon):
    def plan(noise):
        return [Release(noise, 40), Release(2 * noise)]

    noise = find_noise(plan, epsilon, 1e-5)
    spent = compute_epsilon(plan(noise), 1e-5)
    assert epsilon - accounting.SEARCH_TOLERANCE <= spent <= epsilon


def test_no_noise_protects_nothing_and_no_release_costs_nothing():
    assert compute_epsilon([Release(0.0), Release(5.0)], 1e-5) == math.inf
    assert compute_epsilon([], 1e-5) == 0
    assert compute_epsilon([Release(0.0, times=0)], 1e-5) == 0


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan])
def test_a_delta_out_of_range_is_refused(delta):
    with pytest.raises(ConfigError, match="delta must be above 0 and below 1"):
        compute_epsilon([Release(1.0)], delta)


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf])
def test_an_epsilon_out_of_range_is_refused(epsilon):
    with pytest.raises(ConfigError, match="epsilon must be a number above 0"):
        find_noise(lambda noise: [Release(noise)], epsilon, 1e-5)


@pytest.mark.parametrize("release", [Release(-1.0), Release(math.nan), Release(1.0, 1, 1.5)])
def test_releases_that_make_no_sense_are_refused(release):
    with pytest.raises(ConfigError, match="of a release must be"):
        compute_epsilon([release], 1e-5)


def test_a_budget_that_no_noise_keeps_is_refused():
    with pytest.raises(ConfigError, match="cannot be had with any noise"):
        find_noise(lambda noise: [Release(noise), Release(0.5)], 0.1, 1e-5)


def test_without_the_library_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match=r"fedproto\[privacy\]"):
        accounting.import_library()
