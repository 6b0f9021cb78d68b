"""A table as a map: accuracy against the bytes that are uploaded in a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from fedproto.plots.colours import COLOURS, INK
from fedproto.plots.labels import OWN_SUFFIX, format_bytes, is_own_accuracy
from fedproto.plots.marks import centred_offsets, draw_front, pareto_front, show_percent
from fedproto.reproduce.pictures.panels import (
    PALE,
    add_wide_legend,
    colour_of,
    limit_accuracies,
    make_wide_panels,
    marker_of,
)
from fedproto.reproduce.pictures.placement import cluster, spread_out
from fedproto.reproduce.pictures.rows import Cells, Row, Rows, half_width, summarise_seeds

BYTES_PER_VALUE = 4  # the paper counts values
#: How much accuracy must rise among own classes for a second mark of the method.
MIN_OWN_GAIN = 0.001

# --- rows


def make_table_rows(cells: Cells, _: Path) -> Rows:
    """Return a row per method: its accuracy and traffic, as means over all columns of the table.

    A method whose head gains if it is limited to the client's classes has a second row. A method
    that was run in some columns only is left out, since its mean cannot be compared.
    """
    all_columns = {cell["column"] for cell in cells}
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own_cells = [cell for cell in cells if cell["method"] == method]
        if {cell["column"] for cell in own_cells} == all_columns:
            rows += _make_method_rows(own_cells)
    front = pareto_front([(row["bytes_up"], row["mean"]) for row in rows])
    return [{**row, "on_front": number in front} for number, row in enumerate(rows)]


def _make_method_rows(cells: Cells) -> Rows:
    """Return the row of a method, and a second one if it gains among own classes."""
    method = cells[0]["method"]
    score = cells[0]["score"]
    sent = statistics.fmean(cell["communication"]["bytes_up_per_round"] for cell in cells)
    means = _average_columns(cells, score)
    row = {
        "method": method,
        "accuracy": score,
        **means,
        "bytes_up": sent,
        **_average_paper(cells),
    }
    own = score + OWN_SUFFIX
    if not _all_have_accuracy(cells, own):
        return [row]
    own_means = _average_columns(cells, own)
    if own_means["mean"] - means["mean"] <= MIN_OWN_GAIN:
        return [row]
    own_row = {
        "method": method,
        "accuracy": own,
        **own_means,
        "bytes_up": sent,
        "paper": "",
        "paper_bytes": "",
    }
    return [row, own_row]


def _all_have_accuracy(cells: Cells, accuracy: str) -> bool:
    """Whether all runs of all cells have an accuracy."""
    runs = [run for cell in cells for run in cell["runs"]]
    return all(accuracy in run["accuracy"] for run in runs)


def _average_columns(cells: Cells, accuracy: str) -> Row:
    """Return the mean over columns, and its interval over the seeds that all columns have."""
    common_seeds = set.intersection(*[set(cell["seeds"]) for cell in cells])
    seeds = [seed for seed in cells[0]["seeds"] if seed in common_seeds]
    interval: Any = ""
    if seeds:
        means = [_mean_over_columns(cells, accuracy, seed) for seed in seeds]
        interval = summarise_seeds(means)["interval"]
    mean = statistics.fmean(cell["accuracy"][accuracy]["mean"] for cell in cells)
    return {"mean": mean, "interval": interval, "columns": len(cells), "seeds": len(seeds)}


def _mean_over_columns(cells: Cells, accuracy: str, seed: int) -> float:
    """Return the mean accuracy of a seed: over the clients, then over the columns."""
    means = []
    for cell in cells:
        (run,) = [run for run in cell["runs"] if run["seed"] == seed]
        means.append(statistics.fmean(run["accuracy"][accuracy]))
    return statistics.fmean(means)


def _average_paper(cells: Cells) -> Row:
    """Return the paper's mean over columns; empty if the paper does not have all of them."""
    papers = [cell["paper"] for cell in cells if cell["paper"]]
    if len(papers) < len(cells):
        return {"paper": "", "paper_bytes": ""}
    values = statistics.fmean(paper["params_per_round"] for paper in papers)
    return {
        "paper": statistics.fmean(paper["accuracy"] for paper in papers) / 100,
        "paper_bytes": BYTES_PER_VALUE * values,
    }


# --- the map


@dataclass(frozen=True)
class Point:
    """A mark on the map."""

    x: float  # the logarithm of the bytes, to base 10
    y: float
    label: str
    row: Row
    is_paper: bool = False


