"""Heat maps of which client has how many training rows of which class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from fedproto.plots.labels import shorten
from fedproto.report.figures.figure import (
    MAX_NAME_LETTERS,
    MAX_NAMED_CLIENTS,
    MAX_PANELS,
    Figure,
    Section,
    finish_figure,
    make_panel,
)
from fedproto.report.groups import Group
from fedproto.report.read import Run

ROW_INCHES = 0.2
MANY_CLIENTS_INCHES = 5
MAX_CLASS_TICKS = 31
MAX_CLASS_LETTERS = 12
MAX_TICK_LETTERS = 40  # of all class names side by side; longer ones are turned upright
MAX_WRITTEN_COUNTS = 300  # in larger maps the numbers would be too small to read
LIGHT_FRACTION = 0.55  # of the largest count; lighter cells get black letters


def draw_classes(groups: Sequence[Group]) -> Section:
    """Return the section with one heat map per partition.

    Groups with the same partition share a map. Every seed draws its own partition, so the maps
    show that of the first seed.
    """
    group_of_partition: dict[str, Group] = {}
    for group in groups:
        group_of_partition.setdefault(group.first.partition, group)
    distinct = list(group_of_partition.values())
    shown = distinct[:MAX_PANELS]
    figures = []
    for number, group in enumerate(shown, 1):
        figures.append(_draw_map(group, number, several=len(distinct) > 1))
    notes = []
    omitted = len(distinct) - len(shown)
    if omitted:
        notes.append(f"{omitted} more divisions of the data are not drawn.")
    return Section("Classes of the clients", figures, notes)


def _draw_map(group: Group, number: int, several: bool) -> Figure:
    """Draw the heat map of a partition; its title is the data set if it is the only one."""
    run = group.first
    counts = _count_images(run)
    has_counts = all(client.images is not None for client in run.clients)
    canvas, axes = _draw_counts(run, counts, has_counts)
    title = group.label if several else run.dataset
    if len(group.runs) > 1:
        title += f", seed {run.seed}"
    axes.set(title=shorten(title), xlabel="class", ylabel="client")
    caption = "Filled: the client has training rows of the class."
    if has_counts:
        caption = (
            "Colour: number of training rows of the class that the client has; nothing where "
            "it has none."
        )
    classes_per_client = [len(client.classes) for client in run.clients]
    alt = (
        f"{len(run.clients)} clients and {len(run.classes)} classes: "
        f"a client has {_describe_range(classes_per_client)} classes."
    )
    table = _count_table(run, counts)
    return finish_figure(canvas, f"classes-{number}", title, caption, alt, table)


def _count_images(run: Run) -> np.ndarray:
    """Return the training rows (clients, classes), or 1 where only their existence is known."""
    column_of_class = {name: number for number, name in enumerate(run.classes)}
    shape = (len(run.clients), len(run.classes))
    counts = np.zeros(shape, int)
    for row, client in enumerate(run.clients):
        images = client.images or [1] * len(client.classes)
        for name, count in zip(client.classes, images, strict=True):
            counts[row, column_of_class[name]] = count
    return counts


def _draw_counts(run: Run, counts: np.ndarray, has_counts: bool) -> tuple[Canvas, Axes]:
    """Draw the heat map; a scale and the numbers only if the images were counted."""
    rows_height: float = MANY_CLIENTS_INCHES
    if len(run.clients) <= MAX_NAMED_CLIENTS:
        rows_height = ROW_INCHES * len(run.clients)
    canvas, axes = make_panel(1.8 + rows_height)
    image = axes.imshow(
        np.where(counts > 0, counts, np.nan),
        aspect="auto",
        cmap="cividis",
        vmin=0,
        interpolation="nearest",
    )
    _label_classes_and_clients(axes, run)
    if has_counts:
        canvas.colorbar(
            image,
            ax=axes,
            label="training rows",
            location="bottom",
            shrink=0.9,
            aspect=40,
            ticks=MaxNLocator(6, integer=True),
        )
        if counts.size <= MAX_WRITTEN_COUNTS:
            _write_counts(axes, counts)
    return canvas, axes


def _label_classes_and_clients(axes: Axes, run: Run) -> None:
    """Label the columns, or some of them if there are many, and the rows unless too many."""
    axes.grid(False)
    names = [shorten(name, MAX_CLASS_LETTERS) for name in run.classes]
    step = math.ceil(len(names) / MAX_CLASS_TICKS)
    longest = max(len(name) for name in names)
    is_upright = longest * len(names) / step > MAX_TICK_LETTERS
    axes.set_xticks(
        range(0, len(names), step), names[::step], rotation=90 if is_upright else 0, fontsize=8
    )
    if len(run.clients) <= MAX_NAMED_CLIENTS:
        clients = [shorten(client.name, MAX_NAME_LETTERS) for client in run.clients]
        axes.set_yticks(range(len(clients)), clients, fontsize=8)


def _write_counts(axes: Axes, counts: np.ndarray) -> None:
    """Write each count into its cell, black on light colours and white on dark ones."""
    for (row, column), count in np.ndenumerate(counts):
        if not count:
            continue
        is_light = count > LIGHT_FRACTION * counts.max()
        axes.text(
            column,
            row,
            str(count),
            ha="center",
            va="center",
            fontsize=7,
            color="black" if is_light else "white",
        )


def _describe_range(numbers: Sequence[int]) -> str:
    """Return `2 to 4`, or `3` if all numbers are the same."""
    if min(numbers) == max(numbers):
        return str(min(numbers))
    return f"{min(numbers)} to {max(numbers)}"


def _count_table(run: Run, counts: np.ndarray) -> Iterator[Sequence[Any]]:
    """Yield a header of class names, then the counts of each client."""
    yield "client", *run.classes
    for client, row in zip(run.clients, counts.tolist(), strict=True):
        yield client.name, *row
