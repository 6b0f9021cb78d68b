"""The partitions, one file each: pure functions from labels to rows, deterministic in the seed.

A partition's function takes a `PartitionRequest`, then its options, and returns one `ClientRows`
per client. No training row belongs to two clients. A test row may: a client is tested on rows of
its own classes, which other clients may have, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedproto.core import row_splits
from fedproto.errors import ConfigError


class PartitionRequest(NamedTuple):
    """A data set that is to be divided, and among how many clients."""

    #: Labels of the training rows.
    train: np.ndarray
    #: Labels of the test rows.
    test: np.ndarray
    #: Names of the classes, by label.
    names: tuple[str, ...]
    clients: int
    #: Training rows per class and client, where the user names no number.
    shots: int
    generator: np.random.Generator
    #: Distinguishes this data set from the federation's others in a partition file.
    source: str
    train_writer: np.ndarray | None = None
    test_writer: np.ndarray | None = None
    #: Labels of the rows of the source's own validation set, if it has one.
    validation: np.ndarray | None = None
    #: What each row belongs to (a patient, say): rows of one group go to one client.
    train_group: np.ndarray | None = None


class ClientRows(NamedTuple):
    """The rows of one client, sorted.

    Validation rows are rows of the source's own validation set, where it has one, otherwise rows
    of its training set that the client does not train on. None: no rows were set apart.
    """

    train: np.ndarray
    test: np.ndarray
    validation: np.ndarray | None = None
    #: What the client is called, where the data says so.
    name: str | None = None


def keep_groups_whole(
    request: PartitionRequest, train_rows: Sequence[np.ndarray]
) -> Sequence[np.ndarray]:
    """Return the clients' training rows, moved so that no group is with two clients.

    Each client keeps about as many rows of each class as it had. Without groups nothing changes.
    """
    if request.train_group is None:
        return train_rows
    moved = row_splits.keep_groups_whole(train_rows, request.train, request.train_group)
    for client, rows in enumerate(moved):
        if len(train_rows[client]) and not len(rows):
            groups = len(np.unique(request.train_group))
            raise ConfigError(
                f"{request.clients} clients cannot share {groups} groups so that each has one: "
                "lower clients"
            )
    return moved


def add_test_rows(
    request: PartitionRequest,
    train_rows: Sequence[np.ndarray],
    test_shots: int | None,
    own_test_rows: Sequence[np.ndarray] | None = None,
) -> list[ClientRows]:
    """Return the clients with these training rows, each with test rows of its classes.

    The test rows are all of a class, or `test_shots` random ones. With `own_test_rows`, a client
    gets only rows from its own array.
    """
    shared = _SharedTestRows(request)
    clients = []
    for client, rows in enumerate(train_rows):
        labels = np.unique(request.train[rows])
        if own_test_rows is not None:
            candidates = _split_by_label(request, own_test_rows[client], labels)
            test_rows = _draw_test_rows(request, labels, candidates, test_shots)
        elif test_shots is not None:
            candidates = [shared.by_label[label] for label in labels]
            test_rows = _draw_test_rows(request, labels, candidates, test_shots)
        else:
            test_rows = shared.all_of(labels)
        clients.append(ClientRows(np.sort(rows), test_rows))
    return clients


class _SharedTestRows:
    """The test rows of each class.

    Clients with the same classes share one array; with one array each, a thousand clients would
    fill the memory.
    """

    def __init__(self, request: PartitionRequest) -> None:
        self.labels = request.test
        self.by_label = group_positions(request.test, len(request.names))
        self.table_size = max(len(request.names), request.test.max(initial=0) + 1)
        self.known: dict[bytes, np.ndarray] = {}

    def all_of(self, labels: np.ndarray) -> np.ndarray:
        """Return the rows of all these labels, sorted."""
        key = labels.tobytes()
        if key not in self.known:
            is_wanted = np.zeros(self.table_size, bool)
            is_wanted[labels] = True
            self.known[key] = np.flatnonzero(is_wanted[self.labels])
        return self.known[key]


def group_positions(values: np.ndarray, groups: int) -> list[np.ndarray]:
    """Return for each number from 0 to groups - 1 the positions where it stands, ascending.

    This takes one sort instead of one search per number.
    """
    order = np.argsort(values, kind="stable")
    ends = np.searchsorted(values[order], np.arange(groups + 1))
    return [order[start:end] for start, end in pairwise(ends)]


def _split_by_label(
    request: PartitionRequest, rows: np.ndarray, labels: np.ndarray
) -> list[np.ndarray]:
    """Return the test rows of each label among `rows`."""
    labels_of_rows = request.test[rows]
    return [rows[labels_of_rows == label] for label in labels]


def _draw_test_rows(
    request: PartitionRequest, labels: np.ndarray, candidates: list[np.ndarray], shots: int | None
) -> np.ndarray:
    """Return all candidates, or a random `shots` of each label, sorted."""
    drawn = []
    for label, rows in zip(labels, candidates, strict=True):
        if shots is None:
            drawn.append(rows)
            continue
        require_rows(request, label, len(rows), shots, "test")
        drawn.append(request.generator.permutation(rows)[:shots])
    if not drawn:
        return np.zeros(0, int)
    return np.sort(np.concatenate(drawn))


def require_rows(
    request: PartitionRequest, label: int, available: int, wanted: int, kind: str
) -> None:
    """Refuse to give out more rows of a class than there are; `kind` is training or test."""
    if available < wanted:
        name = request.names[label]
        raise ConfigError(
            f"class {name!r} has {available} {kind} rows, but {wanted} are wanted: "
            "lower shots, ways or clients"
        )
