"""What is drawn into panels: lines with bands, Pareto fronts, names of points, legends, axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fedproto.plots.labels import format_bytes

#: Log axes that span less than this factor get labels between their powers of ten.
NARROW_LOG_SPAN = 100

# --- marks


def draw_line_with_band(
    axes: Axes,
    x: Sequence[float],
    means: Sequence[float],
    half_widths: Sequence[float | None],
    band_alpha: float,
    band_limits: tuple[float, float] = (-math.inf, math.inf),
    **look: Any,
) -> Line2D:
    """Draw means as a line with a band of ± the half-widths, and return the line.

    There is no band if a half-width is None. The band is cut off at `band_limits`. `look` goes to
    matplotlib's `plot` and must contain a `color`.
    """
    (line,) = axes.plot(x, means, **look)
    if None not in half_widths:
        centre = np.array(means, float)
        half = np.array(half_widths, float)
        low = np.clip(centre - half, *band_limits)
        high = np.clip(centre + half, *band_limits)
        axes.fill_between(x, low, high, color=look["color"], alpha=band_alpha, linewidth=0)
    return line


def draw_front(
    axes: Axes, costs: Sequence[float], values: Sequence[float], colour: str, alpha: float
) -> Line2D:
    """Draw a Pareto front, cheapest first, as wide pale steps up to the right edge of the axes."""
    right_edge = axes.get_xlim()[1]
    (line,) = axes.step(
        [*costs, right_edge],
        [*values, values[-1]],
        where="post",
        color=colour,
        linewidth=5,
        alpha=alpha,
        zorder=1,
    )
    return line


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the (cost, value) points on the Pareto front, cheapest first.

    A point is on the front if no other point of the same or a lower cost has at least its value.
    """

    def cheapest_and_best_first(i: int) -> tuple[float, float]:
        cost, value = points[i]
        return cost, -value

    front = []
    best_value = -math.inf
    for i in sorted(range(len(points)), key=cheapest_and_best_first):
        _, value = points[i]
        if value > best_value:
            front.append(i)
            best_value = value
    return front


def name_point(
    axes: Axes,
    name: str,
    place: Sequence[float] | np.ndarray,
    offset: tuple[float, float] = (6, 5),
    **look: Any,
) -> None:
    """Write a name in bold beside a point; the offset is in typographic points."""
    style: dict[str, Any] = {"fontsize": 9.5} | look
    axes.annotate(
        name,
        (place[0], place[1]),
        offset,
        textcoords="offset points",
        weight="bold",
        zorder=4,
        **style,
    )


def centred_offsets(count: int, step: float) -> list[float]:
    """Return evenly spaced offsets around 0, for marks that stand side by side.

    >>> centred_offsets(3, 0.5)
    [-0.5, 0.0, 0.5]
    """
    middle = (count - 1) / 2
    return [(number - middle) * step for number in range(count)]


# --- legends and axes


def add_legend(
    canvas: Canvas, entries: Sequence[tuple[Any, str]], max_columns: int, **spacing: Any
) -> None:
    """Add a legend of (handle, label) entries below the panels; `spacing` goes to matplotlib."""
    handles = [handle for handle, _ in entries]
    labels = [label for _, label in entries]
    columns = min(max_columns, len(labels))
    canvas.legend(handles, labels, loc="outside lower center", ncols=columns, **spacing)


def show_percent(axes: Axes, axis: str = "y") -> None:
    """Label an axis of fractions, "x" or "y", in percent."""
    formatter = FuncFormatter(lambda fraction, _: f"{100 * fraction:g}")
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_major_formatter(formatter)


def show_bytes(axes: Axes) -> None:
    """Label a logarithmic x axis in bytes."""
    low, high = axes.get_xlim()
    digits = (1, 2, 5) if high / low < NARROW_LOG_SPAN else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=digits))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: format_bytes(count)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def make_rows(axes: Axes, count: int) -> None:
    """Turn the y axis into rows from top to bottom, and label the x axis in percent."""
    axes.set_ylim(count - 0.4, -0.6)
    axes.grid(False, axis="y")
    show_percent(axes, "x")


def hide_coordinates(axes: Axes) -> None:
    """Remove the ticks of a map, whose coordinates have no meaning."""
    axes.set(xticks=[], yticks=[])
