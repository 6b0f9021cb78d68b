"""A finished figure: SVG for the page, a PNG file, and its numbers as CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from fedproto.core.csv_cells import write_csv
from fedproto.plots.colours import INK, INK_ON_DARK
from fedproto.plots.labels import shorten
from fedproto.plots.marks import add_legend
from fedproto.plots.style import make_panels, save_png, save_svg
from fedproto.report.summary import Table

#: Letters stay readable on a phone, and two figures fit side by side on a desktop.
WIDTH_INCHES = 4.4
LEGEND_ROW_INCHES = 0.19
CSS_PIXELS_PER_INCH = 96
MAX_NAME_LETTERS = 20  # of a client's name in a figure
MAX_NAMED_CLIENTS = 40  # more clients do not get a row and a name each
MAX_PANELS = 12  # of one kind; the files of numbers are complete


@dataclass(frozen=True)
class Figure:
    """A figure in all its formats, with the texts that describe it."""

    name: str  # of its files
    title: str
    caption: str
    alt: str
    width: int  # in CSS pixels
    height: int
    svg: str
    png: bytes
    csv: str

    @property
    def dark_svg(self) -> str:
        """The same figure for a dark page."""
        return self.svg.replace(INK, INK_ON_DARK)


@dataclass(frozen=True)
class Section:
    """A part of the report: figures, and sentences such as what is not drawn."""

    heading: str
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)
    table: Table | None = None


def make_panel(height: float, legend_rows: int = 0) -> tuple[Canvas, Axes]:
    """Return a canvas with one panel; the height is in inches, without the legend."""
    canvas, (axes,) = make_panels(WIDTH_INCHES, height + LEGEND_ROW_INCHES * legend_rows)
    return canvas, axes


def finish_figure(
    canvas: Canvas, name: str, title: str, caption: str, alt: str, table: Iterable[Sequence[Any]]
) -> Figure:
    """Save a canvas in all formats. `table` holds the header of the numbers, then their rows."""
    width_inches, height_inches = canvas.get_size_inches()
    svg = save_svg(canvas)
    return Figure(
        name=name,
        title=title,
        caption=caption,
        alt=alt,
        width=round(width_inches * CSS_PIXELS_PER_INCH),
        height=round(height_inches * CSS_PIXELS_PER_INCH),
        svg=svg,
        png=save_png(canvas),
        csv=write_csv(table),
    )


def add_series_legend(canvas: Canvas, entries: Sequence[tuple[Any, str]]) -> None:
    """Add a legend of (handle, label) entries; its labels may be long names from files."""
    shortened = [(handle, shorten(label)) for handle, label in entries]
    columns = _count_legend_columns([label for _, label in entries])
    add_legend(canvas, shortened, columns, handlelength=2.6, columnspacing=1.2)


def count_legend_rows(labels: Sequence[str]) -> int:
    """Return how many rows `add_series_legend` needs for these labels."""
    if not labels:
        return 0
    return math.ceil(len(labels) / _count_legend_columns(labels))


def _count_legend_columns(labels: Sequence[str]) -> int:
    """Return how many columns fit, which depends on the longest label."""
    longest = max(len(shorten(label)) for label in labels)
    columns = 1
    if longest <= 24:
        columns = 2
    if longest <= 12:
        columns = 3
    return min(len(labels), columns)
