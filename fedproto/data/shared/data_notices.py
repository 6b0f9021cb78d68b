"""Sentences about data that can be trained on, but that its owner should know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedproto.data import Split


def describe_duplicates(where: str, train: Split, test: Split) -> list[str]:
    """Return a notice with the number of test rows that equal a training row, label included.

    Inputs that are left on disk are not compared.
    """
    if not _is_in_memory(train) or not _is_in_memory(test):
        return []
    train_rows = set(_list_rows(train))
    duplicates = sum(row in train_rows for row in _list_rows(test))
    if not duplicates:
        return []
    return [
        f"{where}: {duplicates:,} of {len(test.y):,} test rows equal a training row, label "
        "included, so the accuracy is partly that of rows seen in training"
    ]


def _is_in_memory(split: Split) -> bool:
    return isinstance(split.x, np.ndarray) and not isinstance(split.x, np.memmap)


def _list_rows(split: Split) -> list[bytes]:
    """Return the bytes of each row's inputs and label."""
    inputs = np.ascontiguousarray(split.x)
    labels = split.y.astype(np.int64)
    pairs = zip(inputs, labels, strict=True)
    return [row.tobytes() + label.tobytes() for row, label in pairs]
