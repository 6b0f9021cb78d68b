"""Colours, matplotlib's settings, empty panels, and saving what was drawn."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from fedproto.plots.colours import COLOURS, INK

#: Figures have no background, so that they fit light and dark pages.
GRID = "#8a919966"  # readable on both pages
MARKERS = "os^DvPX*<>ph"
PNG_DOTS_PER_INCH = 200
SVG_DOTS_PER_INCH = 72  # fixed by matplotlib

STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    # The name of a class may contain a dollar sign.
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "svg.fonttype": "path",
    # With a fixed salt the same numbers give the same file.
    "svg.hashsalt": "fedproto",
    "savefig.transparent": True,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply this package's style inside a `with` block, whatever the user's own settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def marker_at(position: int) -> str:
    """Return the marker of the series at a position.

    The markers shift by one whenever the colours repeat, so that the pairs repeat later.
    """
    repeats = position // len(COLOURS)
    return MARKERS[(position + repeats) % len(MARKERS)]


def make_panels(
    width: float, height: float, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Canvas, list[Axes]]:
    """Return a canvas of a size in inches and its axes, row by row.

    Options go to matplotlib's `subplots`.
    """
    canvas = Canvas(figsize=(width, height), layout="constrained")
    grid = canvas.subplots(rows, columns, squeeze=False, **options)
    return canvas, list(grid.flat)


def save_png(canvas: Canvas) -> bytes:
    """Return the canvas as a PNG file on a white background."""
    file = io.BytesIO()
    canvas.savefig(file, format="png", dpi=PNG_DOTS_PER_INCH, transparent=False, facecolor="white")
    return file.getvalue()


def save_svg(canvas: Canvas) -> str:
    """Return the canvas as an `<svg>` element, without an XML header and without a date."""
    _lay_out(canvas)
    file = io.StringIO()
    canvas.savefig(file, format="svg", metadata={"Date": None})
    document = file.getvalue()
    return document[document.index("<svg") :]


def _lay_out(canvas: Canvas) -> None:
    """Lay a canvas out once for all formats.

    `savefig` would lay it out for each, and draw everything one more time to do so.
    """
    engine = canvas.get_layout_engine()
    if engine is not None:
        FigureCanvasSVG(canvas)
        canvas.set_dpi(SVG_DOTS_PER_INCH)
        engine.execute(canvas)
        canvas.set_layout_engine(None)
