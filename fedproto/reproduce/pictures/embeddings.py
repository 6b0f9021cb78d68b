"""Maps of the embeddings of test images, by t-SNE, with measures of how they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from fedproto.plots.colours import INK
from fedproto.plots.marks import hide_coordinates, name_point
from fedproto.plots.projection import project_by_tsne
from fedproto.plots.style import GRID
from fedproto.reproduce.pictures.embedding_measures import choose_rows, measure_embeddings
from fedproto.reproduce.pictures.panels import add_wide_legend, make_wide_panels
from fedproto.reproduce.pictures.rows import Cell, Cells, Rows, column, distinct, where
from fedproto.reproduce.plan import cell_name

#: Colours for ten classes (Paul Tol's "muted" palette and a grey), for colour-blind readers, too.
CLASS_COLOURS = (
    *("#332288", "#88ccee", "#44aa99", "#117733", "#999933"),
    *("#ddcc77", "#cc6677", "#882255", "#aa4499", "#999999"),
)
MAX_DRAWN_IMAGES = 1500  # per panel


class PointLook(NamedTuple):
    """How the points of a kind are drawn."""

    area: float
    marker: str
    edge_width: float
    alpha: float
    zorder: int


POINT_LOOKS = {
    "image": PointLook(area=7, marker="o", edge_width=0, alpha=0.7, zorder=1),
    "local": PointLook(area=40, marker="o", edge_width=0.9, alpha=1, zorder=2),
    "global": PointLook(area=260, marker="*", edge_width=1.1, alpha=1, zorder=3),
}


# --- reading


def first_run_folder(runs: Path, cell: Cell) -> Path:
    """Return the folder of the first run of a cell."""
    first_seed = cell["seeds"][0]
    return runs / cell_name(cell["method"], cell["column"], first_seed)


def _read_embeddings(cells: Cells, runs: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield each method with the embeddings of its first seed, if they were kept."""
    for cell in cells:
        path = first_run_folder(runs, cell) / "embeddings.npz"
        if path.exists():
            with np.load(path) as file:
                yield cell["method"], dict(file)


# --- the map


def make_embedding_rows(cells: Cells, runs: Path) -> Rows:
    """Return a row per point of each method: images, means of clients, global prototypes."""
    rows = []
    for method, found in _read_embeddings(cells, runs):
        rows += _project(method, found)
    return rows


def _project(method: str, found: dict[str, np.ndarray]) -> Rows:
    """Return all points of a method, laid out together in two dimensions."""
    images = choose_rows(len(found["x"]), MAX_DRAWN_IMAGES)
    points = [found["x"][images], found["local"]]
    classes = [found["y"][images], found["local_y"]]
    clients = found["client"][images].tolist()
    clients += found["local_client"].tolist()
    kinds = ["image"] * len(images)
    kinds += ["local"] * len(found["local"])
    if "known" in found:
        known = np.flatnonzero(found["known"] > 0)
        points.append(found["prototypes"][known])
        classes.append(known)
        clients += [""] * len(known)
        kinds += ["global"] * len(known)
    places = project_by_tsne(np.concatenate(points))
    labels = np.concatenate(classes)
    rows = []
    for i, (x, y) in enumerate(places.tolist()):
        row = {
            "method": method,
            "kind": kinds[i],
            "class": int(labels[i]),
            "client": clients[i],
            "x": x,
            "y": y,
        }
        rows.append(row)
    return rows


def draw_embeddings(rows: Rows) -> Canvas:
    """Draw a panel per method, with a colour per class."""
    methods = distinct(rows, "method")
    classes = sorted(distinct(rows, "class"))
    columns = min(2, len(methods))
    lines = math.ceil(len(methods) / columns)
    canvas, panels = make_wide_panels(3.6 * lines + 0.9, columns, lines)
    for axes, method in zip(panels, methods, strict=False):
        own_rows = where(rows, method=method)
        for label in classes:
            class_rows = [row for row in own_rows if row["class"] == label]
            _draw_class(axes, class_rows, label)
        axes.set_title(method)
        hide_coordinates(axes)
        axes.spines[:].set(visible=True, color=GRID)
        axes.margins(0.08)
    for axes in panels[len(methods) :]:
        axes.set_axis_off()
    add_wide_legend(canvas, _make_keys(rows, classes), max_columns=13)
    return canvas


def _draw_class(axes: Axes, rows: Rows, label: int) -> None:
    """Draw the points of a class, and its name above the highest of its means."""
    for kind, look in POINT_LOOKS.items():
        points = where(rows, kind=kind)
        axes.scatter(
            column(points, "x"),
            column(points, "y"),
            color=_class_colour(label),
            s=look.area,
            marker=look.marker,
            linewidths=look.edge_width,
            edgecolors=INK,
            alpha=look.alpha,
            zorder=look.zorder,
        )
    means = [row for row in rows if row["kind"] != "image"]
    if means:
        highest = max(means, key=lambda row: row["y"])
        place = (highest["x"], highest["y"])
        name_point(axes, f"{label}", place, (0, 6), fontsize=10, ha="center", va="bottom")


def _class_colour(label: int) -> str:
    return CLASS_COLOURS[label % len(CLASS_COLOURS)]


def _make_keys(rows: Rows, classes: list[int]) -> list[tuple[Line2D, str]]:
    """Return the entries of the legend: the classes, and the kinds of points that have an edge."""
    keys = []
    for label in classes:
        dot = Line2D([], [], color=_class_colour(label), markersize=6, marker="o", linestyle="")
        keys.append((dot, f"{label}"))
    edged: dict[str, Any] = {"linestyle": "", "markerfacecolor": "white", "markeredgecolor": INK}
    circle = Line2D([], [], marker="o", markersize=7, **edged)
    keys.append((circle, "a client's class mean"))
    if "global" in column(rows, "kind"):
        star = Line2D([], [], marker="*", markersize=12, **edged)
        keys.append((star, "global prototype"))
    return keys


# --- measures


def measure_methods(cells: Cells, runs: Path) -> dict[str, dict[str, float | None]]:
    """Return the measures of each method's embeddings."""
    measures = {}
    for method, found in _read_embeddings(cells, runs):
        measures[method] = measure_embeddings(found["x"], found["y"], found["client"])
    return measures
