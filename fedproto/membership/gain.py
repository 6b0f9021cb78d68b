"""What joining is worth: the difference between two models on the same test rows, and how sure."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

NORMAL_QUANTILE = 1.959963984540054  # 97.5%, for an interval of 95%


class Gain(NamedTuple):
    """Accuracy of the newcomer that joined minus accuracy alone, with a 95% interval: fractions."""

    difference: float
    low: float
    high: float
    rows: int

    def describe(self) -> str:
        """Return the gain as a sentence, such as `joining gained 4.0 points (...)`."""
        if not self.rows:
            return "there are no test rows of the newcomer's classes to measure the gain on"
        points = 100 * self.difference
        verb = "gained" if points >= 0 else "cost"
        if self.low > 0 or self.high < 0:
            judgement = "more than the choice of test rows explains"
        else:
            judgement = "which may be the choice of test rows alone"
        return (
            f"joining {verb} {abs(points):.1f} points of accuracy by head against training alone "
            f"(95% interval {100 * self.low:+.1f} to {100 * self.high:+.1f}, {self.rows} test "
            f"rows), {judgement}"
        )


def measure_gain(joined_correct: Tensor, alone_correct: Tensor) -> Gain:
    """Return the difference in accuracy between two models on the same rows.

    joined_correct, alone_correct  (n,) which rows each model predicts correctly

    The interval is Agresti and Min's for paired proportions: Wald's, after half a row was added to
    each of the four outcomes of a pair. It says how much other test rows of the same kind would
    change the difference, not what other weights at the start would.
    """
    rows = len(joined_correct)
    if not rows:
        return Gain(0.0, 0.0, 0.0, 0)
    only_joined = int((joined_correct & ~alone_correct).sum())
    only_alone = int((alone_correct & ~joined_correct).sum())
    total = rows + 2
    difference = (only_joined - only_alone) / total
    disagreement = (only_joined + only_alone + 1) / total
    deviation = math.sqrt((disagreement - difference**2) / total)
    margin = NORMAL_QUANTILE * deviation
    return Gain(
        (only_joined - only_alone) / rows,
        max(-1.0, difference - margin),
        min(1.0, difference + margin),
        rows,
    )
