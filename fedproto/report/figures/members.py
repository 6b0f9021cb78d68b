"""The global prototypes as training left them, and as they are after members joined or left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedproto.membership.membership import Membership
from fedproto.plots.colours import INK, colour_at
from fedproto.plots.labels import shorten
from fedproto.plots.marks import hide_coordinates, name_point
from fedproto.plots.style import marker_at
from fedproto.report.figures.figure import Figure, Section, finish_figure, make_panel
from fedproto.report.groups import Group
from fedproto.report.read import Prototypes

MAX_CLASS_LETTERS = 12


@dataclass(frozen=True)
class Move:
    """The prototype of a class after training and now, or their places; None if there is none."""

    name: str
    before: np.ndarray | None
    now: np.ndarray | None


def draw_member_changes(groups: Sequence[Group]) -> Section:
    """Return the section with one map per run whose members changed after training.

    The prototypes before and after the changes are projected together, so that their places can
    be compared.
    """
    figures: list[Figure] = []
    for group in groups:
        membership = group.first.membership
        prototypes = group.first.prototypes
        if membership is not None and prototypes is not None:
            number = len(figures) + 1
            figures.append(_draw_changes(group, prototypes, membership, number))
    return Section("Members since training", figures)


def _draw_changes(
    group: Group, prototypes: Prototypes, membership: Membership, number: int
) -> Figure:
    """Draw the prototypes of a group before and after its members changed."""
    moves = _collect_moves(group.first.classes, prototypes, membership)
    places = _project(moves)
    canvas, axes = make_panel(4.0)
    for position, place in enumerate(places):
        _draw_move(axes, place, position)
    axes.set(title=shorten(group.label), xlabel="PCA, first", ylabel="PCA, second")
    hide_coordinates(axes)
    caption = (
        f"{_describe_changes(membership)} Hollow: the global prototypes as training left them; "
        "filled: as they are now."
    )
    alt = (
        f"{group.label}: the prototypes of {len(moves)} classes before and after members joined "
        "or left."
    )
    table = _move_table(moves, places)
    return finish_figure(canvas, f"members-{number}", group.label, caption, alt, table)


def _collect_moves(
    classes: Sequence[str], prototypes: Prototypes, membership: Membership
) -> list[Move]:
    """Return the prototypes of every class that had one after training or has one now."""
    known_rows = np.flatnonzero(prototypes.known).tolist()
    before = {classes[row]: prototypes.shared[row] for row in known_rows}
    current = membership.prototypes()
    current_rows = current.known.nonzero().flatten().tolist()
    now = {}
    for row in current_rows:
        name = current.classes[row]
        now[name] = current.values[row].double().numpy()
    names = dict.fromkeys([*before, *now])
    return [Move(name, before.get(name), now.get(name)) for name in names]


def _project(moves: Sequence[Move]) -> list[Move]:
    """Return the prototypes in the two first principal components of all of them together."""
    prototypes = []
    for move in moves:
        prototypes += [value for value in (move.before, move.now) if value is not None]
    points = np.array(prototypes)
    centred = points - points.mean(0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    places = centred @ directions.T
    if len(directions) == 1:  # prototypes of one dimension lie on a line
        places = np.c_[places, np.zeros(len(places))]
    remaining = iter(places)
    projected = []
    for move in moves:
        before = None if move.before is None else next(remaining)
        now = None if move.now is None else next(remaining)
        projected.append(Move(move.name, before, now))
    return projected


def _draw_move(axes: Axes, move: Move, position: int) -> None:
    """Draw both places of a class with an arrow between them, and its name."""
    colour = colour_at(position)
    before: dict[str, Any] = {"facecolors": "none", "edgecolors": colour, "linewidths": 1.3}
    now: dict[str, Any] = {"color": colour, "edgecolors": INK, "linewidths": 0.9}
    name = shorten(move.name, MAX_CLASS_LETTERS)
    if move.before is None:
        assert move.now is not None
        _draw_place(axes, move.now, position, area=80, **now)
        name_point(axes, f"{name} (new)", move.now)
    elif move.now is None:
        _draw_place(axes, move.before, position, area=70, **before)
        name_point(axes, f"{name} (gone)", move.before)
    else:
        arrow = {"arrowstyle": "->", "color": colour, "lw": 1.2}
        axes.annotate("", tuple(move.now), tuple(move.before), arrowprops=arrow)
        _draw_place(axes, move.before, position, area=70, **before)
        _draw_place(axes, move.now, position, area=80, **now)
        name_point(axes, name, move.now)


def _draw_place(axes: Axes, place: np.ndarray, position: int, area: float, **look: Any) -> None:
    """Draw one place of a class as a marker of the given area, in square points."""
    x, y = place
    axes.scatter(x, y, s=area, marker=marker_at(position), zorder=3, **look)


def _describe_changes(membership: Membership) -> str:
    """Return who joined and left, such as `17 left. new joined, with x.`"""
    sentences = []
    for change in membership.changes:
        sentence = f"{change['member']} {change['did']}"
        if change["classes"]:
            link = "with" if change["did"] == "joined" else "and with it"
            sentence += f", {link} {', '.join(change['classes'])}"
        sentences.append(f"{sentence}.")
    return " ".join(sentences)


def _move_table(moves: Sequence[Move], places: Sequence[Move]) -> Iterator[Sequence[Any]]:
    """Yield both places of each class, and how far its prototype moved before the projection."""
    yield "class", "x before", "y before", "x now", "y now", "moved by, in all dimensions"
    for move, place in zip(moves, places, strict=True):
        distance: Any = ""
        if move.before is not None and move.now is not None:
            distance = float(np.linalg.norm(move.now - move.before))
        yield move.name, *_coordinates(place.before), *_coordinates(place.now), distance


def _coordinates(place: np.ndarray | None) -> list[Any]:
    """Return two cells of the table, which are empty if there is no place."""
    return ["", ""] if place is None else place.tolist()