class ByteScale:
    """A logarithmic axis of bytes, with a place for 0 left of a break."""

    def __init__(self, sent: Sequence[float]) -> None:
        logs = [math.log10(count) for count in sent if count]
        self.low = min(logs, default=0.0)
        self.high = max(logs, default=0.0)
        self.zero: float | None = None
        if 0 in sent:
            gap = max(0.22 * (self.high - self.low), 0.3)
            self.zero = self.low - gap
        self.left = self.low if self.zero is None else self.zero
        self.span = max(self.high - self.left, 0.5)

    def place(self, sent: float) -> float:
        """Return where a number of bytes is on the axis."""
        return math.log10(sent) if sent else self.left

    def ticks(self) -> list[float]:
        """Return the places of round numbers; there are more of them if the axis spans little."""
        digits = (1, 2, 5) if self.high - self.low < 2.3 else (1,)
        margin = 0.05 * self.span
        ticks = []
        for power in range(math.floor(self.low) - 1, math.ceil(self.high) + 1):
            for digit in digits:
                tick = math.log10(digit) + power
                if self.low - margin <= tick <= self.high + margin:
                    ticks.append(tick)
        return ticks


def draw_table(rows: Rows) -> Canvas:
    """Draw our results as marks with intervals, the paper's as crosses, and our Pareto front."""
    with_paper = [row for row in rows if row["paper"] != ""]
    sent = [row["bytes_up"] for row in rows]
    scale = ByteScale(sent + [row["paper_bytes"] for row in with_paper])
    canvas, (axes,) = make_wide_panels(5.2)
    ours = [_make_point(row, scale) for row in rows]
    papers = _make_paper_points(with_paper, scale)
    _set_up_axes(axes, scale, [*ours, *papers])

    on_front = [point for point in ours if point.row["on_front"]]
    entries = [*_make_keys(ours), (_draw_front(axes, on_front), "Pareto front")]
    max_distance = 0.024 * np.ptp(axes.get_ylim())
    moved = _put_side_by_side([*ours, *papers], 0.02 * scale.span, max_distance)
    entries += _draw_paper(axes, [point for point in moved if point.is_paper], scale)
    _draw_ours(axes, [point for point in moved if not point.is_paper], scale)
    add_wide_legend(canvas, entries)
    axes.set_title(_describe_means(rows[0]), loc="left", fontsize=8.5, color=PALE)
    return canvas


def _make_point(row: Row, scale: ByteScale) -> Point:
    """Return the mark of one of our rows."""
    x = scale.place(row["bytes_up"])
    return Point(x, row["mean"], _label_row(row), row)


def _make_paper_points(rows: Rows, scale: ByteScale) -> list[Point]:
    """Return one point per method; the released profile has the same values as FedProto."""
    points = {}
    for row in rows:
        method = row["method"]
        if method != "FedProto, released":
            x = scale.place(row["paper_bytes"])
            points[method] = Point(x, row["paper"], method, row, is_paper=True)
    return list(points.values())


def _describe_means(row: Row) -> str:
    """Return what the marks and the bars are means of."""
    text = "one seed"
    if row["seeds"] > 1:
        settings = f"{row['columns']} settings and " if row["columns"] > 1 else ""
        text = f"mean over {settings}{row['seeds']} seeds; bars: its 95% interval"
    return f"{text}; marks that would hide each other stand side by side"


def _label_row(row: Row) -> str:
    """Return the name of a mark."""
    if is_own_accuracy(row["accuracy"]):
        return f"{row['method']}, own classes"
    return row["method"]


def _set_up_axes(axes: Axes, scale: ByteScale, points: Sequence[Point]) -> None:
    """Set limits and ticks, and mark the break; the places of all labels depend on the limits."""
    halves = [0.0 if point.is_paper else half_width(point.row) or 0.0 for point in points]
    axes.set_ylim(limit_accuracies([point.y for point in points], halves))
    margin = 0.05 * scale.span
    axes.set_xlim(scale.left - margin, scale.high + margin)
    ticks = {tick: format_bytes(10**tick) for tick in scale.ticks()}
    if scale.zero is not None:
        ticks[scale.zero] = "0"
        axes.text(
            scale.zero + 0.55 * (scale.low - scale.zero),
            0,
            "//",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="center",
            bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"},
            fontsize=10,
        )
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set(xlabel="bytes uploaded per round by all clients", ylabel="test accuracy, %")
    show_percent(axes)


