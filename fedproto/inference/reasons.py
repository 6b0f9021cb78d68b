"""What is near an input: prototypes, means of the client's own classes, and its training rows.

Distances are L2, in the space of the model's embeddings, where Eq. 4 decides; where no model was
trained, in that of the feature map by which the closed form decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedproto.core import prototypes
from fedproto.core.neighbours import find_nearest
from fedproto.errors import ConfigError, DataError
from fedproto.inference.trained_client import TrainedClient
from fedproto.inference.training_rows import TrainingRows, TrainingSource
from fedproto.inference.ways import Among

#: How many of each kind are shown unless more are asked for.
DEFAULT_COUNT = 3


@dataclass(frozen=True)
class NearClass:
    """A class, and how far an input is from its prototype or mean."""

    name: Any  # of the class
    distance: float
    own: bool = True  # whether the client has training rows of the class


@dataclass(frozen=True)
class NearRow:
    """A training row, and how far an input is from it."""

    row: int  # its number in the training set of its data, as in partition.json
    name: Any  # of its class
    distance: float
    place: str | None = None  # its file, or file and line, where that is known


@dataclass(frozen=True)
class Surroundings:
    """What is near an input, each kind with the nearest first."""

    prototypes: tuple[NearClass, ...] = ()  # of the federation; none if it has none
    means: tuple[NearClass, ...] = ()  # of the training rows of the client's own classes
    rows: tuple[NearRow, ...] = ()  # training rows of the client


@dataclass(frozen=True)
class Reason(Surroundings):
    """An answer and its reasons, as `Classifier.explain` returns them."""

    label: Any = None  # the answer, as `predict` gives it
    by: str = "prototype"  # what decided
    #: The candidates by their probability, the most probable first.
    probabilities: tuple[tuple[Any, float], ...] = ()
    missing: str | None = None  # why there are neither means nor rows; None: there are


class ClassVectors(NamedTuple):
    """A vector per class, and the classes of which the client has training rows."""

    names: Sequence[Any]
    values: Tensor  # (classes, d)
    own: Collection[Any]


class Explainer:
    """Finds what is near the embeddings of inputs.

    prototypes  those to choose among; None if there are none
    samples     where training rows come from
    count       how many of each kind are found
    """

    def __init__(
        self,
        prototypes: ClassVectors | None,
        samples: TrainingSource,
        count: int,
        trained: TrainedClient | None = None,
    ) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"count is a whole number above 0, not {count!r}")
        self.count = count
        self.missing: str | None = None  # why there are no training rows; None: there are
        self._prototypes = prototypes
        self._rows: TrainingRows | None = None
        self._means: ClassVectors | None = None
        try:
            self._rows = samples.load(trained)
        except DataError as error:
            self.missing = str(error)
        if trained is not None and self._rows is not None:
            self._means = _compute_means(self._rows)

    @classmethod
    def of(
        cls, trained: TrainedClient, among: Among = "all", count: int = DEFAULT_COUNT
    ) -> Explainer:
        """Return what explains the answers of a trained client, among all classes or its own."""
        return cls(_select_prototypes(trained, among), trained.training, count, trained)

    def explain(self, points: Tensor) -> list[Surroundings]:
        """Return what is near each of some embeddings, (n, d)."""
        near_prototypes = _find_classes(points, self._prototypes, self.count)
        near_means = _find_classes(points, self._means, self.count)
        near_rows = _find_rows(points, self._rows, self.count)
        together = zip(near_prototypes, near_means, near_rows, strict=True)
        return [Surroundings(*each) for each in together]


def _find_rows(points: Tensor, rows: TrainingRows | None, count: int) -> list[tuple[NearRow, ...]]:
    """Return the training rows nearest to each point; none if there are no rows."""
    if rows is None:
        return [()] * len(points)
    numbers, distances = find_nearest(points, rows.features, count)
    found = []
    for places, gaps in zip(numbers.tolist(), distances.tolist(), strict=True):
        near = []
        for place, gap in zip(places, gaps, strict=True):
            number = int(rows.numbers[place])
            where = None if rows.place is None else rows.place(number)
            near.append(NearRow(number, rows.labels[place], gap, where))
        found.append(tuple(near))
    return found


def _find_classes(
    points: Tensor, vectors: ClassVectors | None, count: int
) -> list[tuple[NearClass, ...]]:
    """Return the classes whose vectors are nearest to each point; of equals, the first."""
    if vectors is None or not len(vectors.names):
        return [()] * len(points)
    # As the classifier measures them, to the bit.
    distances = prototypes.distances(points.to(vectors.values), vectors.values, "l2")
    ordered = distances.sort(dim=1, stable=True)
    found = []
    for places, gaps in zip(ordered.indices.tolist(), ordered.values.tolist(), strict=True):
        near = []
        for place, gap in zip(places[:count], gaps[:count], strict=True):
            name = vectors.names[place]
            near.append(NearClass(name, gap, name in vectors.own))
        found.append(tuple(near))
    return found


def _select_prototypes(trained: TrainedClient, among: Among) -> ClassVectors | None:
    """Return the prototypes of the candidates; None if the federation has none."""
    shared = trained.prototypes
    if shared is None or trained.compares_fixed:
        return None
    names = trained.candidates("prototype", among)
    return ClassVectors(names, shared.over(names).values.float(), trained.own)


def _compute_means(rows: TrainingRows) -> ClassVectors:
    """Return the mean of the training rows of each class (Eq. 3)."""
    names, labels = np.unique(np.array(rows.labels), return_inverse=True)
    targets = torch.from_numpy(labels)
    weights = torch.ones(len(labels)).to(rows.features)
    means, _ = prototypes.class_means(rows.features, targets, weights, len(names))
    listed = names.tolist()
    return ClassVectors(listed, means, listed)
