"""A client's confusion matrix, from what its run folder keeps of its test rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedproto.core.files import parse_json, unseal
from fedproto.errors import RunFolderError
from fedproto.runs.client_models import INDEX
from fedproto.runs.folder import CLIENT_MODELS, VERSION
from fedproto.watch.numbers import to_count
from fedproto.watch.plain_files import read_plain, stamp_of
from fedproto.watch.prototype_map import Prototypes, read_tensors_named


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
    if stamp_of(folder / INDEX) is None or (folder / CLIENT_MODELS).is_symlink():
        return None
    where = f"{name}/{INDEX}"
    index = unseal(parse_json(read_plain(folder / INDEX, where), where), VERSION, where)
    entries = index.get("clients")
    round = to_count(index.get("round"))
    if not isinstance(entries, list) or client >= len(entries) or round is None:
        return None
    shard = to_count(entries[client].get("shard")) if isinstance(entries[client], dict) else None
    if shard is None:
        return None
    file = f"round-{round:08d}-{shard:05d}.safetensors"
    keys = {key: f"{client}.known.{key}" for key in ("features", "logits", "labels")}
    path = folder / CLIENT_MODELS / file
    tensors = read_tensors_named(path, tuple(keys.values()), f"{name}/{CLIENT_MODELS}/{file}")
    if len(tensors) < len(keys):
        return None
    outputs = {key: tensors[stored] for key, stored in keys.items()}
    rows = len(outputs["labels"])
    fits = outputs["labels"].ndim == 1
    for key in ("features", "logits"):
        fits = fits and outputs[key].ndim == 2 and len(outputs[key]) == rows
    if not fits:
        raise RunFolderError(f"{name}/{CLIENT_MODELS}/{file} has outputs that do not fit")
    return outputs


def _squared_distances(features: np.ndarray, points: np.ndarray) -> np.ndarray:
    products = features @ points.T
    return (features**2).sum(1)[:, None] + (points**2).sum(1) - 2 * products


def _count(labels: np.ndarray, predicted: np.ndarray, classes: int) -> list[list[int]]:
    """Return how many rows of each class (row) were taken for each class (column)."""
    table = np.zeros((classes, classes), int)
    np.add.at(table, (labels, predicted), 1)
    return table.tolist()
