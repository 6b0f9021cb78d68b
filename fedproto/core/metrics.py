"""Metrics of predictions: accuracies of many clients at once, and the metrics of one table of rows.

An algorithm predicts by named scores, such as `head` and `prototype`. Each gives two ways to
predict: `NAME` chooses among all classes, `NAME_own` among the classes the client trains on.

The second half of this file is about n rows of C classes, in float64 on the CPU. A metric that is
not defined, such as the AUROC of rows of a single class, is NaN, in JSON null. Metrics of
probabilities as such are in calibration_metrics.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedproto.core.types import Tree

#: The accuracies of the algorithms that come with the package.
ACCURACIES = ("head", "head_own", "prototype", "prototype_own", "both", "both_own")
#: The predicted class of a row for which no class has a score; it is never correct.
NO_CLASS = -1


# --- accuracies of many clients at once


def mark_correct(scores: Tree, y: Tensor, own_classes: Tensor) -> Tree:
    """Return which samples each score predicts correctly, by the name of the accuracy: (..., b).

    scores       (..., b, C) each, larger is likelier, −∞ where a class has no score
    y            (..., b) the classes of the samples
    own_classes  (..., C) true where a class is one of the client's own

    A sample for which no class has a score is predicted incorrectly.
    """
    foreign = ~own_classes.unsqueeze(-2)
    correct = {}
    for name, values in scores.items():
        own_values = values.masked_fill(foreign, -torch.inf)
        correct[name] = _is_predicted(values, y)
        correct[f"{name}_own"] = _is_predicted(own_values, y)
    return correct


def _is_predicted(scores: Tensor, y: Tensor) -> Tensor:
    """Return where the class with the largest score is y, and has a score at all."""
    best, predicted = scores.max(-1)
    return (predicted == y) & (best > -torch.inf)


def divide_counts(correct: Tree, samples: Tensor) -> Tree:
    """Return each accuracy of several clients: (clients,), float64, on the CPU.

    correct  (clients,) each, the number of correct predictions
    samples  (clients,) the number of all predictions

    >>> divide_counts({"head": torch.tensor([1, 3])}, torch.tensor([2, 4]))["head"].tolist()
    [0.5, 0.75]
    """
    return {name: (count.double() / samples).cpu() for name, count in correct.items()}


def summarise(accuracies: Tree) -> dict[str, dict[str, float]]:
    """Return each accuracy's mean and (population) standard deviation over clients."""
    summaries = {}
    for name, values in accuracies.items():
        summaries[name] = {"mean": float(values.mean()), "std": float(values.std(correction=0))}
    return summaries


# --- predictions and probabilities from scores


def predict_classes(scores: np.ndarray) -> np.ndarray:
    """Return the class with the largest score, the first of equal ones, or NO_CLASS: (n,).

    scores  (n, C) larger is likelier, −∞ where a class has no score
    """
    best = scores.max(1, initial=-np.inf)
    return np.where(best > -np.inf, scores.argmax(1), NO_CLASS)


def compute_probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of scores, (n, C) in float64.

    Scores are what an algorithm's `predict` gives: a head's are its logits, those of prototypes
    are minus the distances to them. A class without a score (−∞) has the probability 0. A row for
    which no class has a score, or whose scores are not numbers, has 0 everywhere.
    """
    values = np.asarray(scores, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = values - values.max(1, keepdims=True, initial=-np.inf)
        powers = np.exp(shifted)
        probabilities = powers / powers.sum(1, keepdims=True)
    return np.where(np.isfinite(probabilities), probabilities, 0.0)


# --- metrics of the rows of a confusion matrix


def count_confusions(y: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return how often each class (row) was predicted as each class (column): (C, C + 1).

    The last column counts the rows for which nothing was predicted.

    >>> count_confusions(np.array([0, 0, 1]), np.array([0, 1, NO_CLASS]), 2).tolist()
    [[1, 1, 0], [0, 0, 1]]
    """
    columns = np.where(predicted == NO_CLASS, classes, predicted)
    cells = y * (classes + 1) + columns
    counts = np.bincount(cells, minlength=classes * (classes + 1))
    return counts.reshape(classes, classes + 1)


def compute_accuracy(confusions: np.ndarray) -> float:
    """Return the fraction of rows whose class is predicted."""
    return float(_divide(np.trace(confusions), confusions.sum()))


def compute_sensitivity(confusions: np.ndarray) -> np.ndarray:
    """Return, for each class, the fraction of its rows that are predicted as it: (C,).

    Also called recall. NaN for a class without rows.
    """
    return _divide(np.diagonal(confusions), confusions.sum(1))


