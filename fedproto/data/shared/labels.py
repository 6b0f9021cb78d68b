"""The labels of tables and texts: which rows are of which class, and which are for testing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedproto.core.class_names import class_name, sort_names
from fedproto.data import Split, hold_out
from fedproto.data.shared.feature_encoding import parse_numbers
from fedproto.errors import DataError

#: Different numbers that may be classes, whatever they are.
MAX_NUMBERED_CLASSES = 20
#: Rows per class below which many different whole numbers are taken for measurements.
MIN_ROWS_PER_NUMBERED_CLASS = 5


#: The words for a set in a column of sets, by what the set is called here.
WORDS_FOR_SETS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "valid", "validation", "dev"),
}


class Labels(NamedTuple):
    """The classes of the rows, and what the rows are for."""

    names: tuple[str, ...]
    y: np.ndarray  # the number of each row's class
    train_rows: np.ndarray
    test_rows: np.ndarray
    validation_rows: np.ndarray | None = None  # None: there is no validation set


def read_sets(
    where: str, texts: Sequence[str], column: str, place: Callable[[int], str]
) -> np.ndarray:
    """Return what each row is for: `train`, `test` or `validation`, by a column of such words.

    Validation rows are the test set where there is no other. Raises DataError for another word,
    and if there are no training rows or no others.
    """
    set_of_word = {word: name for name, words in WORDS_FOR_SETS.items() for word in words}
    sets = []
    for row, text in enumerate(texts):
        word = text.strip().lower()
        if word not in set_of_word:
            raise DataError(
                f"{place(row)} has {text!r} in column {column!r}, which must say train, val or test"
            )
        sets.append(set_of_word[word])
    found = np.array(sets)
    if "test" not in sets:
        found[found == "validation"] = "test"
    for name in ("train", "test"):
        if not (found == name).any():
            raise DataError(f"{where}: column {column!r} names no row for {name}")
    return found


def number_labels(
    where: str,
    labels: Sequence[str],
    sets: np.ndarray | None,
    place: Callable[[int], str],
    group: np.ndarray | None = None,
) -> Labels:
    """Return the classes of the rows; without a test set, some rows of each class are held out.

    `sets` says of each row whether it is for `train`, `test` or `validation`; None: nobody says so.
    `group` says what rows must not be separated. `place` names a row in an error. Raises DataError
    if a label is missing or unusable, if the labels look like measurements, if a test label is not
    among the training labels, or if a class has too few rows, or groups, to hold one out.
    """
    spelled = _normalise_labels(labels, place)
    train_labels = spelled
    if sets is not None:
        train_labels = [spelled[row] for row in np.flatnonzero(sets == "train")]
    names = sort_names(set(train_labels))
    _refuse_measurements(where, names, len(train_labels))
    number_of = {name: number for number, name in enumerate(names)}
    for row, label in enumerate(spelled):
        if label not in number_of:
            raise DataError(f"{place(row)} has the label {label!r}, which no training row has")
    y = np.array([number_of[label] for label in spelled], np.int64)
    if sets is not None:
        validation_rows = np.flatnonzero(sets == "validation")
        return Labels(
            names,
            y,
            np.flatnonzero(sets == "train"),
            np.flatnonzero(sets == "test"),
            validation_rows if len(validation_rows) else None,
        )
    single = np.flatnonzero(np.bincount(y) == 1)
    if len(single):
        raise DataError(
            f"{where}: class {names[single[0]]!r} has one row, but two are needed: "
            "one for training and one for testing"
        )
    if group is not None:
        _refuse_single_group(where, names, y, group)
    return Labels(names, y, *hold_out(y, group=group))


def divide_rows(everything: Split, labels: Labels) -> tuple[Split, Split, Split | None]:
    """Return the rows for training, for testing and, if there are any, for validation."""
    train = everything.select_rows(labels.train_rows)
    test = everything.select_rows(labels.test_rows)
    if labels.validation_rows is None:
        return train, test, None
    return train, test, everything.select_rows(labels.validation_rows)


def _refuse_single_group(
    where: str, names: Sequence[str], y: np.ndarray, group: np.ndarray
) -> None:
    """Raise DataError if all rows of a class are of one group, so that none can be held out."""
    for label, name in enumerate(names):
        groups = np.unique(group[y == label])
        if len(groups) == 1:
            raise DataError(
                f"{where}: all rows of class {name!r} are of the group {str(groups[0])!r}, but two "
                "groups are needed: one for training and one for testing"
            )


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
