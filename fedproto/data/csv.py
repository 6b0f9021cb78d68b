"""Tables of numbers and categories, in delimited text files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedproto.config.options import File
from fedproto.data import DataFolders, Source, Split, default_shots
from fedproto.data.shared.feature_encoding import (
    ENCODING,
    Category,
    Columns,
    Number,
    find_non_number,
    parse_numbers,
    read_encoding,
)
from fedproto.data.shared.tables import LABEL_COLUMNS, Table, find_column, number_labels
from fedproto.errors import DataError

MAX_CATEGORIES = 1000  # per column: each becomes an input
#: Texts per column that count as categories of a small table, however few rows hold each.
MAX_RARE_CATEGORIES = 10
#: A column is taken for spoilt numbers if it holds more distinct numbers than this ...
MAX_NUMBERS_AMONG_TEXTS = 10
#: ... and at least this fraction of its distinct texts are numbers.
MIN_FRACTION_OF_NUMBERS = 0.8


def csv(
    data_folders: DataFolders,
    path: str,
    *,
    label: str | None = None,
    client: str | None = None,
    ignore: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    encoding: File | None = None,
) -> Source:
    """A table of your own: a file with a header, or a folder with train.csv and test.csv.

    Files may be gzipped (.gz). `label` names the column of classes (default: one called label,
    class, target or y, else the last). `client` names the column of clients, for `natural`
    (default: one called client, if there is one). `ignore` names columns to leave out. Numbers are
    standardised and texts become one input per value, both by the training rows. A missing value
    (empty, NA or ?) becomes the mean, or a value of its own. A column of texts that differ in
    nearly every row, such as names, ids or dates, is refused unless it is named in `ignore`, or in
    `keep`. `encoding` names a file of an exported member that says all this instead.
    A seeded fifth of each class of a single file is held out as the test set.
    """
    table = Table.read(Path(path), ignore)
    client_column = table.check_name(client) if client else find_column(table.columns, ("client",))
    inputs = {name: values for name, values in table.columns.items() if name != client_column}
    label_texts = _take_labels(path, table, inputs, label)
    labels = number_labels(path, label_texts, table.test_start, table.place)
    if encoding is not None:
        columns = _read_columns(Path(encoding), inputs, path)
    else:
        columns = _fit_columns(table, inputs, labels.train_rows, keep)
    x = columns(inputs, table.place)
    writer = table.clients(client_column) if client_column else None
    everything = Split(x, labels.y, writer)
    train = everything.select_rows(labels.train_rows)
    test = everything.select_rows(labels.test_rows)
    return Source(
        f"csv:{path}",
        labels.names,
        train,
        test,
        scale=1.0,
        model="mlp",
        mixed_model="mlp-mh",
        shots=default_shots(train.y),
        encoding=columns,
    )


def _take_labels(
    path: str, table: Table, inputs: dict[str, np.ndarray], label: str | None
) -> list[str]:
    """Remove the column of classes from the inputs, and return it."""
    if label:
        chosen: str | None = table.check_name(label)
    else:
        chosen = find_column(inputs, LABEL_COLUMNS) or next(reversed(inputs), None)
    if chosen not in inputs or len(inputs) < 2:
        found = ", ".join(table.columns) or "none"
        raise DataError(
            f"{path} needs a column of classes and another of inputs, besides any "
            f"column of clients: it has {found}"
        )
    return inputs.pop(chosen).tolist()


# --- the encoding of the columns


def _read_columns(file: Path, inputs: dict[str, np.ndarray], path: str) -> Columns:
    """Read an encoding that was agreed on or kept, or raise DataError if it does not fit."""
    encoding = read_encoding(file)
    if not isinstance(encoding, Columns):
        raise DataError(f"{file} is the encoding of texts, but {path} is a table")
    missing = encoding.find_missing(inputs)
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}, which {file} names: it has {', '.join(inputs)}"
        )
    return encoding


def _fit_columns(
    table: Table, inputs: dict[str, np.ndarray], train_rows: np.ndarray, keep: Sequence[str]
) -> Columns:
    """Return how the columns become inputs, by their training rows."""
    kept = {table.check_name(name) for name in keep if name}
    columns = []
    for name, texts in inputs.items():
        columns.append(_fit_column(table, name, texts, train_rows, name in kept))
    return Columns(tuple(columns))


def _fit_column(
    table: Table, name: str, texts: np.ndarray, train_rows: np.ndarray, is_kept: bool
) -> Number | Category:
    """Return how a column becomes inputs, or raise DataError if it should not be one."""
    train_texts = texts[train_rows]
    numbers = parse_numbers(train_texts)
    if numbers is not None:
        return _fit_number(table, name, numbers[np.isfinite(numbers)])
    _refuse_spoilt_numbers(table, name, texts, train_rows)
    values = np.unique(train_texts)
    if len(values) > MAX_CATEGORIES:
        raise DataError(
            f"{table.path}: column {name!r} holds {len(values):,} different texts, more than "
            f"{MAX_CATEGORIES:,}: name it in `ignore`, or read it with text:PATH"
        )
    if not is_kept and _identifies_rows(train_texts):
        raise DataError(
            f"{table.path}: column {name!r} holds {len(values):,} different texts in "
            f"{len(train_rows):,} training rows, as names, ids and dates do: each would become an "
            f"input and be listed in {ENCODING}, so name it in `ignore`, or in `keep` if they are "
            "categories"
        )
    return Category(name, tuple(values.tolist()))


def _identifies_rows(texts: np.ndarray) -> bool:
    """Return whether nearly every row holds its own text: on average fewer than two rows share one.

    Missing values and the most common text do not count: "none" may stand in most rows of free
    remarks.
    """
    _, counts = np.unique(texts[texts != ""], return_counts=True)
    other_counts = np.sort(counts)[:-1]
    has_many = len(other_counts) > MAX_RARE_CATEGORIES
    return has_many and 2 * len(other_counts) > other_counts.sum()


def _fit_number(table: Table, name: str, numbers: np.ndarray) -> Number:
    """Return how to standardise a column to mean 0 and deviation 1; a constant column becomes 0."""
    # The deviation cannot tell: rounding gives equal numbers a tiny one.
    is_constant = len(np.unique(numbers)) <= 1
    if is_constant:
        return Number(name, float(numbers[:1].sum()), 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = numbers.mean()
        std = numbers.std()
    if not np.isfinite(std):
        raise DataError(f"{table.path}: column {name!r} holds numbers too large to be squared")
    return Number(name, float(mean), float(std))


def _refuse_spoilt_numbers(
    table: Table, name: str, texts: np.ndarray, train_rows: np.ndarray
) -> None:
    """Raise DataError if a column of numbers holds a stray word, or decimal commas.

    It would otherwise become a category with an input per number.
    """
    values = np.unique(texts[train_rows])
    values = values[values != ""]
    with_points = np.char.replace(values, ",", ".")
    numbers = 0
    for row in range(len(values)):
        if parse_numbers(with_points[row : row + 1]) is not None:
            numbers += 1
    if numbers <= MAX_NUMBERS_AMONG_TEXTS or numbers < MIN_FRACTION_OF_NUMBERS * len(values):
        return
    row = train_rows[find_non_number(texts[train_rows])]
    raise DataError(
        f"{table.place(row)}: column {name!r} holds {str(texts[row])!r}, but most of its values "
        "are numbers: leave missing values empty, or write NA or ?, and write decimals with a point"
    )
