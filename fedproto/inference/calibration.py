"""Thresholds for "none of these" from held-out rows (split conformal prediction)."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

ROUNDING = 1e-9  # tolerance for the product of a count and a fraction
SMALLEST_FRACTION = 1e-15  # 1 / 5e-324 would be infinite


def compute_novelty(by: str, scores: Tensor) -> Tensor:
    """Return how little each row of scores looks like any class.

    By prototypes that is the distance to the nearest one; by head, or by both, it is 1 minus the
    largest softmax.
    """
    if by == "prototype":
        return -scores.amax(1)
    return 1 - scores.softmax(1).amax(1)


def compute_threshold(calibration: np.ndarray, reject: float) -> float:
    """Return the novelty that a fraction `reject` of future known inputs exceeds, on average.

    It is the ⌈(n + 1)(1 − reject)⌉-th smallest of the n values in `calibration`. If n is less
    than `count_rows_needed(reject)` it is infinite, so ask `can_reject` before relying on it.
    """
    place = math.ceil((len(calibration) + 1) * (1 - reject) - ROUNDING)
    if place <= 0:
        return -math.inf
    if place > len(calibration):
        return math.inf
    return float(np.sort(calibration)[place - 1])


def count_rows_needed(reject: float) -> int:
    """Return the fewest held-out rows that give a finite threshold: ⌈1 / reject⌉ − 1."""
    fraction = max(reject, SMALLEST_FRACTION)
    return math.ceil((1 - ROUNDING) / fraction) - 1


def can_reject(calibration: np.ndarray, reject: float) -> bool:
    """Return whether this calibration can reject a fraction of known inputs; 0 is always met."""
    if reject == 0:
        return True
    return len(calibration) > 0 and len(calibration) >= count_rows_needed(reject)


def explain_too_few_rows(who: str, rows: int, reject: float) -> str:
    """Return a sentence about a calibration that is too small for the fraction asked for."""
    needed = f"rejecting {reject:g} of known inputs needs {count_rows_needed(reject)}"
    if rows == 0:
        return f"{who} has no held-out rows to calibrate on, and {needed}"
    smallest = math.ceil(10_000 / (rows + 1)) / 10_000  # rounded up, so that it is accepted
    noun = "row" if rows == 1 else "rows"
    return (
        f"{who} has {rows} held-out {noun} to calibrate on, and {needed}: "
        f"the smallest fraction that {rows} can give is {smallest:g}"
    )