def compute_specificity(confusions: np.ndarray) -> np.ndarray:
    """Return, for each class, the fraction of the other rows that are not predicted as it: (C,).

    NaN for a class if there are no rows of others.
    """
    classes = len(confusions)
    of_others = confusions.sum() - confusions.sum(1)
    predicted_wrongly = confusions[:, :classes].sum(0) - np.diagonal(confusions)
    return _divide(of_others - predicted_wrongly, of_others)


def compute_balanced_accuracy(confusions: np.ndarray) -> float:
    """Return the mean sensitivity of the classes that have rows."""
    return _mean_of_numbers(compute_sensitivity(confusions))


def compute_macro_f1(confusions: np.ndarray) -> float:
    """Return the mean F1, 2 TP / (2 TP + FP + FN), of the classes that occur or are predicted."""
    classes = len(confusions)
    correct = np.diagonal(confusions)
    occurring = confusions.sum(1) + confusions[:, :classes].sum(0)
    return _mean_of_numbers(_divide(2 * correct, occurring))


def compute_matthews(confusions: np.ndarray) -> float:
    """Return Matthews' correlation coefficient; 0 if all rows are, or are predicted as, one class.

    A row for which nothing is predicted counts as one of a further class.
    """
    classes = len(confusions)
    true = confusions.sum(1).astype(np.float64)
    predicted = confusions.sum(0).astype(np.float64)
    rows = true.sum()
    covariance = np.trace(confusions) * rows - true @ predicted[:classes]
    spread = (rows**2 - true @ true) * (rows**2 - predicted @ predicted)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


# --- metrics of the order of the rows


def compute_auroc(probabilities: np.ndarray, y: np.ndarray) -> float:
    """Return the area under the ROC curve; NaN if all rows are of one class.

    It is the probability that a row of a class is ranked above a row of another class, where ties
    count half. With two classes, rows are ranked by the probability of the second one. With more,
    it is the plain mean over the classes that occur, each against all others.
    """
    classes = probabilities.shape[1]
    if not len(y):
        return float("nan")
    if classes == 2:
        return float(_auroc_of_classes(probabilities[:, 1:], (y == 1)[:, None])[0])
    occurring = np.unique(y)
    is_class = y[:, None] == occurring
    return _mean_of_numbers(_auroc_of_classes(probabilities[:, occurring], is_class))


def _auroc_of_classes(values: np.ndarray, is_class: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve of each column: the Mann-Whitney statistic, scaled."""
    positives = is_class.sum(0).astype(np.float64)
    negatives = len(values) - positives
    rank_sums = (_rank_columns(values) * is_class).sum(0)
    wins = rank_sums - positives * (positives + 1) / 2
    return _divide(wins, positives * negatives)


def compute_average_precision(probabilities: np.ndarray, y: np.ndarray) -> float:
    """Return the area under the precision-recall curve, Σ (R_k − R_(k−1)) P_k over thresholds.

    With two classes, rows are ranked by the probability of the second one; with more, it is the
    plain mean over the classes that occur, each against all others. NaN if all rows are of one.
    """
    occurring = np.unique(y)
    if len(occurring) < 2:
        return float("nan")
    labels = np.array([1]) if probabilities.shape[1] == 2 else occurring
    areas = [_average_precision_of(probabilities[:, label], y == label) for label in labels]
    return float(np.mean(areas))


def _average_precision_of(values: np.ndarray, is_class: np.ndarray) -> float:
    """Return the area under the precision-recall curve of one class."""
    order = np.argsort(-values, kind="stable")
    ranked = values[order]
    is_last_of_equal = np.append(ranked[1:] != ranked[:-1], True)
    found = np.cumsum(is_class[order])[is_last_of_equal]
    called = np.flatnonzero(is_last_of_equal) + 1
    recall_gained = np.diff(found, prepend=0) / is_class.sum()
    return float(recall_gained @ (found / called))


def _rank_columns(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value within its column, from 1; equal values share their mean."""
    rows = len(values)
    order = values.argsort(0, kind="stable")
    ascending = np.take_along_axis(values, order, 0)
    is_new = np.ones(values.shape, bool)
    is_new[1:] = ascending[1:] != ascending[:-1]
    places = np.arange(rows)[:, None]
    first = np.maximum.accumulate(np.where(is_new, places, 0), 0)
    is_last = np.ones(values.shape, bool)
    is_last[:-1] = is_new[1:]
    ends = np.where(is_last, places, rows)[::-1]
    last = np.minimum.accumulate(ends, 0)[::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, (first + last) / 2 + 1, 0)
    return ranks


def _divide(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return the quotient of counts; NaN where it is 0 / 0."""
    with np.errstate(invalid="ignore"):
        return np.divide(above, below, dtype=np.float64)


def _mean_of_numbers(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there is none."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if len(numbers) else float("nan")
