"""Confusion matrices and calibration curves of all clients' test rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedproto.plots.colours import colour_at
from fedproto.plots.labels import shorten
from fedproto.plots.style import marker_at
from fedproto.report.figures.figure import (
    MAX_PANELS,
    Figure,
    Section,
    add_series_legend,
    count_legend_rows,
    finish_figure,
    make_panel,
)
from fedproto.report.groups import Group
from fedproto.report.metric_table import explain_metrics, make_metric_table
from fedproto.report.read_metrics import WayMetrics

CONFUSION_INCHES = 4.0
CALIBRATION_INCHES = 3.2
MAX_CLASS_TICKS = 31
MAX_CLASS_LETTERS = 12
MAX_WRITTEN_CLASSES = 12  # in larger matrices the numbers would be too small to read
DARK_FRACTION = 0.55  # of a class's rows; darker cells get white letters


def draw_quality(groups: Sequence[Group]) -> Section:
    """Return the section with the table of metrics, confusion matrices and calibration curves."""
    shown = []
    for group in groups:
        metrics = group.first.metrics
        if metrics is not None:
            shown += [(group, way, values) for way, values in metrics.ways.items()]
    if not shown:
        return Section("Metrics", [])
    figures = []
    for number, (group, way, values) in enumerate(shown[:MAX_PANELS], 1):
        title = f"{group.label}, by {way}" if len(groups) > 1 else f"by {way}"
        figures.append(_draw_confusion(title, number, group.first.classes, values))
    figures.append(_draw_calibration(shown[:MAX_PANELS], several=len(groups) > 1))
    notes = explain_metrics(groups)
    omitted = len(shown) - MAX_PANELS
    if omitted > 0:
        notes.append(f"{omitted} more confusion matrices are not drawn.")
    return Section("Metrics", figures, notes, make_metric_table(groups))


# --- confusion matrices


def _draw_confusion(title: str, number: int, classes: list[str], values: WayMetrics) -> Figure:
    counts = values.confusion
    rows = counts.sum(1, keepdims=True)
    fractions = counts / np.maximum(rows, 1)
    canvas, axes = make_panel(CONFUSION_INCHES)
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    axes.grid(False)
    names = [shorten(name, MAX_CLASS_LETTERS) for name in classes]
    step = math.ceil(len(names) / MAX_CLASS_TICKS)
    places = range(0, len(names), step)
    axes.set_xticks(places, names[::step], rotation=90, fontsize=8)
    axes.set_yticks(places, names[::step], fontsize=8)
    axes.set(title=shorten(title), xlabel="predicted class", ylabel="true class")
    if len(classes) <= MAX_WRITTEN_CLASSES:
        for (row, column), count in np.ndenumerate(counts):
            is_dark = fractions[row, column] > DARK_FRACTION
            colour = "white" if is_dark else "black"
            axes.text(
                column,
                row,
                str(count),
                ha="center",
                va="center",
                fontsize=7,
                color=colour,
                in_layout=False,  # inside the axes anyway, and slow to measure
            )
    caption = (
        "Confusion matrix of all clients' test rows: how often each class (row) was predicted as "
        "each class (column); colour: fraction of the class's rows."
    )
    correct = int(np.trace(counts))
    alt = f"{correct} of {int(counts.sum())} predicted rows are on the diagonal."
    table = _confusion_table(classes, values)
    return finish_figure(canvas, f"confusion-{number}", title, caption, alt, table)


def _confusion_table(classes: list[str], values: WayMetrics) -> Iterator[Sequence[Any]]:
    """Yield a header, then each class with its sensitivity, specificity and predictions."""
    yield "true class", "sensitivity", "specificity", *(f"as {name}" for name in classes)
    for name, counts in zip(classes, values.confusion.tolist(), strict=True):
        yield name, values.sensitivity.get(name), values.specificity.get(name), *counts


# --- calibration


def _draw_calibration(shown: Sequence[tuple[Group, str, WayMetrics]], several: bool) -> Figure:
    labels = []
    for group, way, _ in shown:
        labels.append(f"{group.label}, {way}" if several else way)
    canvas, axes = make_panel(CALIBRATION_INCHES, count_legend_rows(labels))
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
    entries = []
    table: list[Sequence[Any]] = [("series", "rows", "confidence", "accuracy")]
    for number, (_, _, values) in enumerate(shown):
        confidences = [each.confidence for each in values.bins]
        accuracies = [each.accuracy for each in values.bins]
        (line,) = axes.plot(
            confidences, accuracies, color=colour_at(number), marker=marker_at(number)
        )
        entries.append((line, labels[number]))
        label = labels[number]
        table += [(label, each.rows, each.confidence, each.accuracy) for each in values.bins]
    axes.set(
        title="calibration",
        xlabel="probability of the predicted class",
        ylabel="fraction correct",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
    )
    add_series_legend(canvas, entries)
    caption = (
        "Of the rows that got a probability, how many were predicted correctly: on the dashed "
        "line as many as it says, below it fewer."
    )
    alt = f"Calibration curves of {len(shown)} ways to predict."
    return finish_figure(canvas, "calibration", "calibration", caption, alt, table)
