"""The accuracy of each client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from fedproto.plots.labels import is_own_accuracy, shorten
from fedproto.plots.marks import add_legend, centred_offsets, make_rows, show_percent
from fedproto.report.figures.figure import (
    MAX_NAME_LETTERS,
    MAX_NAMED_CLIENTS,
    MAX_PANELS,
    Figure,
    Section,
    add_series_legend,
    finish_figure,
    make_panel,
)
from fedproto.report.groups import Group
from fedproto.report.read import Client

ROW_INCHES = 0.2
BARS_HEIGHT = 0.76  # of all bars of a client; its row is 1 high
MAX_MODEL_LETTERS = 16


def draw_clients(groups: Sequence[Group]) -> Section:
    """Return the section of each client's accuracy.

    Every seed draws its own clients, so the figures show the first seed only.
    """
    largest = max(len(group.first.clients) for group in groups)
    order = "with model and number of classes"
    if largest > MAX_NAMED_CLIENTS:
        order = "from best to worst where they are many"
    seed = ""
    if any(len(group.runs) > 1 for group in groups):
        seed = " of the first seed (each seed draws its own)"
    notes = [f"Accuracy over all classes, in %, of each client{seed}, {order}."]
    omitted = len(groups) - MAX_PANELS
    if omitted > 0:
        notes.append(f"The clients of {omitted} more are not drawn; result.json has their numbers.")
    shown = groups[:MAX_PANELS]
    figures = [_draw_group(group, position) for position, group in enumerate(shown)]
    return Section("Clients", figures, notes)


def _draw_group(group: Group, position: int) -> Figure:
    """Draw the clients of a group: by name, or ranked if they are too many for names."""
    clients = group.first.clients
    accuracies = [name for name in group.accuracies if not is_own_accuracy(name)]
    if len(clients) <= MAX_NAMED_CLIENTS:
        canvas, axes = _draw_bars(group, accuracies)
    else:
        canvas, axes = _draw_ranking(group, accuracies)
    axes.set_title(shorten(group.label))
    way = accuracies[0]  # by the head, if a model was trained
    best = max(clients, key=lambda client: client.accuracy[way])
    worst = min(clients, key=lambda client: client.accuracy[way])
    caption = (
        f"{len(clients)} clients; best by the {way}: {_describe_accuracy(best, way)}; "
        f"worst: {_describe_accuracy(worst, way)}."
    )
    return finish_figure(
        canvas,
        name=f"clients-{position + 1}",
        title=group.label,
        caption=caption,
        alt=f"{group.label}: accuracy of each client. {caption}",
        table=_client_table(group),
    )


def _describe_accuracy(client: Client, way: str) -> str:
    """Return a client with one of its accuracies, for a caption."""
    return f"client {client.name} with {client.accuracy[way]:.1%}"


def _draw_bars(group: Group, accuracies: Sequence[str]) -> tuple[Canvas, Axes]:
    """Draw a named row per client, with a filled bar for the head and a hatched one otherwise."""
    run = group.first
    has_legend = len(accuracies) > 1
    rows = np.arange(len(run.clients))
    height = 0.8 + ROW_INCHES * len(rows)
    canvas, axes = make_panel(height, legend_rows=1 if has_legend else 0)
    thickness = BARS_HEIGHT / len(accuracies)
    colour = group.colour
    entries = []
    offsets = centred_offsets(len(accuracies), thickness)
    for number, (accuracy, offset) in enumerate(zip(accuracies, offsets, strict=True)):
        is_first = number == 0
        values = [client.accuracy[accuracy] for client in run.clients]
        bars = axes.barh(
            rows + offset,
            values,
            thickness,
            color=colour if is_first else "none",
            edgecolor=colour,
            linewidth=0.9,
            hatch=None if is_first else "//////",
        )
        entries.append((bars[0], accuracy))
    names = [_describe_client(client) for client in run.clients]
    axes.set_yticks(rows, names, fontsize=8)
    axes.set(xlim=(0, 1), xlabel="accuracy, %")
    make_rows(axes, len(rows))
    if has_legend:
        add_legend(canvas, entries, max_columns=2)
    return canvas, axes


def _describe_client(client: Client) -> str:
    """Return the label of a row: name, model and number of classes."""
    name = shorten(client.name, MAX_NAME_LETTERS)
    model = shorten(client.model, MAX_MODEL_LETTERS)
    classes = len(client.classes)
    return f"{name} · {model} · {classes} cl."


def _draw_ranking(group: Group, accuracies: Sequence[str]) -> tuple[Canvas, Axes]:
    """Draw the accuracies of too many clients for names, from best to worst."""
    run = group.first
    canvas, axes = make_panel(2.6, 1)
    entries = []
    for number, accuracy in enumerate(accuracies):
        values = [client.accuracy[accuracy] for client in run.clients]
        values.sort(reverse=True)
        ranks = range(1, len(values) + 1)
        dashes = "-" if number == 0 else "--"
        (line,) = axes.plot(ranks, values, dashes, color=group.colour)
        entries.append((line, accuracy))
    axes.set(ylim=(0, 1.02), xlabel="clients, from best to worst", ylabel="accuracy, %")
    show_percent(axes)
    if len(entries) > 1:
        add_series_legend(canvas, entries)
    return canvas, axes


def _client_table(group: Group) -> Iterator[Sequence[Any]]:
    """Yield all accuracies of all clients, of every seed."""
    yield "run", "seed", "client", "model", "classes", *group.accuracies
    for run in group.runs:
        for client in run.clients:
            classes = len(client.classes)
            values = [client.accuracy[name] for name in group.accuracies]
            yield group.label, run.seed, client.name, client.model, classes, *values
