"""Sentences about data that can be trained on, but that its owner should know."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedproto.data import Split

HASH_BYTES = 16  # of a row; two different rows with one hash will not be met


def describe_duplicates(where: str, train: Split, test: Split) -> list[str]:
    """Return a notice with the number of test rows that equal a training row, label included.

    Inputs that are left on disk are not compared.
    """
    if not _is_in_memory(train) or not _is_in_memory(test):
        return []
    train_rows = set(_hash_rows(train))
    duplicates = sum(row in train_rows for row in _hash_rows(test))
    if not duplicates:
        return []
    return [
        f"{where}: {duplicates:,} of {len(test.y):,} test rows equal a training row, label "
        "included, so the accuracy is partly that of rows seen in training"
    ]


def _is_in_memory(split: Split) -> bool:
    return isinstance(split.x, np.ndarray) and not isinstance(split.x, np.memmap)


def _hash_rows(split: Split) -> Iterator[bytes]:
    """Yield a hash of each row's inputs and label: rows of images themselves would fill memory."""
    inputs = np.asarray(split.x)
    for row, label in zip(inputs, split.y.astype(np.int64), strict=True):
        yield blake2b(row.tobytes() + label.tobytes(), digest_size=HASH_BYTES).digest()
