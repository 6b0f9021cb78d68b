"""Calibrated probabilities: one temperature per way to classify, fitted on validation rows.

Dividing all scores by a temperature changes no answer, only how sure it is (Guo et al., 2017).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_ROWS = 10  # fewer validation rows say nothing about probabilities
MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 1e3
HALVINGS = 60  # of the interval between the two, which makes it smaller than a rounding error


def fit_temperature(scores: Tensor, labels: Tensor) -> float | None:
    """Return the T for which softmax(scores / T) has the smallest log loss; None for few rows.

    scores  (n, C) finite, larger is likelier
    labels  (n,) the column of each row's class

    The targets are Platt's: of n rows, the true class counts 1 − 1 / (n + 2) and the others share
    the rest, so that rows that are all correct do not make the classifier infinitely sure.
    """
    rows, classes = scores.shape
    if rows < MIN_ROWS or classes < 2:
        return None
    values = scores.double()
    missing = 1 / (rows + 2)
    targets = torch.full_like(values, missing / (classes - 1))
    targets[torch.arange(rows), labels] = 1 - missing
    wanted = (targets * values).sum(1).mean()

    def is_too_sure(temperature: float) -> bool:
        """Return whether the expected score is above the one wanted: the slope of a convex loss."""
        probabilities = (values / temperature).softmax(1)
        return bool((probabilities * values).sum(1).mean() > wanted)

    low = math.log(MIN_TEMPERATURE)
    high = math.log(MAX_TEMPERATURE)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if is_too_sure(math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
