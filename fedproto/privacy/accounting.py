"""How much privacy a run spends: the epsilon of Gaussian releases, and the noise for an epsilon.

A *release* is the Gaussian mechanism: a vector that one record, or one client, moves by at most Δ
(in L2) is published with normal noise of standard deviation noise · Δ on every value. A release may
look at a random sample only (each record or client is in it with the probability `sampling`,
independently of the others), which costs less. Neighbours differ in one record or client that is
there or not (add or remove).

All numbers come from Google's dp-accounting: releases that are not sampled add up to a single one,
1 / noise² = Σ 1 / noise_i², whose epsilon is that of the analytic Gaussian mechanism (Balle and
Wang 2018); sampled ones go through its accountant of privacy loss distributions. Both are exact up
to a discretisation that never makes epsilon smaller.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from fedproto.errors import ConfigError, need

#: By how much the epsilon of a noise that was searched for may stay below the wanted one.
SEARCH_TOLERANCE = 1e-3
#: A noise multiplier beyond which nothing is left to learn.
LARGEST_NOISE = 1e6

#: Privacy losses are rounded up to multiples of this, ten times the library's default and ten
#: times as fast, where epsilon is so large that this adds less than a thousandth to it.
COARSE_INTERVAL = 1e-3
LARGE_EPSILON = 3.0

#: A sampled release with less noise than this counts as if it were not sampled, which is never
#: less. Its epsilon is above 200, and its distribution of privacy losses may not fit in memory.
SMALLEST_SAMPLED_NOISE = 0.05

AccountantName = Literal["pld", "rdp"]


class Release(NamedTuple):
    """A number of equal Gaussian releases."""

    noise: float  # standard deviation / sensitivity; 0: none, so that nothing is protected
    times: int = 1
    sampling: float = 1.0  # the probability that a record, or a client, is in the sample


def compute_epsilon(
    releases: Sequence[Release], delta: float, accountant: AccountantName = "pld"
) -> float:
    """Return the smallest epsilon at which all releases together are (epsilon, delta)-private.

    It is infinite if one of them has no noise, and 0 if there are none. `rdp` takes the accountant
    of Rényi divergences instead, whose values are larger, and those of most publications.
    """
    check_delta(delta)
    counted = tuple(release for release in releases if release.times > 0 and release.sampling > 0)
    for release in counted:
        _check_release(release)
    if any(release.noise == 0 for release in counted):
        return math.inf
    if not counted:
        return 0.0
    return _compute_epsilon(counted, delta, accountant)


@functools.lru_cache(maxsize=4096)
def _compute_epsilon(
    releases: tuple[Release, ...], delta: float, accountant: AccountantName
) -> float:
    library = import_library()
    folded = fold_releases([_leave_out_sampling(release) for release in releases])
    if accountant == "pld" and len(folded) == 1 and folded[0].sampling == 1:
        return float(library.get_epsilon_gaussian(folded[0].noise, delta))
    if accountant == "rdp":
        return _compose(library.rdp.RdpAccountant(), folded, delta)
    coarse = library.pld.PLDAccountant(value_discretization_interval=COARSE_INTERVAL)
    epsilon = _compose(coarse, folded, delta)
    if epsilon >= LARGE_EPSILON:
        return epsilon
    return min(epsilon, _compose(library.pld.PLDAccountant(), folded, delta))


def _compose(accountant: Any, releases: Sequence[Release], delta: float) -> float:
    """Return the epsilon of releases by one of the library's accountants."""
    library = import_library()
    for release in releases:
        event = library.GaussianDpEvent(release.noise)
        if release.sampling < 1:
            event = library.PoissonSampledDpEvent(release.sampling, event)
        accountant.compose(event, release.times)
    return float(accountant.get_epsilon(delta))


def _leave_out_sampling(release: Release) -> Release:
    """Return a release as if it were not sampled if it has next to no noise."""
    return release._replace(sampling=1.0) if release.noise < SMALLEST_SAMPLED_NOISE else release


def fold_releases(releases: Sequence[Release]) -> tuple[Release, ...]:
    """Return the same releases with all that are not sampled as one: 1/noise² = Σ times/noise_i².

    >>> fold_releases([Release(2.0, times=4), Release(1.0, times=3, sampling=0.1)])
    (Release(noise=1.0, times=1, sampling=1.0), Release(noise=1.0, times=3, sampling=0.1))
    """
    precision = math.fsum(each.times / each.noise**2 for each in releases if each.sampling == 1)
    sampled = tuple(each for each in releases if each.sampling < 1)
    if not precision:
        return sampled
    return (Release(1 / math.sqrt(precision)), *sampled)


def find_noise(
    plan: Callable[[float], Sequence[Release]],
    epsilon: float,
    delta: float,
    accountant: AccountantName = "pld",
) -> float:
    """Return the least noise with which a plan is (epsilon, delta)-private.

    plan  noise -> the releases that are made with it; more noise must not raise their epsilon

    The epsilon of the noise that is found lies at most SEARCH_TOLERANCE below the wanted one, and
    never above. Raises ConfigError if no noise is enough.
    """
    check_epsilon(epsilon)
    high = 1.0
    while compute_epsilon(plan(high), delta, accountant) > epsilon:
        high *= 2
        if high > LARGEST_NOISE:
            raise ConfigError(
                f"epsilon={epsilon:g} with delta={delta:g} cannot be had with any noise: raise "
                "epsilon, or have fewer rounds"
            )
    low = high / 2
    while low > 1 / LARGEST_NOISE and compute_epsilon(plan(low), delta, accountant) <= epsilon:
        high = low
        low /= 2
    while epsilon - compute_epsilon(plan(high), delta, accountant) > SEARCH_TOLERANCE:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if compute_epsilon(plan(middle), delta, accountant) <= epsilon:
            high = middle
        else:
            low = middle
    return high


def check_epsilon(epsilon: float) -> None:
    """Raise ConfigError unless epsilon is a finite number above 0."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"epsilon must be a number above 0, not {epsilon}")


def check_delta(delta: float) -> None:
    """Raise ConfigError unless delta lies between 0 and 1."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be above 0 and below 1, not {delta}")


def _check_release(release: Release) -> None:
    """Raise ConfigError unless a release has a noise and a sampling that make sense."""
    if not (math.isfinite(release.noise) and release.noise >= 0):
        raise ConfigError(f"the noise of a release must be at least 0, not {release.noise}")
    if not 0 < release.sampling <= 1:
        raise ConfigError(
            f"the sampling of a release must be above 0 and at most 1, not {release.sampling}"
        )


def import_library() -> Any:
    """Return Google's dp-accounting; MissingExtra says how to install it."""
    return need("dp_accounting", "'fedproto[privacy]'", "differential privacy")
