"""Accuracy against uploaded bytes, with the Pareto front of comparable runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fedproto.plots.colours import INK
from fedproto.plots.labels import format_bytes
from fedproto.plots.marks import draw_front, pareto_front, show_bytes, show_percent
from fedproto.plots.style import marker_at
from fedproto.report.figures.curves import (
    Series,
    accuracy_curve,
    list_series,
    mention_seeds,
)
from fedproto.report.figures.figure import (
    Figure,
    Section,
    add_series_legend,
    count_legend_rows,
    finish_figure,
    make_panel,
)
from fedproto.report.groups import Group, are_comparable
from fedproto.report.read import Spread


@dataclass(frozen=True, eq=False)
class Outcome:
    """The accuracy of a group after the last round, by one score, and what it cost."""

    series: Series
    bytes_up: float  # mean over seeds
    mean: float


def draw_traffic(groups: Sequence[Group]) -> Section:
    """Return the section of accuracy over all classes against uploaded bytes.

    Groups are compared by their Pareto front if they solve the same task; a note says so if they
    do not, or if nothing was sent.
    """
    heading = "Accuracy and traffic"
    outcomes = _collect_outcomes(groups)
    if not any(outcome.bytes_up for outcome in outcomes):
        return Section(
            heading, [], ["Nothing was sent, so there is no traffic to weigh accuracy against."]
        )
    front: list[Outcome] = []
    notes = []
    if len(groups) > 1:
        if are_comparable(groups):
            points = [(outcome.bytes_up, outcome.mean) for outcome in outcomes]
            front = [outcomes[i] for i in pareto_front(points)]
        else:
            notes.append("The runs are of different tasks, so they share no Pareto front.")
    return Section(heading, [_draw_outcomes(groups, outcomes, front)], notes)


def _collect_outcomes(groups: Sequence[Group]) -> list[Outcome]:
    """Return the outcome of each group by each score, over all classes."""
    outcomes = []
    for series in list_series(groups, own=False):
        bytes_up = series.group.mean(lambda run: run.bytes_up)
        outcomes.append(Outcome(series, bytes_up, series.final_mean))
    return outcomes


def _draw_outcomes(
    groups: Sequence[Group], outcomes: Sequence[Outcome], front: Sequence[Outcome]
) -> Figure:
    """Draw the outcomes with the ways that led to them, and the front if it is not empty."""
    title = "Accuracy against bytes sent"
    labels = []
    for outcome in outcomes:
        silent = "" if outcome.bytes_up else " (sends nothing)"
        labels.append(outcome.series.label + silent)
    canvas, axes = make_panel(3.1, count_legend_rows([*labels, "Pareto front"]))
    axes.set_xscale("log")
    entries = []
    for outcome, label in zip(outcomes, labels, strict=True):
        entries.append((_draw_outcome(axes, outcome), label))
    axes.set(title=title, xlabel="bytes uploaded by all clients", ylabel="accuracy, %")
    show_percent(axes)
    show_bytes(axes)
    if front:
        entries.append((_draw_front(axes, front), "Pareto front"))
    add_series_legend(canvas, entries)

    costs = [
        f"{outcome.series.label} {outcome.mean:.1%} for {format_bytes(outcome.bytes_up)}"
        for outcome in outcomes
    ]
    alt = f"Accuracy against bytes: {', '.join(costs)}."
    return finish_figure(
        canvas,
        name="traffic",
        title=title,
        caption=_caption(groups, front),
        alt=alt,
        table=_outcome_table(outcomes, front),
    )


def _caption(groups: Sequence[Group], front: Sequence[Outcome]) -> str:
    """Return what is drawn, and what is on the front."""
    caption = (
        "Each run's way from its first evaluation to its end (large); over all classes"
        f"{mention_seeds(groups)}."
    )
    if not front:
        return caption
    points = []
    for outcome in front:
        cost = "nothing"
        if outcome.bytes_up:
            cost = format_bytes(outcome.bytes_up)
        points.append(f"{outcome.series.label} ({cost}, {outcome.mean:.1%})")
    return f"{caption} On the Pareto front, the cheapest first: {'; '.join(points)}."


def _draw_outcome(axes: Axes, outcome: Outcome) -> Line2D:
    """Draw the way of a group and its end; a level line for a group that sends nothing."""
    series = outcome.series
    colour = series.group.colour
    if not outcome.bytes_up:
        return axes.axhline(outcome.mean, color=colour, linestyle=":")
    look: dict[str, Any] = {"color": colour, "linestyle": series.dashes}
    costs = []
    means = []
    for cost, spread in _cost_curve(series):
        if cost:  # 0 has no place on a log scale
            costs.append(cost)
            means.append(spread.mean)
    axes.plot(costs, means, linewidth=1, alpha=0.6, **look)
    (end,) = axes.plot(
        [outcome.bytes_up],
        [outcome.mean],
        marker=marker_at(series.position),
        markersize=8,
        markerfacecolor=colour if series.accuracy == "head" else "none",
        markeredgecolor=INK,
        zorder=3,
        **look,
    )
    return end


def _cost_curve(series: Series) -> list[tuple[float, Spread]]:
    """Return the bytes uploaded until each evaluated round, and the accuracy after it."""
    totals_by_round: dict[int, list[int]] = {}
    for run in series.group.runs:
        totals = accumulate(round.bytes_up for round in run.rounds)
        for round, total in zip(run.rounds, totals, strict=True):
            totals_by_round.setdefault(round.number, []).append(total)
    curve = []
    for number, spread in accuracy_curve(series.group, series.accuracy):
        totals_of_seeds = totals_by_round[number]
        curve.append((sum(totals_of_seeds) / len(totals_of_seeds), spread))
    return curve


def _draw_front(axes: Axes, front: Sequence[Outcome]) -> Line2D:
    """Draw the Pareto front; one that sends nothing starts at the left edge of the log scale."""
    left, right = axes.get_xlim()
    axes.set_xlim(left, right)
    costs = [max(outcome.bytes_up, left) for outcome in front]
    means = [outcome.mean for outcome in front]
    return draw_front(axes, costs, means, colour=INK, alpha=0.18)


def _outcome_table(
    outcomes: Sequence[Outcome], front: Sequence[Outcome]
) -> Iterator[Sequence[Any]]:
    """Yield the points of each group's way, and which of its ends are on the front."""
    yield "run", "accuracy", "bytes_up", "mean", "std", "end", "on_front"
    for outcome in outcomes:
        series = outcome.series
        label = series.group.label
        curve = _cost_curve(series)
        for number, (cost, spread) in enumerate(curve, 1):
            is_end = number == len(curve)
            on_front = is_end and outcome in front
            yield label, series.accuracy, cost, spread.mean, spread.std, is_end, on_front
