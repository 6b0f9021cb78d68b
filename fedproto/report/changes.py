"""The figure of who came and went: the global prototypes as training left them, and as they are now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedproto.membership.membership import Membership
from fedproto.report.figures import INK, Figure, colour, finish, marker, panel, plain
from fedproto.report.read import Group, Run

Rows = list[
    tuple[str, np.ndarray | None, np.ndarray | None]
]  # a class, its prototype before and now


def changes(groups: Sequence[Group]) -> tuple[list[Figure], list[str]]:
    """Of the runs whose members changed after training."""
    changed = [
        each
        for each in groups
        if each.first.since is not None and each.first.prototypes is not None
    ]
    return [_figure(each, number) for number, each in enumerate(changed, 1)], []


def _figure(group: Group, number: int) -> Figure:
    run = group.first
    assert run.since is not None
    rows = _rows(run, run.since)
    places = _places(rows)
    canvas, axes = panel(4.0)
    for position, (name, *_) in enumerate(rows):
        _draw(axes, position, name, *places[position])
    axes.set(
        title=plain(group.label), xlabel="PCA, first", ylabel="PCA, second", xticks=[], yticks=[]
    )
    caption = f"{_told(run.since)} Hollow: the global prototypes as training left them; filled: as they are now."
    alt = f"{group.label}: the prototypes of {len(rows)} classes before and after members came or left."
    return finish(canvas, f"members-{number}", group.label, caption, alt, _table(rows, places))


def _rows(run: Run, bank: Membership) -> Rows:
    """Every class that had a prototype or has one."""
    assert run.prototypes is not None
    before = {
        name: run.prototypes.shared[i]
        for i, name in enumerate(run.classes)
        if run.prototypes.known[i]
    }
    now = bank.prototypes()
    after = {
        name: now.values[i].double().numpy() for i, name in enumerate(now.classes) if now.known[i]
    }
    return [(name, before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))]


def _places(rows: Rows) -> list[tuple[np.ndarray | None, np.ndarray | None]]:
    """Before and now in two dimensions, which are the same for both."""
    points = np.array([point for _, *both in rows for point in both if point is not None])
    centred = points - points.mean(0)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:2]
    flat = iter(
        centred @ axes.T if len(axes) == 2 else np.c_[centred @ axes.T, np.zeros(len(points))]
    )
    return [tuple(None if point is None else next(flat) for point in both) for _, *both in rows]  # type: ignore[misc]


def _draw(
    axes: Axes, position: int, name: str, before: np.ndarray | None, now: np.ndarray | None
) -> None:
    look: dict[str, Any] = {"marker": marker(position), "zorder": 3}
    if before is not None and now is not None:
        axes.annotate(
            "",
            (now[0], now[1]),
            (before[0], before[1]),
            arrowprops={"arrowstyle": "->", "color": colour(position), "lw": 1.2},
        )
    if before is not None:
        axes.scatter(
            before[0],
            before[1],
            s=70,
            facecolors="none",
            edgecolors=colour(position),
            linewidths=1.3,
            **look,
        )
    if now is not None:
        axes.scatter(
            now[0], now[1], s=80, color=colour(position), edgecolors=INK, linewidths=0.9, **look
        )
    label = plain(name, 12) + (" (new)" if before is None else " (gone)" if now is None else "")
    place = before if now is None else now
    assert place is not None
    axes.annotate(
        label,
        (place[0], place[1]),
        (6, 5),
        textcoords="offset points",
        fontsize=9.5,
        weight="bold",
        zorder=4,
    )


def _told(bank: Membership) -> str:
    """`17 left. new joined, with x.`"""
    said = []
    for change in bank.changes:
        classes = f", {'with' if change['did'] == 'joined' else 'and with it'} {', '.join(change['classes'])}"
        said.append(f"{change['member']} {change['did']}{classes if change['classes'] else ''}.")
    return " ".join(said)


def _table(
    rows: Rows, places: Sequence[tuple[np.ndarray | None, np.ndarray | None]]
) -> Iterator[Sequence[Any]]:
    yield "class", "x before", "y before", "x now", "y now", "moved by, in all dimensions"
    for (name, before, now), (old, new) in zip(rows, places, strict=True):
        moved = "" if before is None or now is None else float(np.linalg.norm(now - before))
        yield (
            name,
            *(("", "") if old is None else old.tolist()),
            *(("", "") if new is None else new.tolist()),
            moved,
        )
