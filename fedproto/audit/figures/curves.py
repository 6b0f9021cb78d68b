"""ROC curves of membership attacks, and counts that the server reads beside the true ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter

from fedproto.audit.attacks import Audit
from fedproto.plots.colours import INK, colour_at
from fedproto.plots.style import marker_at
from fedproto.report.figures.figure import (
    Figure,
    add_series_legend,
    count_legend_rows,
    finish_figure,
    make_panel,
)

#: Rates below this are too rare to be measured here, and would stretch the axes.
SMALLEST_RATE = 1e-4


def draw_curves(audits: Sequence[Audit], attacker: str) -> Figure:
    """Draw the ROC curve of one attacker for each run, on logarithmic axes."""
    curves = list_curves(audits, attacker)
    labels = [name for name, _ in curves]
    canvas, axes = make_panel(3.6, count_legend_rows([*labels, "guessing"]))
    entries = []
    for place, (name, found) in enumerate(curves):
        false_rates, true_rates = found["roc"]
        (line,) = axes.plot(false_rates, true_rates, color=colour_at(place))
        entries.append((line, name))
    (diagonal,) = axes.plot([SMALLEST_RATE, 1], [SMALLEST_RATE, 1], color=INK, linestyle=":")
    entries.append((diagonal, "guessing"))
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(SMALLEST_RATE, 1),
        ylim=(SMALLEST_RATE, 1),
        xlabel="false positive rate",
        ylabel="true positive rate",
        title=f"Who is a member, from the {attacker}",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))
    add_series_legend(canvas, entries)
    threat = curves[0][1]["threat"]
    caption = f"From the {attacker}. {threat}"
    alt = f"ROC curves of membership inference from the {attacker}: {', '.join(labels)}."
    name = f"membership-{attacker.replace(' ', '-')}"
    return finish_figure(canvas, name, attacker, caption, alt, _curve_table(curves))


def list_curves(audits: Sequence[Audit], attacker: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the runs that have this attacker, with what it found."""
    curves = []
    for audit in audits:
        attackers = audit.found.get("membership", {}).get("attackers", [])
        by_name = {found["attacker"]: found for found in attackers}
        if attacker in by_name:
            curves.append((audit.name, by_name[attacker]))
    return curves


def _curve_table(curves: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Sequence[Any]]:
    yield ("run", "false positive rate", "true positive rate")
    for name, found in curves:
        for false_rate, true_rate in zip(*found["roc"], strict=True):
            yield (name, false_rate, true_rate)


def draw_counts(audits: Sequence[Audit]) -> Figure | None:
    """Draw the counts that the server reads against the true ones; None if it reads none."""
    shown = []
    for audit in audits:
        read = audit.pictures.get("classes")
        if read is not None and read.read_counts is not None:
            shown.append((audit.name, read))
    if not shown:
        return None
    canvas, axes = make_panel(3.2, count_legend_rows([name for name, _ in shown]))
    entries = []
    rows: list[Sequence[Any]] = [("run", "client", "class", "true", "read")]
    largest = 1.0
    for place, (name, read) in enumerate(shown):
        true_counts = read.true_counts.flatten().tolist()
        read_counts = read.read_counts.flatten().tolist()
        (points,) = axes.plot(
            true_counts,
            read_counts,
            linestyle="",
            marker=marker_at(place),
            color=colour_at(place),
            alpha=0.6,
        )
        entries.append((points, name))
        largest = max(largest, *true_counts)
        clients, classes = read.true_counts.shape
        for client in range(clients):
            for label in range(classes):
                true_count = int(read.true_counts[client, label])
                rows.append(
                    (name, client, label, true_count, float(read.read_counts[client, label]))
                )
    axes.plot([0, largest], [0, largest], color=INK, linestyle=":")
    axes.set(xlabel="true number of images", ylabel="number that the server reads")
    axes.set_title("Images of each client and class")
    add_series_legend(canvas, entries)
    caption = "A point is a client and a class; on the dotted line the server is right."
    alt = "Numbers of images that the server reads, against the true ones."
    return finish_figure(canvas, "classes", "Classes", caption, alt, rows)