def _draw_front(axes: Axes, points: Sequence[Point]) -> Line2D:
    """Draw the Pareto front of our marks."""
    ordered = sorted(points, key=lambda point: point.x)
    costs = [point.x for point in ordered]
    values = [point.y for point in ordered]
    return draw_front(axes, costs, values, colour=COLOURS[0], alpha=0.16)


def _draw_paper(axes: Axes, points: Sequence[Point], scale: ByteScale) -> list[tuple[Line2D, str]]:
    """Draw crosses with names on their left, or on their right where nothing is sent."""
    at_zero = [point for point in points if point.x == scale.zero]
    others = [point for point in points if point.x != scale.zero]
    _name_points(axes, others, scale, side=-1, colour=PALE, font_size=7.5)
    _name_points(axes, at_zero, scale, side=1, colour=PALE, font_size=7.5)
    if not points:
        return []
    x = [point.x for point in points]
    y = [point.y for point in points]
    (line,) = axes.plot(
        x,
        y,
        "x",
        color=PALE,
        markersize=5,
        markeredgewidth=1.2,
        zorder=2,
    )
    return [(line, "in the paper")]


def _draw_ours(axes: Axes, points: Sequence[Point], scale: ByteScale) -> None:
    """Draw marks with intervals and names; those limited to own classes are hollow."""
    _name_points(axes, points, scale, side=1, colour=INK, font_size=8.5)
    methods = sorted(point.row["method"] for point in points)
    for point in points:
        method = point.row["method"]
        colour = colour_of(method)
        is_hollow = is_own_accuracy(point.row["accuracy"])
        axes.errorbar(
            point.x,
            point.y,
            half_width(point.row),
            fmt=marker_of(method, methods),
            markersize=7,
            elinewidth=1.4,
            color=colour,
            markerfacecolor="white" if is_hollow else colour,
            zorder=4,
        )


def _put_side_by_side(points: Sequence[Point], step: float, max_distance: float) -> list[Point]:
    """Return the points; those that would hide each other are moved apart, by a step each."""
    moved: list[Point] = []
    for column in cluster(points, 2 * step, lambda point: point.x):
        for heap in cluster(column, max_distance, lambda point: point.y):
            ordered = sorted(heap, key=lambda point: point.x)
            offsets = centred_offsets(len(ordered), step)
            for point, offset in zip(ordered, offsets, strict=True):
                moved.append(replace(point, x=point.x + offset))
    return moved


def _name_points(
    axes: Axes, points: Sequence[Point], scale: ByteScale, side: int, colour: str, font_size: float
) -> None:
    """Write names in a column on the left (side -1) or right (side 1) of each cluster of points.

    Names are as high as their points where that leaves them legible, and joined to them by a line.
    """
    line_height = font_size / 8.5 * 0.04 * np.ptp(axes.get_ylim())
    for group in cluster(points, 0.07 * scale.span, lambda point: point.x):
        edge = side * max(side * point.x for point in group)
        x = edge + side * 0.035 * scale.span
        heights = spread_out([point.y for point in group], line_height)
        for point, y in zip(group, heights, strict=True):
            line_colour = PALE if point.is_paper else colour_of(point.row["method"])
            axes.annotate(
                point.label,
                (point.x, point.y),
                (x, y),
                ha="left" if side > 0 else "right",
                va="center",
                color=colour,
                fontsize=font_size,
                bbox={
                    "boxstyle": "square,pad=0.05",
                    "facecolor": "white",
                    "edgecolor": "none",
                    "alpha": 0.85,
                },
                arrowprops={
                    "arrowstyle": "-",
                    "color": line_colour,
                    "linewidth": 0.7,
                    "relpos": (0 if side > 0 else 1, 0.5),
                },
                annotation_clip=False,
                zorder=2.5,
            )


def _make_keys(points: Sequence[Point]) -> list[tuple[Line2D, str]]:
    """Return the entries of the legend for filled and hollow marks."""
    look: dict[str, Any] = {"marker": "o", "linestyle": "", "color": INK, "markersize": 6}
    keys = [(Line2D([], [], **look), "choosing among all classes")]
    if any(is_own_accuracy(point.row["accuracy"]) for point in points):
        hollow = Line2D([], [], markerfacecolor="white", **look)
        keys.append((hollow, "limited to own classes"))
    return keys
