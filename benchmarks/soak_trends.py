"""Whether something grows: slopes with their intervals, of a soak's samples over its rounds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
SETTLED_ROUNDS = 20  # of a process's life, in which it fills its caches: they are left out
Point = tuple[float, float]


class Slope(NamedTuple):
    """Growth per round, and the half-width of its 95% interval."""

    value: float
    half: float


def fit_slope(groups: Iterable[Sequence[Point]]) -> Slope | None:
    """Return the common slope of several lines, each of its own height; None of too few points.

    Least squares, as if the points were independent. For processes, a group is one process's life:
    that a new process begins anew says nothing about growth.
    """
    centred = []
    freedom = -1
    for points in groups:
        if len(points) > 1:
            array = np.array(points, dtype=float)
            centred.append(array - array.mean(0))
            freedom += len(points) - 1
    if freedom < 1:
        return None
    x, y = np.concatenate(centred).T
    spread = float(x @ x)
    if spread == 0:
        return None
    slope = float(x @ y) / spread
    residuals = y - slope * x
    error = float(np.sqrt(residuals @ residuals / freedom / spread))
    quantile = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
    return Slope(slope, quantile * error)


class Usage(NamedTuple):
    """What the processes of one kind used."""

    kind: str
    lives: int
    longest: int  # rounds that one process of the kind lived, as far as samples show
    memory: tuple[float, float]  # MiB: medians of the first half of the rounds, and of the second
    growth: Slope | None  # KiB per round, within the lives of processes
    descriptors: tuple[float, float]
    most_descriptors: int
    threads: tuple[float, float]


def summarise_processes(samples: list[dict[str, Any]]) -> list[Usage]:
    """Return what the processes of each kind used, over all samples; forks come and go."""
    seen: dict[str, list[tuple[float, list[Any]]]] = defaultdict(list)
    for sample in samples:
        for process in sample["processes"]:
            owner, role = process[:2]
            if owner and role != "other":
                side = "server" if owner == "server" else "member"
                seen[f"{side}: {role}"].append((sample["round"], process))
    middle = samples[-1]["round"] / 2
    return [_summarise_kind(kind, seen[kind], middle) for kind in sorted(seen)]


def _summarise_kind(kind: str, seen: list[tuple[float, list[Any]]], middle: float) -> Usage:
    lives: dict[str, list[Point]] = defaultdict(list)
    for round, (_, _, life, kilobytes, _, _) in seen:
        lives[life].append((round, kilobytes))
    settled = [_leave_out_start(points) for points in lives.values()]
    longest = max(points[-1][0] - points[0][0] for points in lives.values())
    memory = _halves([(round, process[3] / 1024) for round, process in seen], middle)
    return Usage(
        kind,
        len(lives),
        int(longest),
        memory,
        fit_slope(settled),
        _halves([(round, process[5]) for round, process in seen], middle),
        max(process[5] for _, process in seen),
        _halves([(round, process[4]) for round, process in seen], middle),
    )


def _leave_out_start(points: list[Point]) -> list[Point]:
    """Return the points of a life after its first rounds."""
    settled = points[0][0] + SETTLED_ROUNDS
    return [point for point in points if point[0] >= settled]


def _halves(points: list[Point], middle: float) -> tuple[float, float]:
    """Return the medians up to the middle and after it; nan where there is nothing."""
    first = [value for round, value in points if round <= middle]
    second = [value for round, value in points if round > middle]
    nothing = float("nan")
    return (
        statistics.median(first) if first else nothing,
        statistics.median(second) if second else nothing,
    )


class Growth(NamedTuple):
    """How the files of one kind grew."""

    kind: str
    numbers: tuple[int, int]  # of files, in the first and the last sample
    sizes: tuple[float, float, float]  # KiB: in the first, the middle and the last sample
    slopes: tuple[Slope | None, Slope | None]  # bytes per round in each half of the rounds


def summarise_files(samples: list[dict[str, Any]]) -> list[Growth]:
    """Return how the files of each kind grew."""
    kinds = sorted({kind for sample in samples for kind in sample["files"]})
    middle = samples[-1]["round"] / 2
    return [_summarise_file(kind, samples, middle) for kind in kinds]


def _summarise_file(kind: str, samples: list[dict[str, Any]], middle: float) -> Growth:
    numbers: list[int] = []
    points: list[Point] = []
    for sample in samples:
        number, size = sample["files"].get(kind, (0, 0))
        numbers.append(number)
        points.append((sample["round"], size))
    sizes = [size / 1024 for _, size in points]
    first = [point for point in points if point[0] <= middle]
    second = [point for point in points if point[0] > middle]
    return Growth(
        kind,
        (numbers[0], numbers[-1]),
        (sizes[0], sizes[len(first) - 1], sizes[-1]),
        (fit_slope([first]), fit_slope([second])),
    )
