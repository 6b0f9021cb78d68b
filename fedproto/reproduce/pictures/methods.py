"""The benchmark of all methods as figures: accuracy against bytes, one figure per data set."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from fedproto.core.files import write_atomically
from fedproto.plots.colours import COLOURS, INK
from fedproto.plots.labels import format_bytes
from fedproto.plots.marks import draw_front, pareto_front, show_bytes
from fedproto.plots.style import figure_style, save_png
from fedproto.reproduce.methods.benchmark import EQUAL, TARGET
from fedproto.reproduce.methods.page import measure_own
from fedproto.reproduce.pictures.panels import PALE, add_wide_legend, make_wide_panels
from fedproto.reproduce.pictures.placement import spread_out
from fedproto.reproduce.pictures.rows import Rows, to_csv, where

#: Bytes at which a method that sends nothing is drawn, on a logarithmic axis.
NOTHING_SENT = 100.0
TITLE_LETTERS_PER_LINE = 80
#: Room for a method's name, and where the names begin, as a fraction of a panel's width.
INCHES_PER_NAME = 0.165
NAMES_AT = 1.03
FEWEST_NAMES = 18  # for which a panel always has room
#: Methods that an overview names in every panel, beside the best ones.
ALWAYS_NAMED = ("Local", "FedAvg", "FedProto", "Closed form")
#: How the names of methods end that have a teacher beside a model.
WITH_TEACHER = "+ teacher"
#: The line from a mark to the middle of its name's left edge.
LEADER = {"arrowstyle": "-", "color": PALE, "linewidth": 0.6, "shrinkB": 3, "relpos": (0, 0.5)}


class Kind(NamedTuple):
    """How methods are drawn of which the same travels."""

    title: str
    marker: str
    colour: str


KINDS = {
    "nothing": Kind("nothing travels", "o", PALE),
    "sums": Kind("prototypes, logits, sums of a closed form", "o", COLOURS[0]),
    "weights": Kind("layers of the model travel", "s", COLOURS[1]),
}


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
        picture = save_png(draw_overview(rows, titles))
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
                    "travels": _name_kind(own[0], sum(sent)),
                    "bytes": round(statistics.fmean(sent)),
                    "own": round(statistics.fmean(measure_own(run) for run in runs), 3),
                    "partitions": len(partitions),
                }
            )
    return rows


def _name_kind(cell: Mapping[str, Any], sent: float) -> str:
    """Return which of KINDS a method's cell belongs to."""
    if sent == 0:
        return "nothing"
    return "weights" if cell["shares_weights"] else "sums"


def draw_overview(rows: Rows, titles: Mapping[str, str]) -> Canvas:
    """Return a panel per data set, with the smallest k; a few methods have their names."""
    k = min(row["k"] for row in rows)
    few = where(rows, k=k)
    datasets = list(dict.fromkeys(row["dataset"] for row in few))
    columns = min(2, len(datasets))
    lines = math.ceil(len(datasets) / columns)
    canvas, panels = make_wide_panels(2.7 * lines + 0.7, columns=columns, rows=lines)
    handles: dict[str, Any] = {}
    for axes, dataset in zip(panels, datasets, strict=False):
        of_dataset = where(few, dataset=dataset)
        _draw_named_panel(axes, of_dataset, handles, choose_named(of_dataset))
        short_title, _, _ = titles[dataset].partition(" (")
        axes.set_title(short_title)
        axes.set_ylabel(f"own classes, %, k = {k}")
        axes.set_xticks([NOTHING_SENT, 1e6, 1e8], ["0", "1 MB", "100 MB"])
        axes.minorticks_off()
        axes.set_xlabel("bytes, up and down")
    for axes in panels[len(datasets) :]:
        axes.set_visible(False)
    entries = [(handle, name) for name, handle in handles.items()]
    add_wide_legend(canvas, entries)
    return canvas


def choose_named(rows: Rows) -> set[str]:
    """Return the methods that an overview names: the usual ones, and the best of each kind.

    Sums of a model and a teacher are of two kinds, and left out.
    """
    best: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row["own"]):
        if not row["method"].endswith(WITH_TEACHER):
            best[row["travels"]] = row["method"]
    return {*ALWAYS_NAMED, *best.values()}


def draw(rows: Rows, methods: Sequence[str]) -> Canvas:
    """Return a panel per k: the accuracy over own classes against the bytes of a run.

    Every method has its name beside its mark; colours tell what travels.
    """
    shots = list(dict.fromkeys(row["k"] for row in rows))
    height = max(3.4, INCHES_PER_NAME * len(methods))
    canvas, panels = make_wide_panels(height * len(shots) + 0.9, rows=len(shots))
    handles: dict[str, Any] = {}
    for axes, k in zip(panels, shots, strict=True):
        _draw_named_panel(axes, where(rows, k=k), handles)
        axes.set_title(f"k = {k}")
        axes.set_ylabel("accuracy over own classes, %")
    panels[-1].set_xlabel("bytes, up and down, of all clients and rounds")
    entries = [(handle, name) for name, handle in handles.items()]
    add_wide_legend(canvas, entries)
    return canvas


def _draw_named_panel(
    axes: Axes, rows: Rows, handles: dict[str, Any], named: Container[str] | None = None
) -> None:
    """Draw a mark per method with a line to its name, and the Pareto front.

    The names stand in a column at the right, in the order of the accuracies.

    named  the methods that have their names; None: all
    """
    points = _place_points(rows)
    for row, (sent, own) in zip(rows, points, strict=True):
        kind = KINDS[row["travels"]]
        (mark,) = axes.plot(
            [sent], [own], kind.marker, color=kind.colour, markersize=6, zorder=3, linestyle="none"
        )
        handles.setdefault(kind.title, mark)
    _finish_axes(axes, points)
    low, high = axes.get_ylim()
    shown = [number for number, row in enumerate(rows) if named is None or row["method"] in named]
    name_height = (high - low) / max(len(shown), FEWEST_NAMES)
    places = spread_out([points[number][1] for number in shown], name_height)
    axes.set_ylim(min(low, *places), max(high, *places))
    for number, place in zip(shown, places, strict=True):
        row = rows[number]
        point = points[number]
        axes.annotate(
            f"{row['method']}  {row['own']:.1f}",
            xy=point,
            xytext=(NAMES_AT, place),
            textcoords=axes.get_yaxis_transform(),
            fontsize=8.5,
            verticalalignment="center",
            color=KINDS[row["travels"]].colour,
            arrowprops=LEADER,
            annotation_clip=False,
        )


def _place_points(rows: Rows) -> list[tuple[float, float]]:
    """Return the place of every method; one that sends nothing has a place on the log axis, too."""
    return [(max(NOTHING_SENT, row["bytes"]), row["own"]) for row in rows]


def _finish_axes(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw the Pareto front of points, and set limits and ticks of the axis of bytes."""
    axes.set_xscale("log")
    axes.set_xlim(NOTHING_SENT / 2, 3 * max(sent for sent, _ in points))
    front = [points[number] for number in pareto_front(points)]
    draw_front(axes, [sent for sent, _ in front], [own for _, own in front], INK, 0.15)
    show_bytes(axes)
    if any(sent == NOTHING_SENT for sent, _ in points):
        _, most = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if NOTHING_SENT < tick < most]
        axes.set_xticks([NOTHING_SENT, *ticks], ["0", *map(format_bytes, ticks)])


def _write(path: Path, content: bytes) -> Path:
    write_atomically(path, content)
    return path
