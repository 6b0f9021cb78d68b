"""All metrics of a client's predictions in one value, and those of several clients together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fedproto.core.calibration_metrics import Bins, add_bins, compute_brier, compute_ece, count_bins
from fedproto.core.metrics import (
    compute_accuracy,
    compute_auroc,
    compute_balanced_accuracy,
    compute_macro_f1,
    compute_probabilities,
    compute_sensitivity,
    compute_specificity,
    count_confusions,
    predict_classes,
)
from fedproto.core.types import Tree
from fedproto.errors import DataError, FedProtoError, locate, name_failure

#: The metrics that are one number, in the order in which they are shown.
METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "brier", "ece")
#: Of these, the ones that are better when they are smaller.
LOWER_IS_BETTER = ("brier", "ece")


class Metric(NamedTuple):
    """A further metric: (probabilities (n, C), y (n,), names of the C classes) -> one number."""

    name: str
    compute: Callable[[np.ndarray, np.ndarray, tuple[str, ...]], float]
    lower_is_better: bool = False


@dataclass(frozen=True)
class Measurement:
    """What is measured of some rows that were predicted in one way."""

    classes: tuple[str, ...]
    #: METRICS and further ones, by name; NaN where a metric is not defined for these rows.
    values: dict[str, float]
    #: (C, C + 1) rows of each class (row) by predicted class; the last column: nothing predicted.
    confusions: np.ndarray
    bins: Bins
    #: A sentence for each further metric that failed; its value is NaN.
    failures: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows that were predicted."""
        return int(self.confusions.sum())

    def describe_values(self) -> dict[str, Any]:
        """Return the metrics as JSON holds them, with null where one is not defined.

        Sensitivity and specificity are given for the classes that have rows.
        """
        occurring = self.confusions.sum(1) > 0
        return {
            **{name: replace_nan(value) for name, value in self.values.items()},
            "sensitivity": self._name_classes(compute_sensitivity(self.confusions), occurring),
            "specificity": self._name_classes(compute_specificity(self.confusions), occurring),
        }

    def describe(self) -> dict[str, Any]:
        """Return everything as JSON holds it.

        `confusion` has a row per true class and a column per predicted class, in the order of
        `classes`; `unpredicted` counts the rows of each class for which no class had a score.
        `calibration` has the bins of `ece` that hold rows.
        """
        return {
            "rows": self.rows,
            **self.describe_values(),
            "classes": list(self.classes),
            "confusion": self.confusions[:, :-1].tolist(),
            "unpredicted": self.confusions[:, -1].tolist(),
            "calibration": self.describe_bins(),
        }

    def describe_bins(self) -> list[dict[str, Any]]:
        """Return the bins that hold rows, each with its mean confidence and its accuracy."""
        described = []
        for rows, confidence, correct in zip(*self.bins, strict=True):
            if rows:
                described.append(
                    {
                        "rows": int(rows),
                        "confidence": float(confidence / rows),
                        "accuracy": float(correct / rows),
                    }
                )
        return described

    def _name_classes(self, values: np.ndarray, occurring: np.ndarray) -> dict[str, float | None]:
        named = zip(self.classes, values.tolist(), occurring, strict=True)
        return {name: replace_nan(value) for name, value, is_there in named if is_there}


def replace_nan(value: float) -> float | None:
    """Return None for NaN or an infinity, which JSON does not have, otherwise the value."""
    return value if math.isfinite(value) else None


# --- measuring


