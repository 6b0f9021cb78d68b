"""The labels of tables and texts: which rows are of which class, and which are for testing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedproto.core.class_names import class_name
from fedproto.data import hold_out
from fedproto.data.shared.feature_encoding import parse_numbers
from fedproto.errors import DataError

#: Different numbers that may be classes, whatever they are.
MAX_NUMBERED_CLASSES = 20
#: Rows per class below which many different whole numbers are taken for measurements.
MIN_ROWS_PER_NUMBERED_CLASS = 5


class Labels(NamedTuple):
    """The classes of the rows, and which rows are for training and for testing."""

    names: tuple[str, ...]
    y: np.ndarray  # the number of each row's class
    train_rows: np.ndarray
    test_rows: np.ndarray


def number_labels(
    where: str, labels: Sequence[str], test_start: int | None, place: Callable[[int], str]
) -> Labels:
    """Return the classes of the rows; without a test set, some rows of each class are held out.

    `place` names a row in an error. Raises DataError if a label is missing or unusable, if the
    labels look like measurements, if a test label is not among the training labels, or if a class
    has too few rows to hold one out.
    """
    spelled = _normalise_labels(labels, place)
    names = tuple(sorted(set(spelled[:test_start]), key=lambda name: (len(name), name)))
    _refuse_measurements(where, names, len(spelled[:test_start]))
    number_of = {name: number for number, name in enumerate(names)}
    for row, label in enumerate(spelled):
        if label not in number_of:
            raise DataError(f"{place(row)} has the label {label!r}, which no training row has")
    y = np.array([number_of[label] for label in spelled], np.int64)
    if test_start is not None:
        return Labels(names, y, np.arange(test_start), np.arange(test_start, len(y)))
    single = np.flatnonzero(np.bincount(y) == 1)
    if len(single):
        raise DataError(
            f"{where}: class {names[single[0]]!r} has one row, but two are needed: "
            "one for training and one for testing"
        )
    return Labels(names, y, *hold_out(y))


def _normalise_labels(labels: Sequence[str], place: Callable[[int], str]) -> list[str]:
    """Return the labels as normalised names of classes."""
    first_row: dict[str, int] = {}
    for row, label in enumerate(labels):
        first_row.setdefault(label, row)
    names: dict[str, str] = {}
    for label, row in first_row.items():
        if not label.strip():
            raise DataError(f"{place(row)} has no label")
        names[label] = class_name(label, f"{place(row)} has the label")
    return [names[label] for label in labels]


def _refuse_measurements(where: str, names: Sequence[str], rows: int) -> None:
    """Raise DataError if the labels are many different numbers, as of a price or a temperature.

    Consecutive whole numbers are the numbers of classes, however many there are.
    """
    if len(names) <= MAX_NUMBERED_CLASSES:
        return
    numbers = parse_numbers(np.array(names))
    if numbers is None or not np.isfinite(numbers).all():
        return
    is_whole = bool((numbers == np.floor(numbers)).all())
    is_consecutive = is_whole and numbers.max() - numbers.min() == len(numbers) - 1
    has_many_rows = is_whole and rows >= MIN_ROWS_PER_NUMBERED_CLASS * len(names)
    if is_consecutive or has_many_rows:
        return
    raise DataError(
        f"{where}: the column of classes holds {len(names):,} different numbers in {rows:,} rows, "
        f"from {numbers.min():g} to {numbers.max():g}, so it looks like a measurement, not "
        "classes: name another with label=COLUMN, or turn it into classes such as low and high"
    )
