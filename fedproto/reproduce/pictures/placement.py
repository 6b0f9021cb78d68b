"""Where marks and labels go so that they do not hide each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def cluster(items: Sequence[T], max_gap: float, position: Callable[[T], float]) -> list[list[T]]:
    """Return items in groups, sorted by position; neighbours in a group are at most a gap apart."""
    groups: list[list[T]] = []
    for item in sorted(items, key=position):
        if groups and position(item) - position(groups[-1][-1]) <= max_gap:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Return the places nearest to the wanted ones, in the same order, that are a gap apart."""
    from sklearn.isotonic import isotonic_regression

    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(order))
    ascending = np.asarray(wanted, float)[order]
    places = np.empty(len(order))
    places[order] = isotonic_regression(ascending - steps) + steps
    return places.tolist()
