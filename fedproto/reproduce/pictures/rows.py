"""What the rows of all figures share: means and intervals of cells, and their CSV.

A row is a dictionary whose keys are the columns of the CSV file. An interval is the half-width of
the 95% interval of a mean over seeds; it is the empty text for a single seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedproto.core.csv_cells import write_csv
from fedproto.reproduce.tables import summary

Cell = dict[str, Any]  # a cell of the JSON
Cells = Sequence[Cell]  # those that have runs
Row = dict[str, Any]
Rows = list[Row]


def summarise_seeds(values: Sequence[float]) -> Row:
    """Return mean and interval of one number per seed."""
    found = summary([[value] for value in values])
    return pick_mean(found)


def pick_mean(found: dict[str, Any]) -> Row:
    """Return mean and interval of a summary."""
    return {"mean": found["mean"], "interval": found.get("interval", "")}


def summarise_score(cell: Cell) -> Row:
    """Return the accuracy by which the method of a cell predicts."""
    score = cell["score"]
    return {"accuracy": score, **pick_mean(cell["accuracy"][score])}


def half_width(row: Row, column: str = "interval") -> float | None:
    """Return the half-width of an interval, or None if there is none."""
    return row[column] if row[column] != "" else None


def half_widths(rows: Rows) -> list[float]:
    """Return the half-widths of the rows' intervals, 0 where there is none."""
    return [half_width(row) or 0 for row in rows]


def column(rows: Rows, name: str) -> list[Any]:
    """Return a column of the rows."""
    return [row[name] for row in rows]


def distinct(rows: Rows, name: str) -> list[Any]:
    """Return the different values of a column, in the order they appear."""
    return list(dict.fromkeys(column(rows, name)))


def where(rows: Rows, **values: Any) -> Rows:
    """Return the rows that have these values, in their order."""
    return [row for row in rows if values.items() <= row.items()]


def number_in(name: str) -> float:
    """Return the value in a name such as `k = 5` or `lambda = 0.5`."""
    return float(name.split("=")[1])


def to_csv(rows: Rows) -> bytes:
    """Return rows as a CSV file; the keys of the first row are the header."""
    header = list(rows[0])
    lines = [header]
    for row in rows:
        line = [row.get(name, "") for name in header]
        lines.append(line)
    return write_csv(lines).encode()
