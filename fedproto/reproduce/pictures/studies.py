"""The figures of studies: bars and dots, a row per setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from fedproto.plots.colours import COLOURS, INK
from fedproto.plots.labels import describe_accuracy
from fedproto.plots.marks import centred_offsets, make_rows, show_bytes
from fedproto.plots.style import GRID
from fedproto.reproduce.pictures.panels import (
    PALE,
    add_wide_legend,
    limit_accuracies,
    make_wide_panels,
    marker_number,
)
from fedproto.reproduce.pictures.rows import (
    Cells,
    Rows,
    column,
    distinct,
    half_width,
    half_widths,
    pick_mean,
    summarise_score,
    summarise_seeds,
    where,
)
from fedproto.reproduce.tables import PAPERS_START

DASHES = (0, (4, 3))
BAR_STEP = 0.36  # between the bars of a method; its row is 1 high
BAR_HEIGHT = 0.34
DOTS_HEIGHT = 0.56  # of all dots of a method

# --- prototypes with and without the client's own share

SHARES = {"with_own": "with the client's own share", "without_own": "without it"}


def make_travel_rows(cells: Cells, _: Path) -> Rows:
    """Return two rows per method: with and without the client's own share of the prototypes.

    The accuracy is that of the nearest prototype; `covered` is the fraction of a client's classes
    for which a prototype is left without its own share. Methods that were not probed are left out.
    """
    rows = []
    for cell in cells:
        runs = cell["runs"]
        if not all("travel" in run for run in runs):
            continue
        covered = statistics.fmean(_mean_over_clients(run, "covered") for run in runs)
        for share in SHARES:
            accuracy = summarise_seeds([_mean_over_clients(run, share) for run in runs])
            rows.append(
                {"method": cell["method"], "prototypes": share, **accuracy, "covered": covered}
            )
    return rows


def _mean_over_clients(run: dict[str, Any], key: str) -> float:
    """Return the mean over clients of a number that the probe measured."""
    return statistics.fmean(client[key] for client in run["travel"])


def draw_travel(rows: Rows) -> Canvas:
    """Draw two bars per method, each with its interval and its number."""
    methods = distinct(rows, "method")
    canvas, (axes,) = make_wide_panels(1.3 + 0.55 * len(methods))
    entries = []
    offsets = centred_offsets(len(SHARES), BAR_STEP)
    for number, (share, label) in enumerate(SHARES.items()):
        own_rows = where(rows, prototypes=share)
        places = np.arange(len(own_rows)) + offsets[number]
        bars = axes.barh(
            places,
            column(own_rows, "mean"),
            BAR_HEIGHT,
            color=COLOURS[number],
            xerr=half_widths(own_rows),
            ecolor=INK,
        )
        entries.append((bars, label))
        for place, row in zip(places, own_rows, strict=True):
            text = f"{100 * row['mean']:.1f}"
            axes.text(0.01, place, text, va="center", color="white", fontsize=8, weight="bold")
    axes.set_yticks(range(len(methods)), methods)
    axes.set(
        xlim=(0, 1.01), xlabel="accuracy by the nearest prototype among the client's own classes, %"
    )
    make_rows(axes, len(methods))
    add_wide_legend(canvas, entries)
    return canvas


# --- dots: a row per method, a colour per column of the study


def make_dot_rows(cells: Cells, _: Path) -> Rows:
    """Return a row per cell."""
    return [
        {"method": cell["method"], "column": cell["column"], **summarise_score(cell)}
        for cell in cells
    ]


def draw_dots(rows: Rows) -> Canvas:
    """Draw each mean as a dot with its interval; a single column has its numbers beside it."""
    methods = distinct(rows, "method")
    columns = distinct(rows, "column")
    height = 1.2 + 0.27 * len(methods)
    if len(columns) > 1:
        height += 0.25
    if len(columns) > 2:
        height += 0.3
    canvas, (axes,) = make_wide_panels(height)
    entries = []
    offsets = centred_offsets(len(columns), DOTS_HEIGHT / len(columns))
    for number, name in enumerate(columns):
        own_rows = where(rows, column=name)
        handle = _draw_column(axes, own_rows, methods, offsets[number], number)
        entries.append((handle, name))
    axes.set_xlim(limit_accuracies(column(rows, "mean"), half_widths(rows)))
    axes.hlines(range(len(methods)), *axes.get_xlim(), color=GRID, linewidth=0.5, zorder=0)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xlabel("test accuracy, %")
    make_rows(axes, len(methods))
    if len(columns) > 1:
        add_wide_legend(canvas, entries)
    else:
        _write_means(axes, rows, methods)
    return canvas


def _draw_column(axes: Axes, rows: Rows, methods: Sequence[str], offset: float, number: int) -> Any:
    """Draw the dots of one column, and a vertical line at the default's; return their handle."""
    colour = COLOURS[number]
    for row in where(rows, method="default"):
        axes.axvline(row["mean"], color=colour, linewidth=0.9, linestyle=DASHES, zorder=1)
    return axes.errorbar(
        column(rows, "mean"),
        [methods.index(row["method"]) + offset for row in rows],
        xerr=half_widths(rows),
        fmt=marker_number(number),
        color=colour,
        markersize=6,
        elinewidth=1.4,
        zorder=3,
    )


