"""The partitions, one file each: pure functions from labels to rows, deterministic in the seed.

A partition's function takes a `Pool`, then its options, and returns one `Portion` a client. No training row is in two
portions; test rows may be, since a client is tested on images of its own classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedproto.errors import ConfigError


class Pool(NamedTuple):
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


class Portion(NamedTuple):
    """Rows of one client, sorted."""

    train: np.ndarray
    test: np.ndarray


def portions(
    pool: Pool, trains: list[np.ndarray], test_shots: int | None, tests: list[np.ndarray] | None = None
) -> list[Portion]:
    """The portions with these training rows, each with all test rows of its classes, or those of them in `tests`."""
    by_class = [np.flatnonzero(pool.test == label) for label in range(len(pool.names))]
    result = []
    for client, rows in enumerate(trains):
        labels = np.unique(pool.train[rows])
        candidates = [by_class[c] if tests is None else np.intersect1d(by_class[c], tests[client]) for c in labels]
        result.append(Portion(np.sort(rows), _test_rows(pool, labels, candidates, test_shots)))
    return result


def _test_rows(pool: Pool, labels: np.ndarray, candidates: list[np.ndarray], shots: int | None) -> np.ndarray:
    """All candidates, or a random `shots` of each class."""
    chosen = []
    for label, rows in zip(labels, candidates, strict=True):
        if shots is not None:
            rows = pool.generator.permutation(rows)[: enough(pool, label, len(rows), shots, "test")]
        chosen.append(rows)
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, int)


def enough(pool: Pool, label: int, there: int, wanted: int, part: str) -> int:
    """`wanted`, unless there are fewer images of the class."""
    if there < wanted:
        name = pool.names[label]
        raise ConfigError(
            f"class {name!r} has {there} {part} images, but {wanted} are wanted: lower shots, ways or clients"
        )
    return wanted
