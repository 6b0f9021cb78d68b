"""Maps of the global prototypes and of the clients' local ones, in two dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedproto.plots.colours import INK, colour_at
from fedproto.plots.labels import shorten
from fedproto.plots.marks import hide_coordinates, name_point
from fedproto.plots.projection import project_by_pca, project_by_tsne
from fedproto.plots.style import marker_at
from fedproto.report.figures.figure import (
    MAX_PANELS,
    Figure,
    Section,
    finish_figure,
    make_panel,
)
from fedproto.report.groups import Group
from fedproto.report.read import Prototypes, Run

MIN_POINTS = 3
MIN_TSNE_POINTS = 12  # fewer points have no neighbourhoods
MAX_TSNE_POINTS = 1000  # more take too long
MAX_CLASS_LETTERS = 12
GLOBAL = -1  # in place of the number of a client


@dataclass(frozen=True)
class Points:
    """The global and the local prototypes of a run, one row each."""

    values: np.ndarray  # (n, d)
    classes: np.ndarray  # (n,)
    clients: np.ndarray  # (n,) GLOBAL for a global prototype

    @property
    def is_global(self) -> np.ndarray:
        """Which points are global prototypes: (n,)."""
        return self.clients == GLOBAL


def draw_prototypes(groups: Sequence[Group]) -> Section:
    """Return the section with one map per group that has prototypes, of its first seed.

    A map shows the global prototypes with their classes, and the last local prototypes of the
    clients if the server kept them. It is left out, with a note, if there is nothing to see.
    """
    heading = "Prototypes"
    having_prototypes = [group for group in groups if group.first.prototypes is not None]
    if not having_prototypes:
        return Section(heading, [], ["No method here has prototypes, so there is no map of them."])
    figures = []
    notes = []
    shown = having_prototypes[:MAX_PANELS]
    for number, group in enumerate(shown, 1):
        figure = _draw_map(group, number)
        if figure is None:
            notes.append(f"{group.label}: its prototypes are too few or too alike for a map.")
        else:
            figures.append(figure)
    omitted = len(having_prototypes) - len(shown)
    if omitted:
        notes.append(f"The prototypes of {omitted} more are not drawn.")
    return Section(heading, figures, notes)


def _draw_map(group: Group, number: int) -> Figure | None:
    """Return the map of a group, or None if its points are too few or all equal."""
    run = group.first
    assert run.prototypes is not None
    points = _collect_points(run.prototypes)
    if len(points.values) < MIN_POINTS or np.ptp(points.values, axis=0).max() == 0:
        return None
    places, method = _project(points.values)
    canvas, axes = make_panel(4.0)
    present_classes = np.unique(points.classes)
    for label in present_classes.tolist():
        rows = points.classes == label
        is_global = points.is_global[rows]
        _draw_class(axes, places[rows], is_global, label, run.classes[label])
    axes.set(title=shorten(group.label), xlabel=f"{method}, first", ylabel=f"{method}, second")
    hide_coordinates(axes)
    alt = (
        f"{group.label}: map of {len(places)} prototypes of {len(present_classes)} classes "
        f"by {method}."
    )
    caption = _caption(group, points, method)
    table = _map_table(run, points, places)
    return finish_figure(canvas, f"prototypes-{number}", group.label, caption, alt, table)


def _collect_points(prototypes: Prototypes) -> Points:
    """Return the known global prototypes, then the local ones that clients have."""
    known_classes = np.flatnonzero(prototypes.known > 0)
    clients, classes = np.nonzero(prototypes.held > 0)
    global_values = prototypes.shared[known_classes]
    local_values = prototypes.local[clients, classes]
    return Points(
        values=np.concatenate([global_values, local_values]),
        classes=np.concatenate([known_classes, classes]),
        clients=np.concatenate([np.full(len(known_classes), GLOBAL), clients]),
    )


def _project(points: np.ndarray) -> tuple[np.ndarray, str]:
    """Return points in two dimensions, and the name of the method that suits their number."""
    if MIN_TSNE_POINTS <= len(points) <= MAX_TSNE_POINTS:
        return project_by_tsne(points), "t-SNE"
    return project_by_pca(points), "PCA"


def _draw_class(
    axes: Axes, places: np.ndarray, is_global: np.ndarray, label: int, name: str
) -> None:
    """Draw local prototypes small, and global ones large with the name of the class."""
    look: dict[str, Any] = {"color": colour_at(label), "marker": marker_at(label)}
    local_places = places[~is_global]
    global_places = places[is_global]
    x, y = local_places.T
    axes.scatter(x, y, s=16, alpha=0.65, linewidths=0, **look)
    x, y = global_places.T
    axes.scatter(x, y, s=95, edgecolors=INK, linewidths=0.9, zorder=3, **look)
    for place in global_places:
        name_point(axes, shorten(name, MAX_CLASS_LETTERS), place)


def _caption(group: Group, points: Points, method: str) -> str:
    """Return what large and small points are, and how they were projected."""
    global_count = int(points.is_global.sum())
    local_count = len(points.clients) - global_count
    seed = ""
    if len(group.runs) > 1:
        seed = f" of seed {group.first.seed}"
    shown = f"Large: the {global_count} global prototypes{seed}, with their class"
    if local_count:
        shown += f"; small: the clients' {local_count} last local ones"
    dimensions = points.values.shape[1]
    projection = f"From {dimensions} dimensions to two by {method}"
    if method == "t-SNE":
        projection += ", random state 0"
    return f"{shown}. {projection}."


def _map_table(run: Run, points: Points, places: np.ndarray) -> Iterator[Sequence[Any]]:
    """Yield the class and the place of each point, and the client that it belongs to."""
    yield "client", "class", "x", "y"
    clients = points.clients.tolist()
    classes = points.classes.tolist()
    for client, label, place in zip(clients, classes, places.tolist(), strict=True):
        owner = "global" if client == GLOBAL else run.clients[client].name
        yield owner, run.classes[label], *place
