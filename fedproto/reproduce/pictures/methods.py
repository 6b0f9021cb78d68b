"""The benchmark of all methods as figures: accuracy against bytes, one figure per data set."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from fedproto.core.files import write_atomically
from fedproto.plots.colours import INK, colour_at
from fedproto.plots.marks import draw_front, pareto_front, show_bytes
from fedproto.plots.style import figure_style, marker_at, save_png
from fedproto.reproduce.methods.benchmark import EQUAL, TARGET
from fedproto.reproduce.methods.page import measure_own
from fedproto.reproduce.pictures.panels import add_wide_legend, make_wide_panels
from fedproto.reproduce.pictures.rows import Rows, to_csv, where

#: Bytes at which a method that sends nothing is drawn, on a logarithmic axis.
NOTHING_SENT = 100.0
TITLE_LETTERS_PER_LINE = 80


def draw_datasets(content: dict[str, Any], out: Path, stem: str = TARGET) -> Iterator[Path]:
    """Write the numbers of all figures, one of all data sets, and one of each; yield each path.

    `stem` begins the names of the files.
    """
    cells = [cell for cell in content["cells"] if cell["runs"]]
    rows = make_rows(cells)
    if not rows:
        return
    yield _write(out / f"{stem}.csv", to_csv(rows))
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    titles = content["titles"]["datasets"]
    with figure_style():
        picture = save_png(draw_overview(rows, methods, titles))
    yield _write(out / f"{stem}.png", picture)
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        with figure_style():
            canvas = draw(where(rows, dataset=dataset), methods)
            canvas.suptitle(textwrap.fill(titles[dataset], TITLE_LETTERS_PER_LINE))
            picture = save_png(canvas)
        yield _write(out / f"{stem}-{dataset}.png", picture)


def make_rows(cells: Sequence[dict[str, Any]]) -> Rows:
    """Return a row per data set, k and method: the means over partitions that all methods share."""
    rows: Rows = []
    equal = [cell for cell in cells if cell["architecture"] == EQUAL]
    for dataset, k in dict.fromkeys((cell["dataset"], cell["k"]) for cell in equal):
        chosen = [cell for cell in equal if (cell["dataset"], cell["k"]) == (dataset, k)]
        by_method: dict[str, list[dict[str, Any]]] = {}
        for cell in chosen:
            by_method.setdefault(cell["method"], []).append(cell)
        partitions = {cell["partition"] for cell in chosen}
        for method, own in by_method.items():
            if {cell["partition"] for cell in own} != partitions:
                continue  # its mean cannot be compared
            runs = [run for cell in own for run in cell["runs"]]
            sent = [run["bytes_up"] + run["bytes_down"] for run in runs]
            rows.append(
                {
                    "dataset": dataset,
                    "k": k,
                    "method": method,
                    "bytes": round(statistics.fmean(sent)),
                    "own": round(statistics.fmean(measure_own(run) for run in runs), 3),
                    "partitions": len(partitions),
                }
            )
    return rows


def draw_overview(rows: Rows, methods: Sequence[str], titles: Mapping[str, str]) -> Canvas:
    """Return a panel per data set, with the smallest k."""
    k = min(row["k"] for row in rows)
    few = where(rows, k=k)
    datasets = list(dict.fromkeys(row["dataset"] for row in few))
    canvas, panels = make_wide_panels(3.6, columns=len(datasets))
    handles: dict[str, Any] = {}
    for axes, dataset in zip(panels, datasets, strict=True):
        _draw_panel(axes, where(few, dataset=dataset), methods, handles)
        short_title, _, _ = titles[dataset].partition(" (")
        axes.set_title(short_title)
        axes.set_xticks([NOTHING_SENT, 1e6, 1e8], ["0", "1", "100"])
        axes.minorticks_off()
        axes.set_xlabel("MB, up and down")
    panels[0].set_ylabel(f"own classes, %, k = {k}")
    entries = [(handle, name) for name, handle in handles.items()]
    add_wide_legend(canvas, entries, max_columns=5)
    return canvas


def draw(rows: Rows, methods: Sequence[str]) -> Canvas:
    """Return a panel per k: the accuracy over own classes against the bytes of a run."""
    shots = list(dict.fromkeys(row["k"] for row in rows))
    canvas, panels = make_wide_panels(4.2, columns=len(shots))
    handles: dict[str, Any] = {}
    for axes, k in zip(panels, shots, strict=True):
        _draw_panel(axes, where(rows, k=k), methods, handles)
        axes.set_title(f"k = {k}")
        axes.set_xlabel("bytes, up and down, of all clients and rounds")
    panels[0].set_ylabel("accuracy over own classes, %")
    entries = [(handle, name) for name, handle in handles.items()]
    add_wide_legend(canvas, entries, max_columns=6)
    return canvas


def _draw_panel(axes: Axes, rows: Rows, methods: Sequence[str], handles: dict[str, Any]) -> None:
    """Draw a mark per method, and the Pareto front."""
    axes.set_xscale("log")
    points = [(max(NOTHING_SENT, row["bytes"]), row["own"]) for row in rows]
    for row, (sent, own) in zip(rows, points, strict=True):
        number = methods.index(row["method"])
        (mark,) = axes.plot(
            [sent], [own], marker_at(number), color=colour_at(number), markersize=7, zorder=3
        )
        handles.setdefault(row["method"], mark)
    axes.set_xlim(NOTHING_SENT / 2, 3 * max(sent for sent, _ in points))
    front = [points[number] for number in pareto_front(points)]
    draw_front(axes, [sent for sent, _ in front], [own for _, own in front], INK, 0.15)
    show_bytes(axes)


def _write(path: Path, content: bytes) -> Path:
    write_atomically(path, content)
    return path
