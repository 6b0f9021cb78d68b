"""How embeddings lie in their own space: whether classes and clients are separated."""

from __future__ import annotations

import statistics

import numpy as np
from scipy.spatial.distance import cdist

MAX_MEASURED_IMAGES = 2000


def choose_rows(count: int, at_most: int) -> np.ndarray:
    """Return that many of the numbers below a count, always the same ones, in order."""
    shuffled = np.random.default_rng(0).permutation(count)
    return np.sort(shuffled[:at_most])


def measure_embeddings(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> dict[str, float | None]:
    """Return how embeddings lie in their own space; None where a measure is not defined.

    silhouette_class                 how well the classes are separated
    silhouette_client_within_class   how well clients are separated within a class (mean)
    same_class_to_other_class        the mean distance of images of one class at different
                                     clients, divided by that of images of different classes

    x (n, d) are the embeddings, y (n,) their classes and client (n,) their clients.
    """
    chosen = choose_rows(len(x), MAX_MEASURED_IMAGES)
    x = x[chosen]
    y = y[chosen]
    client = client[chosen]
    within_classes = []
    for label in np.unique(y):
        silhouette = _silhouette(x[y == label], client[y == label])
        if silhouette is not None:
            within_classes.append(silhouette)
    mean_within_classes = None
    if within_classes:
        mean_within_classes = statistics.fmean(within_classes)
    return {
        "silhouette_class": _silhouette(x, y),
        "silhouette_client_within_class": mean_within_classes,
        "same_class_to_other_class": _distance_ratio(x, y, client),
    }


def _silhouette(x: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the silhouette, or None if there is only one group, or only single samples."""
    from sklearn.metrics import silhouette_score

    groups = len(np.unique(labels))
    if groups < 2 or groups == len(x):
        return None
    return float(silhouette_score(x, labels))


def _distance_ratio(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> float | None:
    """Return the distance of a class between clients over the distance between classes."""
    distances = cdist(x, x)
    same_class = y[:, None] == y
    other_client = client[:, None] != client
    same_class_elsewhere = same_class & other_client
    if not same_class_elsewhere.any() or same_class.all():
        return None
    between_clients = distances[same_class_elsewhere].mean()
    between_classes = distances[~same_class].mean()
    return float(between_clients / between_classes)
