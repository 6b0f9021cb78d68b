"""What the trials of a membership attack prove: rates, intervals, and lower bounds on epsilon.

A trial is a record that a fair coin put into the training data or left out, and a score that is
larger the more the attacker believes that it was in.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import binom, binomtest
from sklearn.metrics import roc_auc_score, roc_curve

#: Of all intervals and bounds.
CONFIDENCE = 0.95
#: The attacker guesses only its most certain trials: these fractions of them are tried.
GUESSED_FRACTIONS = (0.001, 0.01, 0.1, 1.0)
#: No number of trials that fits into memory proves a larger epsilon.
LARGEST_EPSILON = 50.0


class Rate(NamedTuple):
    """A fraction of trials, with its Clopper-Pearson interval."""

    value: float
    low: float
    high: float


class Advantage(NamedTuple):
    """The true minus the false positive rate, with an interval from those of both rates."""

    value: float
    low: float
    high: float


def clopper_pearson(successes: int, trials: int, confidence: float = CONFIDENCE) -> Rate:
    """Return the fraction of successes with its exact two-sided interval."""
    if trials == 0:
        return Rate(math.nan, 0.0, 1.0)
    interval = binomtest(successes, trials).proportion_ci(confidence, method="exact")
    return Rate(successes / trials, float(interval.low), float(interval.high))


def true_positives_at(scores: np.ndarray, included: np.ndarray, false_positives: float) -> Rate:
    """Return the largest true positive rate at a false positive rate of at most this.

    The threshold is chosen on these trials, which the interval does not account for.
    """
    false_rates, true_rates, _ = roc_curve(included, scores, drop_intermediate=False)
    allowed = false_rates <= false_positives
    best = float(true_rates[allowed].max())
    members = int(included.sum())
    return clopper_pearson(round(best * members), members)


def advantage_at(scores: np.ndarray, included: np.ndarray, threshold: float = 0.0) -> Advantage:
    """Return the advantage of guessing "in" above a threshold that is fixed beforehand.

    At 0 it is that of a likelihood ratio for a fair coin. The interval is that of two rates, each
    at half the error, so it holds whatever one has to do with the other.
    """
    guessed_in = scores > threshold
    confidence = 1 - (1 - CONFIDENCE) / 2
    members = included.astype(bool)
    true_rate = clopper_pearson(int(guessed_in[members].sum()), int(members.sum()), confidence)
    others = ~members
    false_rate = clopper_pearson(int(guessed_in[others].sum()), int(others.sum()), confidence)
    return Advantage(
        true_rate.value - false_rate.value,
        true_rate.low - false_rate.high,
        true_rate.high - false_rate.low,
    )


def area_under_curve(scores: np.ndarray, included: np.ndarray) -> float:
    """Return the probability that a member has a larger score than somebody else."""
    return float(roc_auc_score(included, scores))


# --- lower bounds on epsilon


def guess_probability(
    correct: int, guesses: int, trials: int, epsilon: float, delta: float
) -> float:
    """Return how likely so many correct guesses are at most, if the claim holds.

    Steinke, Nasr and Jagielski (2023), Theorem 5.2: trials need not be independent of each other,
    and may be of one run, as long as each record was put in by a fair coin of its own. With pure
    differential privacy the correct guesses are at most Binomial(guesses, e^ε / (1 + e^ε)). With
    delta, 2·trials·δ·max_i P[correct − i ≤ that binomial < correct] / i is added.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    probability = float(binom.sf(correct - 1, guesses, chance))
    if delta > 0 and correct > 0:
        shortfalls = np.arange(1, correct + 1)
        below = np.cumsum(binom.pmf(correct - shortfalls, guesses, chance))
        probability += 2 * trials * delta * float((below / shortfalls).max())
    return min(1.0, probability)


def epsilon_bound(
    correct: int, guesses: int, trials: int, delta: float = 0.0, confidence: float = CONFIDENCE
) -> float:
    """Return the largest epsilon that so many correct guesses refute; 0 if they refute none."""

    def is_refuted(epsilon: float) -> bool:
        likelihood = guess_probability(correct, guesses, trials, epsilon, delta)
        return likelihood <= 1 - confidence

    if not is_refuted(0.0):
        return 0.0
    low = 0.0
    high = LARGEST_EPSILON
    while high - low > 1e-6:
        middle = (low + high) / 2
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return low


def epsilon_bound_of_scores(
    scores: np.ndarray, included: np.ndarray, delta: float = 0.0, confidence: float = CONFIDENCE
) -> float:
    """Return the best lower bound on epsilon of guessing the most certain trials.

    Each of GUESSED_FRACTIONS gets its part of the error. Half of the guesses are "in", for the
    largest scores, and half are "out", for the smallest.
    """
    trials = len(scores)
    order = np.argsort(scores, kind="stable")
    members = included.astype(bool)
    error = (1 - confidence) / len(GUESSED_FRACTIONS)
    best = 0.0
    for fraction in GUESSED_FRACTIONS:
        half = int(fraction * trials) // 2
        if half == 0:
            continue
        said_out = order[:half]
        said_in = order[-half:]
        correct = int(members[said_in].sum()) + int((~members[said_out]).sum())
        best = max(best, epsilon_bound(correct, 2 * half, trials, delta, 1 - error))
    return best
