"""The metrics of a finished run as result.json holds them, and what they say in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedproto.core.federation import Federation
from fedproto.core.measurement import (
    LOWER_IS_BETTER,
    METRICS,
    MeasuredClient,
    Measurement,
    Rows,
    keep_own_scores,
    pool_measurements,
    replace_nan,
    summarise_values,
)
from fedproto.core.metrics import compute_probabilities

#: What tables call the baselines.
BASELINES = {
    "majority": "majority class",
    "local": "local training",
    "pooled": "pooled training",
}


def describe_client_metrics(measured: MeasuredClient) -> dict[str, Any]:
    """Return a client's `metrics`: for each way to predict, each metric, null if not defined."""
    return {way: measurement.describe_values() for way, measurement in measured.ways.items()}


def describe_metrics(
    federation: Federation, measured: dict[int, MeasuredClient]
) -> dict[str, dict[str, Any]]:
    """Return the `metrics` of result.json: for each way to predict, each metric over clients.

    A metric that is one number has its `mean` and `std` over the clients for which it is defined,
    the value of the `worst` client, and the value for all test rows `pooled`. Sensitivity,
    specificity, the confusion matrix and the calibration are those of all test rows.
    """
    described = {}
    for way in _list_ways(measured):
        several = {client: each.ways[way] for client, each in measured.items() if way in each.ways}
        rows = _join_rows(federation, measured, way)
        pooled = pool_measurements(list(several.values()), rows, federation.metrics)
        described[way] = _describe_way(federation, several, pooled)
    return described


def _list_ways(measured: dict[int, MeasuredClient]) -> list[str]:
    ways: dict[str, None] = {}
    for each in measured.values():
        ways |= dict.fromkeys(each.ways)
    return list(ways)


def _describe_way(
    federation: Federation, several: dict[int, Measurement], pooled: Measurement
) -> dict[str, Any]:
    lower_is_better = {*LOWER_IS_BETTER}
    lower_is_better |= {metric.name for metric in federation.metrics if metric.lower_is_better}
    numbers = list(several)
    described: dict[str, Any] = {}
    for name, value in pooled.values.items():
        values = [measurement.values[name] for measurement in several.values()]
        summary = summarise_values(values, lower_is_better=name in lower_is_better)
        place = summary["worst_client"]
        if place is not None:
            summary["worst_client"] = numbers[int(place)]
        described[name] = summary | {"pooled": replace_nan(value)}
    described |= {name: value for name, value in pooled.describe().items() if name not in described}
    failures = dict.fromkeys(pooled.failures)
    for measurement in several.values():
        failures |= dict.fromkeys(measurement.failures)
    if failures:
        described["failures"] = list(failures)
    return described


def _join_rows(
    federation: Federation, measured: dict[int, MeasuredClient], way: str
) -> Rows | None:
    """Return the rows of all clients with the probabilities of a way, where they were kept."""
    tables = []
    labels = []
    for client, each in measured.items():
        if way not in each.ways:
            continue
        if each.scores is None or each.y is None:
            return None
        scores = each.scores.get(way)
        if scores is None:
            scores = keep_own_scores(
                each.scores[way.removesuffix("_own")], federation.members[client].classes
            )
        tables.append(compute_probabilities(scores))
        labels.append(each.y)
    return Rows(np.concatenate(tables), np.concatenate(labels))


# --- the majority class


def describe_majority(federation: Federation) -> dict[str, Any]:
    """Return what always predicting the most frequent class of the training rows gets.

    `accuracy` is its mean and std over clients, each with its own most frequent class, and its
    value for all test rows `pooled`. `clients` holds the accuracy of each client, and `class` the
    most frequent class of all training rows together, with its `class_accuracy` on all test rows.
    """
    classes = len(federation.classes)
    all_train = torch.zeros(classes, dtype=torch.int64)
    all_test = torch.zeros(classes, dtype=torch.int64)
    accuracies = []
    tests = []
    correct = 0
    for member in federation.members:
        train = torch.bincount(member.train.y[member.train.rows].cpu(), minlength=classes)
        test = torch.bincount(member.test.y[member.test.rows].cpu(), minlength=classes)
        right = int(test[train.argmax()])
        accuracies.append(right / max(1, int(test.sum())))
        tests.append((test, right))
        correct += right
        all_train += train
        all_test += test
    rows = int(all_test.sum())
    majority = int(all_train.argmax())
    summary = summarise_values(accuracies)
    balanced = [1 / int((test > 0).sum()) if right else 0.0 for test, right in tests]
    return {
        "accuracy": summary | {"pooled": correct / rows},
        "balanced_accuracy": summarise_values(balanced),
        "clients": accuracies,
        "class": federation.classes[majority],
        "class_accuracy": int(all_test[majority]) / rows,
    }


# --- sentences


def explain_majority(result: dict[str, Any]) -> str | None:
    """Return a warning for a run that is no better than always predicting the majority class.

    Of the ways to predict among all classes, those whose mean accuracy is not above it are named.
    None if there is no such way, or if the result is of an older version.
    """
    majority = result.get("baselines", {}).get("majority")
    metrics = result.get("metrics", {})
    if not majority:
        return None
    bound = majority["accuracy"]["mean"]
    named = []
    for way in shown_ways(metrics):
        accuracy = metrics[way]["accuracy"]["mean"]
        if accuracy is not None and accuracy <= bound + 1e-12:
            balanced = metrics[way]["balanced_accuracy"]["mean"]
            named.append(f"by {way} {accuracy:.1%} (balanced {_percent(balanced)})")
    if not named:
        return None
    return (
        f"the accuracy {' and '.join(named)} is not above {bound:.1%}, which is what always "
        "predicting each client's most frequent class gets"
    )


def list_failures(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each metric from outside that failed, and is null in the result."""
    failures: dict[str, None] = {}
    for way in result.get("metrics", {}).values():
        failures |= dict.fromkeys(way.get("failures", ()))
    return list(failures)


def _percent(value: float | None) -> str:
    return "not defined" if value is None or math.isnan(value) else f"{value:.1%}"


def shown_ways(metrics: dict[str, Any]) -> list[str]:
    """Return the ways to predict that tables show: those among all classes."""
    own = {f"{way}_own" for way in metrics}
    return [way for way in metrics if way not in own]


def shown_metrics(way: dict[str, Any]) -> list[str]:
    """Return the metrics of a way to predict that have a mean over clients, in order."""
    known: Sequence[str] = [name for name in METRICS if name in way]
    further = [
        name
        for name, value in way.items()
        if name not in METRICS and isinstance(value, dict) and "worst_client" in value
    ]
    return [*known, *further]
