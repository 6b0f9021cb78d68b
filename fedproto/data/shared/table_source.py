"""From a table to a source: which columns are labels, clients and inputs, and their encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedproto.data import Source, Split, default_shots
from fedproto.data.shared.data_notices import describe_duplicates
from fedproto.data.shared.feature_encoding import (
    USUAL_NOTATION,
    Category,
    Columns,
    Notation,
    Number,
    find_non_number,
    parse_numbers,
    read_encoding,
)
from fedproto.data.shared.labels import divide_rows, number_labels, read_sets
from fedproto.data.shared.tables import LABEL_COLUMNS, Table, find_column
from fedproto.data.shared.telling_columns import join_refusals, refuse_telling_column
from fedproto.errors import ColumnsError, ConfigError, DataError

MAX_CATEGORIES = 1000  # per column: each becomes an input
#: A column is taken for spoilt numbers if it holds more distinct numbers than this ...
MAX_NUMBERS_AMONG_TEXTS = 10
#: ... and at least this fraction of its distinct texts are numbers.
MIN_FRACTION_OF_NUMBERS = 0.8


@dataclass(frozen=True)
class TableOptions:
    """What a user says about the columns of a table."""

    label: str | None = None
    client: str | None = None
    keep: tuple[str, ...] = ()
    encoding: str | None = None
    notation: Notation = USUAL_NOTATION
    group: str | None = None
    split: str | None = None


def from_table(name: str, table: Table, options: TableOptions) -> Source:
    """Return a table as a source; without test rows, a seeded fifth of each class is held out."""
    if options.client:
        client_column: str | None = table.check_name(options.client)
    else:
        client_column = find_column(table.columns, ("client",))
    group_column = table.check_name(options.group) if options.group else None
    sets = _read_sets(table, options.split)
    described = {client_column, group_column, options.split}
    inputs = {name: values for name, values in table.columns.items() if name not in described}
    label_texts = _take_labels(table, inputs, options.label)
    group = table.groups(group_column) if group_column else None
    labels = number_labels(table.name, label_texts, sets, table.place, group)
    if options.encoding is not None:
        columns = _read_columns(Path(options.encoding), inputs, table.name)
    else:
        fitted = _fit_columns(table, inputs, labels.train_rows, options.keep)
        columns = Columns(fitted, options.notation)
    x = columns(inputs, table.place)
    writer = table.clients(client_column) if client_column else None
    everything = Split(x, labels.y, writer, group, table.places())
    train, test, validation = divide_rows(everything, labels)
    return Source(
        name,
        labels.names,
        train,
        test,
        scale=1.0,
        model="mlp",
        mixed_model="mlp-mh",
        shots=default_shots(train.y),
        encoding=columns,
        validation=validation,
        notices=(*table.notices, *describe_duplicates(name, train, test)),
    )


def _read_sets(table: Table, column: str | None) -> np.ndarray | None:
    """Return what each row is for, by a column or by the files; None if nothing says so."""
    if not column:
        return table.sets
    table.check_name(column)
    if table.sets is not None:
        raise ConfigError(
            f"split names column {column!r}, but {table.name} is one of several files, which "
            "already say what their rows are for: leave it out"
        )
    return read_sets(table.name, table.columns[column].tolist(), column, table.place)


def _take_labels(table: Table, inputs: dict[str, np.ndarray], label: str | None) -> list[str]:
    """Remove the column of classes from the inputs, and return it."""
    if label:
        chosen: str | None = table.check_name(label)
    else:
        chosen = find_column(inputs, LABEL_COLUMNS) or next(reversed(inputs), None)
    if chosen not in inputs or len(inputs) < 2:
        found = ", ".join(table.columns) or "none"
        raise DataError(
            f"{table.name} needs a column of classes and another of inputs, besides any "
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
) -> tuple[Number | Category, ...]:
    """Return how the columns become inputs, by their training rows.

    Columns that tell rows apart are refused all at once.
    """
    kept = {table.check_name(name) for name in keep if name}
    columns = []
    refusals = []
    for name, texts in inputs.items():
        try:
            columns.append(_fit_column(table, name, texts, train_rows, name in kept))
        except ColumnsError as refusal:
            refusals.append(refusal)
    if refusals:
        raise join_refusals(table.name, refusals)
    return tuple(columns)


def _fit_column(
    table: Table, name: str, texts: np.ndarray, train_rows: np.ndarray, is_kept: bool
) -> Number | Category:
    """Return how a column becomes inputs, or raise DataError if it should not be one.

    Its training rows tell whether it holds numbers or texts, and all rows where those are empty.
    """
    train_texts = texts[train_rows]
    numbers = parse_numbers(train_texts)
    is_empty = (train_texts == "").all()
    if is_empty and parse_numbers(texts) is None:
        return Category(name, ("",))
    if numbers is not None:
        if not is_kept:
            refuse_telling_column(table.name, name, texts, train_texts)
        return _fit_number(table, name, numbers[np.isfinite(numbers)])
    _refuse_spoilt_numbers(table, name, texts, train_rows)
    values = np.unique(train_texts)
    if len(values) > MAX_CATEGORIES:
        raise ColumnsError(
            f"{table.name}: column {name!r} holds {len(values):,} different texts, more than "
            f"{MAX_CATEGORIES:,}: name it in `ignore`, or read it with text:PATH",
            (name,),
        )
    if not is_kept:
        refuse_telling_column(table.name, name, texts, train_texts)
    return Category(name, tuple(values.tolist()))


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
        raise DataError(f"{table.name}: column {name!r} holds numbers too large to be squared")
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
        "are numbers: leave missing values empty, write NA or ?, or name their mark in `missing`, "
        "and write decimals with a point, or say decimal=','"
    )
