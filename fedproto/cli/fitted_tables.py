"""Tables that fit a terminal: numbers are never cut, and what is too wide follows below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

#: Characters of a column of text in a narrow terminal; longer texts go on in the next line.
MIN_TEXT_WIDTH = 12
#: Characters between two columns.
GAP = 2
NUMBER = re.compile(r"[+-]?[\d,]+(\.\d+)?%?|-|")


@dataclass
class TextColumn:
    """A column of plain text; lines of a header are separated by line breaks."""

    header: str
    cells: list[str]
    #: Whether all its cells are numbers, or empty.
    is_number: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_number = all(NUMBER.fullmatch(cell) for cell in self.cells) and any(self.cells)

    @property
    def width(self) -> int:
        """The characters of its longest line."""
        lines = [*self.header.split("\n"), *self.cells]
        return max(len(line) for line in lines)

    @property
    def min_width(self) -> int:
        """The characters that it needs at least: a number is not broken into two lines."""
        if self.is_number:
            return self.width
        header = max(len(line) for line in self.header.split("\n"))
        return min(self.width, max(MIN_TEXT_WIDTH, header))


def fit_tables(
    columns: Sequence[TextColumn],
    width: int,
    title: str = "",
    *,
    keys: int = 1,
    section_after: int | None = None,
    styles: Sequence[str] = (),
) -> list[Table]:
    """Return columns as one table, or as several where they do not fit the width.

    Args:
        columns: all of one length.
        width: of the terminal, in characters.
        title: stands above the first table.
        keys: so many of the first columns are repeated in every table.
        section_after: the number of rows above a line, if there is one.
        styles: of the rows, if they have any.
    """
    repeated = list(columns[:keys])
    parts: list[list[TextColumn]] = [[]]
    for column in columns[keys:]:
        needed = _needed_width([*repeated, *parts[-1], column])
        if parts[-1] and needed > width:
            parts.append([])
        parts[-1].append(column)
    tables = []
    for number, part in enumerate(parts):
        heading = title if number == 0 else "continued"
        shown = [*repeated, *part]
        tables.append(_build_table(shown, width, heading, section_after, styles))
    return tables


def _needed_width(columns: Sequence[TextColumn]) -> int:
    return sum(column.min_width + GAP for column in columns)


def _build_table(
    columns: Sequence[TextColumn],
    width: int,
    title: str,
    section_after: int | None,
    styles: Sequence[str],
) -> Table:
    """Return one table; what is left of the width goes to its columns of text, first come first."""
    table = Table(
        title=escape(title) if title else None, title_justify="left", box=SIMPLE, pad_edge=False
    )
    table.padding = (0, 1, 0, 0)
    left = max(0, width - _needed_width(columns))
    for column in columns:
        extra = min(left, column.width - column.min_width)
        left -= extra
        table.add_column(
            escape(column.header),
            justify="right" if column.is_number else "left",
            width=column.min_width + extra,
            overflow="fold",
        )
    rows = list(zip(*(column.cells for column in columns), strict=True))
    for number, row in enumerate(rows):
        if section_after is not None and number == section_after:
            table.add_section()
        style = styles[number] if styles else ""
        table.add_row(*(escape(cell) for cell in row), style=style)
    return table
