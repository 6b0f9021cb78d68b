"""Metrics of probabilities: whether rows that get 80% are correct in 80% of the cases.

As in metrics.py, the arguments are about n rows of C classes in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: Equal-width bins of the largest probability, for the expected calibration error.
BINS = 15


class Bins(NamedTuple):
    """What is counted of the rows whose largest probability is in each bin: (BINS,) each.

    Bin i holds i / BINS < p <= (i + 1) / BINS; the first one also holds 0.
    """

    rows: np.ndarray
    confidence: np.ndarray  # the sum of the largest probabilities
    correct: np.ndarray  # how many of the rows are predicted correctly


def compute_brier(probabilities: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of Σ_j (p_j − [y = j])², of two classes half of that; NaN without rows.

    With two classes this is the usual (p − y)², from 0 to 1; with more it is from 0 to 2. These
    are the conventions of scikit-learn's `brier_score_loss`.
    """
    if not len(y):
        return float("nan")
    targets = np.zeros(probabilities.shape)
    targets[np.arange(len(y)), y] = 1
    squares = ((probabilities - targets) ** 2).sum(1)
    scale = 0.5 if probabilities.shape[1] == 2 else 1.0
    return float(scale * squares.mean())


def count_bins(probabilities: np.ndarray, is_correct: np.ndarray) -> Bins:
    """Return the bins of some rows by their largest probability."""
    confidence = probabilities.max(1, initial=0.0)
    inner_edges = np.linspace(0, 1, BINS + 1)[1:-1]
    places = np.searchsorted(inner_edges, confidence)
    return Bins(
        rows=np.bincount(places, minlength=BINS),
        confidence=np.bincount(places, confidence, minlength=BINS),
        correct=np.bincount(places, is_correct, minlength=BINS),
    )


def compute_ece(bins: Bins) -> float:
    """Return the expected calibration error; NaN without rows.

    ECE = Σ_b n_b / n · |accuracy of bin b − mean confidence of bin b|, over BINS equal-width bins
    of the largest probability.
    """
    rows = bins.rows.sum()
    if not rows:
        return float("nan")
    return float(np.abs(bins.correct - bins.confidence).sum() / rows)


def add_bins(several: list[Bins]) -> Bins:
    """Return the bins of several clients' rows together."""
    rows = np.sum([bins.rows for bins in several], 0)
    confidence = np.sum([bins.confidence for bins in several], 0)
    correct = np.sum([bins.correct for bins in several], 0)
    return Bins(rows, confidence, correct)
