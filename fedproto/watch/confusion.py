"""A client's confusion matrix, from what its run folder keeps of its test rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedproto.errors import RunFolderError
from fedproto.runs.folder import CLIENT_MODELS
from fedproto.watch.client_tensors import read_client_tensors
from fedproto.watch.prototype_map import Prototypes


def count_confusions(
    folder: Path, name: str, client: int, prototypes: Prototypes | None
) -> dict[str, Any] | None:
    """Return a client's confusion matrix per way to predict; None if the run kept no outputs.

    A run keeps the outputs for one half of a client's test rows, which `rows` counts. The way
    `prototype` is the nearest global prototype of all classes.
    """
    outputs = _read_outputs(folder, name, client)
    if outputs is None:
        return None
    labels = outputs["labels"].astype(int)
    logits = outputs["logits"]
    classes = logits.shape[1]
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise RunFolderError(f"{name}/{CLIENT_MODELS} has labels beyond its classes")
    ways = {"head": _count(labels, logits.argmax(1), classes)}
    features = outputs["features"]
    if prototypes is not None and prototypes.values.shape == (classes, features.shape[1]):
        distances = _squared_distances(features, prototypes.values)
        distances[:, ~prototypes.known] = np.inf
        ways["prototype"] = _count(labels, distances.argmin(1), classes)
    return {"rows": len(labels), "ways": ways}


def _read_outputs(folder: Path, name: str, client: int) -> dict[str, np.ndarray] | None:
    """Return features, logits and labels of a client's kept test rows."""
    keys = ("features", "logits", "labels")
    outputs = read_client_tensors(folder, name, client, "known", keys)
    if outputs is None or len(outputs) < len(keys):
        return None
    rows = len(outputs["labels"])
    fits = outputs["labels"].ndim == 1
    for key in ("features", "logits"):
        fits = fits and outputs[key].ndim == 2 and len(outputs[key]) == rows
    if not fits:
        raise RunFolderError(f"{name}/{CLIENT_MODELS} has outputs that do not fit")
    return outputs


def _squared_distances(features: np.ndarray, points: np.ndarray) -> np.ndarray:
    products = features @ points.T
    return (features**2).sum(1)[:, None] + (points**2).sum(1) - 2 * products


def _count(labels: np.ndarray, predicted: np.ndarray, classes: int) -> list[list[int]]:
    """Return how many rows of each class (row) were taken for each class (column)."""
    table = np.zeros((classes, classes), int)
    np.add.at(table, (labels, predicted), 1)
    return table.tolist()
