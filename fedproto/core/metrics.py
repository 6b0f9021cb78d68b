"""Accuracies: which predictions are correct, and means over clients.

An algorithm predicts by named scores, such as `head` and `prototype`. Each gives two accuracies:
`NAME` chooses among all classes, `NAME_own` among the classes the client trains on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedproto.core.types import Tree

#: The accuracies of the algorithms that come with the package.
ACCURACIES = ("head", "head_own", "prototype", "prototype_own")


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
