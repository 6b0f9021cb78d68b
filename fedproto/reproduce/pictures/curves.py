"""Accuracy against the number of training images per class, and against lambda."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from fedproto.plots.colours import COLOURS
from fedproto.plots.marks import draw_line_with_band, show_percent
from fedproto.reproduce.pictures.panels import (
    add_wide_legend,
    colour_of,
    make_wide_panels,
    marker_number,
)
from fedproto.reproduce.pictures.rows import (
    Cell,
    Cells,
    Row,
    Rows,
    column,
    distinct,
    half_width,
    number_in,
    summarise_score,
    summarise_seeds,
    where,
)

BAND_ALPHA = 0.15
MIN_LABEL_RATIO = 1.3  # labels on a log axis that are closer would touch


def _draw_means(
    axes: Axes, rows: Rows, x: str, prefix: str = "", highest: float = 1.0, **look: Any
) -> Line2D:
    """Draw the means of rows with their intervals as a band, which is cut at 0 and `highest`."""
    return draw_line_with_band(
        axes,
        column(rows, x),
        column(rows, f"{prefix}mean"),
        [half_width(row, f"{prefix}interval") for row in rows],
        band_alpha=BAND_ALPHA,
        band_limits=(0, highest),
        **look,
    )


# --- accuracy against images per class


def make_shots_rows(cells: Cells, _: Path) -> Rows:
    """Return a row per method and k, with the points it loses compared with the largest k.

    Methods without a run of the largest k are left out.
    """
    rows = []
    for cell in cells:
        k = number_in(cell["column"])
        rows.append({"method": cell["method"], "k": k, **summarise_score(cell)})
    largest = max(column(rows, "k"), default=0)
    best_means = {row["method"]: row["mean"] for row in where(rows, k=largest)}
    compared = []
    for row in rows:
        if row["method"] in best_means:
            lost = 100 * (best_means[row["method"]] - row["mean"])
            compared.append({**row, "lost": lost})
    return compared


def draw_shots(rows: Rows) -> Canvas:
    """Draw accuracy against k on the left, and what is lost against the largest k on the right."""
    canvas, (left, right) = make_wide_panels(3.9, 2, width_ratios=(3, 2))
    entries = []
    for number, method in enumerate(distinct(rows, "method")):
        own_rows = sorted(where(rows, method=method), key=lambda row: row["k"])
        look: dict[str, Any] = {"color": colour_of(method), "marker": marker_number(number)}
        entries.append((_draw_means(left, own_rows, "k", **look), method))
        right.plot(column(own_rows, "k"), column(own_rows, "lost"), **look)
    ks = sorted(distinct(rows, "k"))
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(ks, _label_ticks(ks))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("k, training images per class")
    show_percent(left)
    left.set(ylabel="test accuracy, %", title="accuracy")
    right.set(ylabel="points", title=f"lost against k = {max(ks):g}")
    add_wide_legend(canvas, entries)
    return canvas


def _label_ticks(numbers: Sequence[float]) -> list[str]:
    """Return labels for a log axis; those that would touch the next larger one are empty."""
    labels = []
    next_labelled = math.inf
    for number in reversed(numbers):
        if next_labelled / number > MIN_LABEL_RATIO:
            labels.append(f"{number:g}")
            next_labelled = number
        else:
            labels.append("")
    return labels[::-1]


# --- accuracy and distance against lambda


def make_lambda_rows(cells: Cells, _: Path) -> Rows:
    """Return a row per lambda: both accuracies, and the distance to the global prototypes."""
    return [_make_lambda_row(cell) for cell in cells]


def _make_lambda_row(cell: Cell) -> Row:
    """Return the row of a cell, whose method is called `lambda = VALUE`."""
    lam = number_in(cell["method"])
    row: Row = {"lambda": lam}
    for score in ("prototype", "head"):
        found = cell["accuracy"][score]
        row[f"{score}_mean"] = found["mean"]
        row[f"{score}_interval"] = found.get("interval", "")
    # The regulariser is lambda times the distance, so a lambda of 0 does not tell the distance.
    distance: Row = {"mean": "", "interval": ""}
    if lam:
        distance = summarise_seeds([run["loss"]["regulariser"] / lam for run in cell["runs"]])
    row["distance_mean"] = distance["mean"]
    row["distance_interval"] = distance["interval"]
    return row


def draw_lambda(rows: Rows) -> Canvas:
    """Draw the accuracies on the left, and the distance to the global prototypes on the right."""
    rows = sorted(rows, key=lambda row: row["lambda"])
    canvas, (left, right) = make_wide_panels(3.7, 2)
    by_prototype = _draw_means(left, rows, "lambda", "prototype_", color=COLOURS[0], marker="o")
    by_head = _draw_means(
        left, rows, "lambda", "head_", color=COLOURS[1], marker="s", linestyle="--"
    )
    with_distance = [row for row in rows if row["distance_mean"] != ""]
    if with_distance:
        _draw_means(
            right, with_distance, "lambda", "distance_", math.inf, color=COLOURS[2], marker="D"
        )
    for axes in (left, right):
        axes.set(xlabel="lambda", xlim=left.get_xlim())
    show_percent(left)
    left.set(ylabel="test accuracy, %", title="accuracy")
    right.set(
        ylabel="mean in the last round", title="distance to the global prototype", ylim=(0, None)
    )
    add_wide_legend(canvas, [(by_prototype, "by the nearest prototype"), (by_head, "by the head")])
    return canvas
