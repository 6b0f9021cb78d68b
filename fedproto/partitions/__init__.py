"""The partitions, one file each: pure functions from labels to rows, deterministic in the seed.

A partition's function takes a `Pool`, then its options, and returns one `Portion` a client. No training row is in two
portions; test rows may be, since a client is tested on images of its own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedproto.errors import ConfigError


class PartitionRequest(NamedTuple):
    """What there is to give out."""

    train: np.ndarray  # labels of the training rows
    test: np.ndarray
    names: tuple[str, ...]  # of the classes
    clients: int
    shots: int  # training images a class and client, where the user names no number
    generator: np.random.Generator
    source: str  # tells this data set from the federation's others in a partition file
    train_writer: np.ndarray | None = None
    test_writer: np.ndarray | None = None


class ClientRows(NamedTuple):
    """Rows of one client, sorted."""

    train: np.ndarray
    test: np.ndarray


def portions(
    pool: PartitionRequest,
    trains: Sequence[np.ndarray],
    test_shots: int | None,
    tests: Sequence[np.ndarray] | None = None,
) -> list[ClientRows]:
    """The portions with these training rows, each with all test rows of its classes, or those of them in `tests`."""
    everybodys = _Everybodys(pool)
    result = []
    for client, rows in enumerate(trains):
        labels = np.unique(pool.train[rows])
        if tests is None and test_shots is None:
            chosen = everybodys.rows(labels)
        else:
            candidates = (
                everybodys.of(labels) if tests is None else _of_classes(pool, tests[client], labels)
            )
            chosen = _test_rows(pool, labels, candidates, test_shots)
        result.append(ClientRows(np.sort(rows), chosen))
    return result


class _Everybodys:
    """The test rows of each class; clients with the same classes share one array, or a thousand would fill memory."""

    def __init__(self, pool: PartitionRequest) -> None:
        self.pool, self.by_class = pool, grouped(pool.test, len(pool.names))
        self.known: dict[bytes, np.ndarray] = {}

    def of(self, labels: np.ndarray) -> list[np.ndarray]:
        return [self.by_class[label] for label in labels]

    def rows(self, labels: np.ndarray) -> np.ndarray:
        if labels.tobytes() not in self.known:
            wanted = np.zeros(max(len(self.pool.names), self.pool.test.max(initial=0) + 1), bool)
            wanted[labels] = True
            self.known[labels.tobytes()] = np.flatnonzero(wanted[self.pool.test])
        return self.known[labels.tobytes()]


def grouped(values: np.ndarray, groups: int) -> list[np.ndarray]:
    """For each of the numbers 0 .. groups-1 the places where it stands, ascending: one sort, not a search for each."""
    order = np.argsort(values, kind="stable")
    ends = np.searchsorted(values[order], np.arange(groups + 1))
    return [order[start:end] for start, end in pairwise(ends)]


def _of_classes(pool: PartitionRequest, rows: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    found = pool.test[rows]
    return [rows[found == label] for label in labels]


def _test_rows(
    pool: PartitionRequest, labels: np.ndarray, candidates: list[np.ndarray], shots: int | None
) -> np.ndarray:
    """All candidates, or a random `shots` of each class."""
    chosen = []
    for label, rows in zip(labels, candidates, strict=True):
        if shots is not None:
            rows = pool.generator.permutation(rows)[: enough(pool, label, len(rows), shots, "test")]
        chosen.append(rows)
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, int)


def enough(pool: PartitionRequest, label: int, there: int, wanted: int, part: str) -> int:
    """`wanted`, unless there are fewer images of the class."""
    if there < wanted:
        name = pool.names[label]
        raise ConfigError(
            f"class {name!r} has {there} {part} images, but {wanted} are wanted: lower shots, ways or clients"
        )
    return wanted
