"""The figure of the theory: measured changes beside bounds, and λ and η beside their limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fedproto.plots.colours import INK, colour_at
from fedproto.plots.marks import add_legend
from fedproto.plots.style import figure_style, make_panels, save_png

PANEL_INCHES = (3.4, 2.7)
LEGEND_INCHES = 0.6
BAND_ALPHA = 0.18

Client = dict[str, Any]
Read = Callable[[Client], float | None]


#: Lines of the first panel: label, what they read of a client's record, and dashes.
CHANGES: list[tuple[str, Read, str]] = [
    ("measured, whole round", lambda client: _side(client, "theorem_1", "change"), "-"),
    ("Lemma 1", lambda client: _side(client, "lemma_1", "bound"), "--"),
    ("Lemma 1, means", lambda client: _side(client, "lemma_1", "bound_of_means"), ":"),
    ("Theorem 1", lambda client: _side(client, "theorem_1", "bound"), "--"),
    ("Theorem 1, means", lambda client: _side(client, "theorem_1", "bound_of_means"), ":"),
]
#: The second and the third panel.
LAMBDAS: list[tuple[str, Read, str]] = [
    ("λ limit, first gradient", lambda client: client["corollary_1"]["lambda_first"], "--"),
    ("λ limit, all gradients", lambda client: client["corollary_1"]["lambda_sum"], ":"),
]
ETAS: list[tuple[str, Read, str]] = [
    ("η limit for λ = 0", lambda client: client["corollary_1"]["eta_without_lambda"], "--"),
]
PANELS = 3


def draw_theory(
    settings: Mapping[str, Mapping[str, Any]], columns: int = PANELS, width: float = PANEL_INCHES[0]
) -> Canvas:
    """Return a canvas with three panels per setting; to be drawn in `figure_style`.

    settings  by title: `rounds`, the measured rounds of one run or several, with `eta` and `lam`
    width     of a panel, in inches
    """
    rows = PANELS * len(settings) // columns
    height = rows * PANEL_INCHES[1] + LEGEND_INCHES * PANELS / columns
    canvas, panels = make_panels(columns * width, height, columns, rows)
    entries: list[tuple[Any, str]] = []
    for number, (title, setting) in enumerate(settings.items()):
        changes, lambdas, etas = panels[PANELS * number : PANELS * (number + 1)]
        entries = _draw_lines(changes, setting["rounds"], CHANGES, first_colour=0)
        changes.set_yscale("symlog", linthresh=0.1)
        changes.axhline(0, color=INK, linewidth=0.8)
        _label_ticks(changes)
        changes.set(title=title, xlabel="round", ylabel="change of the loss")
        entries += _draw_limits(lambdas, setting, "lam", "λ", LAMBDAS, first_colour=4)
        entries += _draw_limits(etas, setting, "eta", "η", ETAS, first_colour=7)
        entries.append((Line2D([], [], color=INK, linewidth=1.2), "in use"))
    add_legend(canvas, entries, max_columns=max(2, columns + 1))
    return canvas


def save_theory(settings: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the figure as a PNG file."""
    with figure_style():
        return save_png(draw_theory(settings))


def _draw_limits(
    axes: Axes,
    setting: Mapping[str, Any],
    key: str,
    symbol: str,
    lines: Sequence[tuple[str, Read, str]],
    first_colour: int,
) -> list[tuple[Any, str]]:
    """Draw a value in use and its limits; return the entries of the legend."""
    entries = _draw_lines(axes, setting["rounds"], lines, first_colour)
    axes.axhline(setting[key], color=INK, linewidth=1.2)
    axes.set_yscale("log")
    _label_ticks(axes)
    axes.set(title=f"{symbol} = {setting[key]:g} and Corollary 1", xlabel="round", ylabel=symbol)
    return entries


def _label_ticks(axes: Axes) -> None:
    """Label a logarithmic y axis in plain numbers, and the x axis in whole rounds."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_lines(
    axes: Axes,
    rounds: Sequence[Mapping[str, Any]],
    lines: Sequence[tuple[str, Read, str]],
    first_colour: int,
) -> list[tuple[Any, str]]:
    """Draw medians over clients, with a band from the smallest to the largest."""
    entries = []
    for number, (label, read, dashes) in enumerate(lines):
        colour = colour_at(first_colour + number)
        points = collect_points(rounds, read)
        if not points:
            continue
        places = [point[0] for point in points]
        (line,) = axes.plot(
            places, [point[1] for point in points], dashes, color=colour, marker=".", markersize=4
        )
        low = [point[2] for point in points]
        high = [point[3] for point in points]
        axes.fill_between(places, low, high, color=colour, alpha=BAND_ALPHA, linewidth=0)
        entries.append((line, label))
    return entries


def collect_points(
    rounds: Sequence[Mapping[str, Any]], read: Read
) -> list[tuple[int, float, float, float]]:
    """Return round, median, smallest and largest over the clients of all runs, by round."""
    values: dict[int, list[float]] = {}
    for record in rounds:
        for client in record["clients"]:
            value = read(client)
            if value is not None:
                values.setdefault(record["round"], []).append(value)
    points = []
    for round, found in sorted(values.items()):
        points.append((round, statistics.median(found), min(found), max(found)))
    return points


def _side(client: Client, statement: str, side: str) -> float | None:
    """Return a side of a statement's inequality; None where the statement says nothing."""
    check = client[statement]
    return None if check is None else check[side]