def _write_means(axes: Axes, rows: Rows, methods: Sequence[str]) -> None:
    """Write the numbers on the right: beside one row that fails, other differences look small."""
    for row in rows:
        text = f"{100 * row['mean']:.2f}"
        half = half_width(row)
        if half is not None:
            text += f" ± {100 * half:.2f}"
        axes.text(
            1.01,
            methods.index(row["method"]),
            text,
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )


# --- before the first round


def make_start_rows(cells: Cells, _: Path) -> Rows:
    """Return a row per accuracy of the weights that a method starts from."""
    rows = []
    for cell in cells:
        for name, found in cell.get("before", {}).items():
            label = describe_accuracy(name)
            rows.append({"method": cell["method"], "column": label, **pick_mean(found)})
    return rows


def draw_start(rows: Rows) -> Canvas:
    """Draw the accuracies before the first round, and a line at the paper's."""
    canvas = draw_dots(rows)
    (axes,) = canvas.axes
    axes.axvline(PAPERS_START, color=PALE, linewidth=0.9, linestyle=DASHES, zorder=1)
    axes.text(
        PAPERS_START,
        1.0,
        f"the paper: {100 * PAPERS_START:.2f}%",
        color=PALE,
        fontsize=8,
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="bottom",
    )
    return canvas


# --- accuracy by what a closed form costs

LADDER_ENDING = " values"  # rows that differ in nothing but the number of features


def make_gram_rows(cells: Cells, _: Path) -> Rows:
    """Return a row per cell, with the bytes that a client uploads."""
    rows = []
    for cell in cells:
        own = f"{cell['score']}_own"
        sent = []
        for run in cell["runs"]:
            clients = len(run["accuracy"][own])
            sent.append(run["communication"]["bytes_up"] / clients)
        about = {"method": cell["method"], "column": cell["column"]}
        accuracy = pick_mean(cell["accuracy"][own])
        rows.append({**about, "bytes": round(statistics.fmean(sent)), **accuracy})
    return rows


def draw_gram(rows: Rows) -> Canvas:
    """Draw a line per data set over the number of features, and a mark for other ways to send."""
    canvas, (axes,) = make_wide_panels(3.6)
    entries: list[tuple[Any, str]] = []
    for number, name in enumerate(distinct(rows, "column")):
        own_rows = where(rows, column=name)
        ladder = [row for row in own_rows if row["method"].endswith(LADDER_ENDING)]
        others = [row for row in own_rows if row not in ladder]
        handle = axes.errorbar(
            column(ladder, "bytes"),
            [100 * row["mean"] for row in ladder],
            yerr=[100 * half for half in half_widths(ladder)],
            marker="o",
            color=COLOURS[number],
        )
        entries.append((handle, name))
        for place, row in enumerate(others):
            (mark,) = axes.plot(
                [row["bytes"]],
                [100 * row["mean"]],
                "s^"[place % 2],
                color=COLOURS[number],
                mfc="white",
            )
            if number == 0:
                entries.append((mark, row["method"]))
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a client uploads, once")
    axes.set_ylabel("accuracy over own classes, %")
    show_bytes(axes)
    add_wide_legend(canvas, entries)
    return canvas
