"""Sources made of the arrays of each client, as `fedproto.run(data=...)` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedproto.core.class_names import class_name, normalise_name
from fedproto.data import Source, Split, from_arrays
from fedproto.errors import DataError


def from_clients(clients: Sequence, names: Sequence[str] | None = None) -> list[Source]:
    """Return one source per client, from a list of (x, y) or (x, y, x_test, y_test).

    Classes are named by the text of the labels. `names` are the clients', for errors.
    """
    called = [f"client {name}" for name in names or range(len(clients))]
    arrays_of_clients = []
    labels: set[str] = set()
    for number, client in enumerate(clients):
        arrays = _to_arrays(client, called[number])
        arrays_of_clients.append(arrays)
        train_labels = arrays[1].tolist()
        labels.update(str(label) for label in train_labels)
    distinct = {class_name(label, "the clients' labels hold") for label in labels}
    class_names = tuple(sorted(distinct, key=lambda name: (len(name), name)))
    sources = []
    for number, arrays in enumerate(arrays_of_clients):
        sources.append(_from_client(arrays, class_names, called[number]))
    return sources


def _to_arrays(client: Any, where: str) -> list[np.ndarray]:
    """Return what a client gave as arrays: x, y and perhaps x_test, y_test."""
    if not isinstance(client, (tuple, list)):
        found = type(client).__name__
        raise DataError(f"{where} must be (x, y) or (x, y, x_test, y_test), not {found}")
    if len(client) not in (2, 4):
        found = f"{len(client)} values"
        raise DataError(f"{where} must be (x, y) or (x, y, x_test, y_test), not {found}")
    try:
        arrays = [_to_array(given) for given in client]
        for position in range(1, len(arrays), 2):
            if arrays[position].dtype == object:
                arrays[position] = np.asarray(arrays[position].tolist())
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} has inputs or labels that are not an array: {error}") from error
    for y in arrays[1::2]:
        if y.dtype.kind not in "iuU" or y.ndim != 1:
            raise DataError(
                f"{where} has labels that are not a list of whole numbers or of text: "
                f"{y.dtype} of shape {y.shape}"
            )
    return arrays


def _to_array(given: Any) -> np.ndarray:
    """Return an array, tensor (on any device) or list as an array."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
    return np.asarray(given)


def _from_client(arrays: list[np.ndarray], names: tuple[str, ...], where: str) -> Source:
    """Return the source of one client; `names` are the classes of all clients."""
    number_of = {name: number for number, name in enumerate(names)}
    splits = []
    for x, labels in zip(arrays[::2], arrays[1::2], strict=True):
        try:
            splits.append(Split(x, _number_labels(labels, number_of)))
        except KeyError as error:
            raise DataError(
                f"{where} has test rows of class {error}, of which no client has training rows"
            ) from error
    return from_arrays(where, names, splits)


def _number_labels(labels: np.ndarray, number_of: dict[str, int]) -> np.ndarray:
    """Return the number of each label's class, by its normalised name."""
    listed = labels.tolist()
    number = {label: number_of[normalise_name(str(label))] for label in set(listed)}
    return np.array([number[label] for label in listed], np.int64)
