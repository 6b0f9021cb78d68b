"""Sources made of the arrays of each client, as `fedproto.run(dataset=...)` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fedproto.core.class_names import class_name, normalise_name, sort_names
from fedproto.data import Source, Split, from_arrays
from fedproto.errors import ConfigError, DataError

#: Options of arrays, which are those of `npz`.
ARRAY_OPTIONS = ("channel_order", "mean", "std", "augment")


def from_clients(
    clients: Sequence,
    names: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Source]:
    """Return one source per client, from a list of (x, y), (x, y, x_test, y_test) or Datasets.

    Classes are named by the text of the labels. `names` are the clients', for errors; `options` are
    some of `ARRAY_OPTIONS`.
    """
    options = options or {}
    _refuse_other_options(options)
    called = [f"client {name}" for name in names or range(len(clients))]
    arrays_of_clients = []
    labels: set[str] = set()
    for number, client in enumerate(clients):
        arrays = _to_arrays(client, called[number])
        arrays_of_clients.append(arrays)
        train_labels = arrays[1].tolist()
        labels.update(str(label) for label in train_labels)
    distinct = {class_name(label, "the clients' labels hold") for label in labels}
    class_names = sort_names(distinct)
    sources = []
    for number, arrays in enumerate(arrays_of_clients):
        sources.append(_from_client(arrays, class_names, called[number], options))
    return sources


def from_pair(pair: Sequence, where: str, options: Mapping[str, Any]) -> Source:
    """Return one (x, y) or (x, y, x_test, y_test), which is to be divided, as a source."""
    _refuse_other_options(options)
    arrays = _to_arrays(pair, where)
    labels = {str(label) for label in arrays[1].tolist()}
    distinct = {class_name(label, f"the labels of {where} hold") for label in labels}
    names = sort_names(distinct)
    return _from_client(arrays, names, where, options)


def collect_dataset(dataset: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the labels of a map-style torch Dataset of (x, y).

    Where it names its classes, as those of torchvision do, labels become these names.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"{where} has no length: it must be a map-style Dataset of (x, y)")
    inputs = []
    labels = []
    for row in range(len(dataset)):
        example = dataset[row]
        if not isinstance(example, (tuple, list)) or len(example) != 2:
            found = type(example).__name__
            raise DataError(f"{where} must hold (x, y) in every row, but row {row} is a {found}")
        inputs.append(_to_array(example[0]))
        labels.append(_to_array(example[1]).tolist())
    shapes = {x.shape for x in inputs}
    if len(shapes) != 1:
        found = " and ".join(str(shape) for shape in sorted(shapes)[:2]) or "no row"
        raise DataError(f"{where} must have inputs of one shape: it has {found}")
    names = getattr(dataset, "classes", None)
    if isinstance(names, (list, tuple)) and all(_is_position(label, names) for label in labels):
        labels = [str(names[label]) for label in labels]
    return np.stack(inputs), np.asarray(labels)


def _is_position(label: Any, names: Sequence) -> bool:
    return isinstance(label, int) and 0 <= label < len(names)


def _refuse_other_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in ARRAY_OPTIONS:
            accepted = ", ".join(ARRAY_OPTIONS)
            raise ConfigError(f"{name!r} has no meaning for arrays, which take {accepted}")


def _to_arrays(client: Any, where: str) -> list[np.ndarray]:
    """Return what a client gave as arrays: x, y and perhaps x_test, y_test."""
    if isinstance(client, Dataset):
        client = collect_dataset(client, where)
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


def _from_client(
    arrays: list[np.ndarray], names: tuple[str, ...], where: str, options: Mapping[str, Any]
) -> Source:
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
    return from_arrays(where, names, splits, **options)


def _number_labels(labels: np.ndarray, number_of: dict[str, int]) -> np.ndarray:
    """Return the number of each label's class, by its normalised name."""
    listed = labels.tolist()
    number = {label: number_of[normalise_name(str(label))] for label in set(listed)}
    return np.array([number[label] for label in listed], np.int64)
