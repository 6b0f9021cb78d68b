"""The metrics of a result.json as small values: read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedproto.runs.metric_contents import shown_metrics, shown_ways


@dataclass(frozen=True)
class MetricSummary:
    """A metric over the clients of a run; None where it is not defined."""

    mean: float | None
    std: float | None
    worst: float | None


@dataclass(frozen=True)
class Bin:
    """The rows whose largest probability is in one bin."""

    rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class WayMetrics:
    """The metrics of one way to predict."""

    metrics: dict[str, MetricSummary]
    confusion: np.ndarray  # (C, C) rows of each class (row) by predicted class
    sensitivity: dict[str, float | None]
    specificity: dict[str, float | None]
    bins: list[Bin]


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run, and those of the baselines beside it."""

    ways: dict[str, WayMetrics]  # those that choose among all classes
    baselines: dict[str, dict[str, MetricSummary]]
    missing: dict[str, str]  # why a baseline was not trained


def read_metrics(result: dict[str, Any], classes: list[str]) -> RunMetrics | None:
    """Return the metrics of a result.json; None if an older version wrote it.

    Raises KeyError, TypeError or ValueError if they are damaged.
    """
    stored = result.get("metrics")
    if not stored:
        return None
    ways = {}
    for way in shown_ways(stored):
        ways[str(way)] = _to_way(stored[way], len(classes))
    baselines = {}
    missing = {}
    for name, baseline in result.get("baselines", {}).items():
        if "missing" in baseline:
            missing[str(name)] = str(baseline["missing"])
            continue
        metrics = baseline.get("metrics", baseline)
        baselines[str(name)] = _to_summaries(metrics)
    return RunMetrics(ways, baselines, missing)


def _to_way(stored: dict[str, Any], classes: int) -> WayMetrics:
    confusion = np.array(stored["confusion"])
    if confusion.shape != (classes, classes) or confusion.dtype.kind not in "iu":
        raise ValueError("a confusion matrix is not a table of counts by class")
    if (confusion < 0).any():
        raise ValueError("a confusion matrix has negative counts")
    bins = []
    for each in stored["calibration"]:
        confidence = float(each["confidence"])
        accuracy = float(each["accuracy"])
        bins.append(Bin(int(each["rows"]), confidence, accuracy))
    return WayMetrics(
        metrics=_to_summaries(stored),
        confusion=confusion,
        sensitivity=_to_numbers(stored["sensitivity"]),
        specificity=_to_numbers(stored["specificity"]),
        bins=bins,
    )


def _to_summaries(stored: dict[str, Any]) -> dict[str, MetricSummary]:
    summaries = {}
    for name in shown_metrics(stored):
        value = stored[name]
        summary = MetricSummary(
            _to_number(value["mean"]), _to_number(value["std"]), _to_number(value["worst"])
        )
        summaries[str(name)] = summary
    return summaries


def _to_numbers(stored: dict[str, Any]) -> dict[str, float | None]:
    return {str(name): _to_number(value) for name, value in stored.items()}


def _to_number(value: Any) -> float | None:
    return None if value is None else float(value)