def measure_predictions(
    probabilities: Any, y: Any, classes: Sequence[str], further: Sequence[Metric] = ()
) -> Measurement:
    """Return all metrics of n rows whose classes are known; `.describe()` makes JSON of them.

    Args:
        probabilities: (n, C), an array or tensor. Where there are scores instead, pass
            `metrics.compute_probabilities(scores)`. The largest is what is predicted, the first of
            equal ones; a row of zeros predicts nothing and is counted as wrong.
        y: (n,) the true classes, as places 0 .. C-1 in `classes`.
        classes: the names of the C classes, in the order of the columns.
        further: metrics beside those of METRICS.

    Without rows, and wherever else a metric is not defined, its value is NaN (in JSON null).
    Raises DataError where the shapes do not fit, or values are not probabilities or classes.

    >>> measured = measure_predictions([[0.9, 0.1], [0.6, 0.4]], [0, 1], ["benign", "malignant"])
    >>> measured.values["accuracy"], measured.describe()["sensitivity"]
    (0.5, {'benign': 1.0, 'malignant': 0.0})
    """
    table = np.asarray(probabilities, np.float64)
    labels = np.asarray(y)
    if table.ndim != 2 or table.shape[1] != len(classes):
        raise DataError(
            f"probabilities must be (rows, {len(classes)}), one column per class, not {table.shape}"
        )
    if labels.shape != (len(table),):
        raise DataError(f"y must hold one class per row, {len(table)}, not {labels.shape}")
    if len(labels) and labels.dtype.kind not in "iu":
        raise DataError(f"y must hold the numbers of classes, not {labels.dtype}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(f"y must hold numbers from 0 to {len(classes) - 1}")
    if not ((table >= 0) & (table <= 1 + 1e-6)).all():
        raise DataError("probabilities must be numbers from 0 to 1; scores are converted first")
    no_class_has_one = np.where(table > 0, table, -np.inf)
    predicted = predict_classes(no_class_has_one)
    return _measure(table, predicted, labels.astype(np.int64), tuple(classes), further)


def measure_scores(
    scores: Mapping[str, np.ndarray],
    y: np.ndarray,
    own_classes: Sequence[int],
    classes: tuple[str, ...],
    further: Sequence[Metric] = (),
) -> dict[str, Measurement]:
    """Return the metrics of one client's rows for each way to predict: `NAME` and `NAME_own`.

    scores       (n, C) each, larger is likelier, −∞ where a class has no score
    y            (n,) the classes of the rows
    own_classes  the classes that the client trains on
    """
    measured = {}
    for name, values in scores.items():
        own_values = keep_own_scores(values, own_classes)
        for way, chosen in ((name, values), (f"{name}_own", own_values)):
            probabilities = compute_probabilities(chosen)
            predicted = predict_classes(chosen)
            measured[way] = _measure(probabilities, predicted, y, classes, further)
    return measured


def keep_own_scores(scores: np.ndarray, own_classes: Sequence[int]) -> np.ndarray:
    """Return scores, (n, C), with −∞ in the place of those of classes that are not a client's."""
    is_foreign = np.ones(scores.shape[1], bool)
    is_foreign[list(own_classes)] = False
    return np.where(is_foreign, -np.inf, scores)


def _measure(
    probabilities: np.ndarray,
    predicted: np.ndarray,
    y: np.ndarray,
    classes: tuple[str, ...],
    further: Sequence[Metric],
) -> Measurement:
    confusions = count_confusions(y, predicted, len(classes))
    bins = count_bins(probabilities, predicted == y)
    values = _values_of_counts(confusions, bins)
    values["auroc"] = compute_auroc(probabilities, y)
    values["brier"] = compute_brier(probabilities, y)
    failures = []
    for metric in further:
        value, failure = _compute_further(metric, probabilities, y, classes)
        values[metric.name] = value
        failures += failure
    return Measurement(classes, _in_order(values), confusions, bins, tuple(failures))


def _values_of_counts(confusions: np.ndarray, bins: Bins) -> dict[str, float]:
    """Return the metrics that follow from counts, which can be added up over clients."""
    return {
        "accuracy": compute_accuracy(confusions),
        "balanced_accuracy": compute_balanced_accuracy(confusions),
        "macro_f1": compute_macro_f1(confusions),
        "ece": compute_ece(bins),
    }


def _in_order(values: dict[str, float]) -> dict[str, float]:
    """Return values in the order of METRICS, and then further ones."""
    return {name: values[name] for name in (*METRICS, *values)}


def _compute_further(
    metric: Metric, probabilities: np.ndarray, y: np.ndarray, classes: tuple[str, ...]
) -> tuple[float, list[str]]:
    """Return the value of a further metric; where it fails, NaN and a sentence that says why."""
    if not len(y):
        return float("nan"), []
    try:
        return float(metric.compute(probabilities.copy(), y.copy(), classes)), []
    except FedProtoError as error:
        return float("nan"), [str(error)]
    except Exception as error:
        place = locate(error)
        where = "" if place is None else f" ({place})"
        return float("nan"), [f"metric {metric.name} failed{where}: {name_failure(error)}"]


# --- several clients together


class MeasuredClient(NamedTuple):
    """What is measured of one client; nothing if it has no rows."""

    ways: dict[str, Measurement]  # by the way to predict, such as `head` and `head_own`
    #: The scores of its rows, (n, C) each, and their classes (n,); None: too many to be kept.
    scores: dict[str, np.ndarray] | None
    y: np.ndarray | None


def collect_accuracies(measured: Mapping[int, MeasuredClient]) -> Tree:
    """Return every client's accuracies, name -> (clients,), as an engine's `evaluate` does.

    measured  all clients by their numbers, 0 .. clients − 1

    A client without rows has accuracy 0. If no client has rows, there are no names either.
    """
    accuracies: Tree = {}
    for number, client in measured.items():
        for way, measurement in client.ways.items():
            if way not in accuracies:
                accuracies[way] = torch.zeros(len(measured), dtype=torch.float64)
            accuracies[way][number] = measurement.values["accuracy"]
    return accuracies


class Rows(NamedTuple):
    """Rows with the probabilities that they got: what some metrics need of all clients' rows."""

    probabilities: np.ndarray
    y: np.ndarray


def pool_measurements(
    several: Sequence[Measurement], rows: Rows | None, further: Sequence[Metric] = ()
) -> Measurement:
    """Return the metrics of all clients' rows as if they were one client's.

    All but AUROC and further metrics follow from the clients' counts; those need `rows`, the rows
    of all clients together, and are NaN without them.
    """
    classes = several[0].classes
    confusions = np.sum([measured.confusions for measured in several], 0)
    bins = add_bins([measured.bins for measured in several])
    values = _values_of_counts(confusions, bins)
    squares = [one.values["brier"] * one.rows for one in several if one.rows]
    values["brier"] = sum(squares) / confusions.sum() if squares else float("nan")
    values["auroc"] = float("nan")
    failures = []
    if rows is not None:
        values["auroc"] = compute_auroc(rows.probabilities, rows.y)
    for metric in further:
        values[metric.name] = float("nan")
        if rows is not None:
            value, failure = _compute_further(metric, rows.probabilities, rows.y, classes)
            values[metric.name] = value
            failures += failure
    return Measurement(classes, _in_order(values), confusions, bins, tuple(failures))


def summarise_values(
    values: Sequence[float], *, lower_is_better: bool = False
) -> dict[str, float | int | None]:
    """Return a metric's mean, population std and worst value over the clients that have one.

    `worst_client` is the position of the first client with the worst value, and `clients` the
    number of clients for which the metric is defined; without any, the others are null.
    """
    numbers = np.array(values, np.float64)
    defined = np.flatnonzero(~np.isnan(numbers))
    if not len(defined):
        return {"mean": None, "std": None, "worst": None, "worst_client": None, "clients": 0}
    known = numbers[defined]
    place = int(known.argmax() if lower_is_better else known.argmin())
    return {
        "mean": replace_nan(float(known.mean())),
        "std": replace_nan(float(known.std())),
        "worst": replace_nan(float(known[place])),
        "worst_client": int(defined[place]),
        "clients": len(defined),
    }
