"""Numbers for a page: JSON has neither infinities nor needless digits."""

from __future__ import annotations

import math
from typing import Any

SIGNIFICANT_DIGITS = 6


def to_number(value: Any) -> float | int | None:
    """Return a number with six significant digits; None for anything else, also for NaN.

    >>> to_number(0.123456789), to_number(7), to_number(float("nan")), to_number("7")
    (0.123457, 7, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**53 else None
    if not math.isfinite(value):
        return None
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def to_numbers(values: Any) -> dict[str, float | int | None]:
    """Return the numbers of an object by name; empty for anything else."""
    if not isinstance(values, dict):
        return {}
    return {str(name): to_number(value) for name, value in values.items()}


def to_count(value: Any) -> int | None:
    """Return a whole number that is not negative; None for anything else."""
    return value if type(value) is int and 0 <= value < 2**53 else None
