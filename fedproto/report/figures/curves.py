"""Accuracy and loss against rounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedproto.plots.labels import is_own_accuracy, score_name, shorten
from fedproto.plots.marks import draw_line_with_band, show_percent
from fedproto.plots.style import marker_at
from fedproto.report.figures.figure import (
    Figure,
    Section,
    add_series_legend,
    count_legend_rows,
    finish_figure,
    make_panel,
)
from fedproto.report.groups import Group, mean_of
from fedproto.report.read import Round, Spread

#: How a line is drawn: solid, or an offset and the lengths of strokes and gaps.
Dashes = str | tuple[int, tuple[int, ...]]
DASHES: dict[str, Dashes] = {
    "prototype": (0, (4, 2)),
    "both": (0, (1, 1)),
    "teacher": (0, (5, 2, 1, 2)),
    "head+teacher": (0, (5, 2, 1, 2, 1, 2)),
    "both+teacher": (0, (5, 2, 1, 2, 1, 2)),
}
MARKERS_PER_LINE = 8
PANEL_INCHES = 2.9
MAX_EVALUATION_TICKS = 10

Curve = list[tuple[int, Spread]]  # the number of a round, mean and deviation over clients


def draw_curves(groups: Sequence[Group]) -> Section:
    """Return the section of accuracies and of all terms of the loss against rounds.

    Lines are means over clients, and over seeds where there are several; bands are the standard
    deviation over clients.
    """
    figures = [_draw_accuracy(groups, "accuracy", "Accuracy over all classes", own=False)]
    if _differ_among_own_classes(groups):
        title = "Accuracy among a client's own classes"
        figures.append(_draw_accuracy(groups, "accuracy-own", title, own=True))
    figures += [_draw_loss(groups, term) for term in _loss_terms(groups)]
    return Section("Accuracy and loss", figures)


# --- accuracy


def _differ_among_own_classes(groups: Sequence[Group]) -> bool:
    """Whether some accuracy among own classes is not that over all classes, in some round."""
    for series in list_series(groups, own=True):
        over_all = score_name(series.accuracy)
        if over_all not in series.group.accuracies:
            return True
        own_curve = accuracy_curve(series.group, series.accuracy)
        if own_curve != accuracy_curve(series.group, over_all):
            return True
    return False


@dataclass(frozen=True)
class Series:
    """A line of a figure: one accuracy of one group."""

    group: Group
    position: int  # of the group, which determines colour and marker
    accuracy: str

    @property
    def label(self) -> str:
        """The label of the group, with the score if the group has several."""
        own = is_own_accuracy(self.accuracy)
        scores = [name for name in self.group.accuracies if is_own_accuracy(name) == own]
        if len(scores) < 2:
            return self.group.label
        return f"{self.group.label}, {score_name(self.accuracy)}"

    @property
    def dashes(self) -> Dashes:
        """How the line is drawn, by what predicts: a head's is solid."""
        return DASHES.get(score_name(self.accuracy), "-")

    @property
    def final_mean(self) -> float:
        """The accuracy after the last round."""
        return self.group.mean_accuracy(self.accuracy).mean


def list_series(groups: Sequence[Group], own: bool) -> list[Series]:
    """Return all accuracies of all groups, either among all classes or among own classes."""
    series = []
    for position, group in enumerate(groups):
        names = [name for name in group.accuracies if is_own_accuracy(name) == own]
        series += [Series(group, position, name) for name in names]
    return series


def _draw_accuracy(groups: Sequence[Group], name: str, title: str, own: bool) -> Figure:
    """Draw the accuracies of all groups, either among all classes or among own classes."""
    all_series = list_series(groups, own)
    labels = [series.label for series in all_series]
    canvas, axes = make_panel(PANEL_INCHES, count_legend_rows(labels))
    entries = []
    final_means = []
    for series in all_series:
        curve = accuracy_curve(series.group, series.accuracy)
        line = _draw_curve(
            axes,
            series.position,
            series.group.colour,
            curve,
            dashes=series.dashes,
            line_count=len(labels),
            limits=(0.0, 1.0),
        )
        entries.append((line, series.label))
        final_means.append(f"{series.label} {series.final_mean:.1%}")
    has_validation = any(group.first.validation is not None for group in groups)
    ylabel = "validation accuracy, %" if has_validation else "accuracy, %"
    axes.set(title=title, xlabel="round", ylabel=ylabel)
    show_percent(axes)
    _tick_evaluations(axes, all_series)
    add_series_legend(canvas, entries)
    return finish_figure(
        canvas,
        name,
        title,
        caption=_accuracy_caption(groups, all_series),
        alt=f"{title} against rounds. In the end: {', '.join(final_means)}.",
        table=_accuracy_table(groups, own),
    )


def _tick_evaluations(axes: Axes, all_series: Sequence[Series]) -> None:
    """Put the ticks where evaluations are, if they are few."""
    rounds: set[int] = set()
    for series in all_series:
        rounds.update(number for number, _ in accuracy_curve(series.group, series.accuracy))
    if len(rounds) <= MAX_EVALUATION_TICKS:
        axes.set_xticks(sorted(rounds))


def _accuracy_caption(groups: Sequence[Group], all_series: Sequence[Series]) -> str:
    """Return what lines, bands and dashes mean."""
    seeds = mention_seeds(groups)
    caption = f"Lines: mean over clients{seeds}; bands: ± one standard deviation over clients"
    dashes = {series.dashes for series in all_series}
    if DASHES["prototype"] in dashes:
        caption = f"{caption}; dashed: by the nearest prototype"
    if DASHES["both"] in dashes:
        caption = f"{caption}; dotted: by both prototypes and head"
    if DASHES["teacher"] in dashes:
        caption = (
            f"{caption}; dashes and dots: by the teacher, and with two dots by the sum with it"
        )
    if any(group.first.validation is not None for group in groups):
        caption = f"{caption}; on validation rows in runs that have some, otherwise on test rows"
    return f"{caption}."


def mention_seeds(groups: Sequence[Group]) -> str:
    """Return what a caption adds if some runs are shown as the mean over their seeds."""
    if any(len(group.runs) > 1 for group in groups):
        return "; mean over seeds where there are several"
    return ""


def accuracy_curve(group: Group, accuracy: str) -> Curve:
    """Return an accuracy in the evaluated rounds, as the mean over seeds."""
    curves: list[Curve] = []
    for run in group.runs:
        evaluated = [round for round in run.rounds if round.accuracy]
        curve = [(round.number, round.accuracy[accuracy]) for round in evaluated]
        curves.append(curve)
    return _average_curves(curves)


def _accuracy_table(groups: Sequence[Group], own: bool) -> Iterator[Sequence[Any]]:
    """Yield the numbers of each run and, where there are several seeds, their mean."""
    yield "run", "seed", "accuracy", "round", "mean", "std"
    for group in groups:
        names = [name for name in group.accuracies if is_own_accuracy(name) == own]
        for run in group.runs:
            for round in run.rounds:
                yield from _rows_of_round(group.label, run.seed, round, names, round.accuracy)
        if len(group.runs) > 1:
            for name in names:
                yield from _rows_of_mean(group.label, name, accuracy_curve(group, name))


# --- loss


def _loss_terms(groups: Sequence[Group]) -> list[str]:
    """Return the terms of the loss that are not always 0, in the order they appear."""
    terms: dict[str, None] = {}  # a set that keeps its order
    for group in groups:
        for run in group.runs:
            for round in run.rounds:
                terms |= dict.fromkeys(_nonzero_terms(round))
    return list(terms)


def _nonzero_terms(round: Round) -> list[str]:
    """Return the terms of the loss that are not 0 in a round."""
    return [term for term, spread in round.loss.items() if spread.mean]


def _draw_loss(groups: Sequence[Group], term: str) -> Figure:
    """Draw a term of the loss for the groups in which it is not always 0."""
    curves: dict[int, Curve] = {}  # by the position of the group
    for position, group in enumerate(groups):
        if any(term in _nonzero_terms(round) for round in group.first.rounds):
            curves[position] = _loss_curve(group, term)
    title = f"Training loss: {term}"
    labels = [groups[position].label for position in curves]
    canvas, axes = make_panel(PANEL_INCHES, count_legend_rows(labels))
    entries = []
    last_losses = []
    for position, curve in curves.items():
        label = groups[position].label
        line = _draw_curve(
            axes, position, groups[position].colour, curve, dashes="-", line_count=len(curves)
        )
        entries.append((line, label))
        _, last = curve[-1]
        last_losses.append(f"{label} {last.mean:.3g}")
    axes.set(title=shorten(title), xlabel="round", ylabel="loss")
    add_series_legend(canvas, entries)

    seeds = mention_seeds(groups)
    caption = f"Lines: mean over the clients that trained in the round{seeds}"
    if all(_has_band(curve) for curve in curves.values()):
        caption += "; bands: ± one standard deviation over them"
    return finish_figure(
        canvas,
        name=re.sub(r"[\W_]", "-", f"loss-{term}"),
        title=title,
        caption=f"{caption}.",
        alt=f"{title} against rounds. In the last round: {', '.join(last_losses)}.",
        table=_loss_table(groups, term),
    )


def _loss_curve(group: Group, term: str) -> Curve:
    """Return a term of the loss in all rounds that have it, as the mean over seeds."""
    curves: list[Curve] = []
    for run in group.runs:
        rounds = [round for round in run.rounds if term in round.loss]
        curve = [(round.number, round.loss[term]) for round in rounds]
        curves.append(curve)
    return _average_curves(curves)


def _loss_table(groups: Sequence[Group], term: str) -> Iterator[Sequence[Any]]:
    """Yield the numbers of each run and, where there are several seeds, their mean."""
    yield "run", "seed", "loss", "round", "mean", "std"
    for group in groups:
        for run in group.runs:
            for round in run.rounds:
                yield from _rows_of_round(group.label, run.seed, round, [term], round.loss)
        if len(group.runs) > 1:
            yield from _rows_of_mean(group.label, term, _loss_curve(group, term))


# --- what both share


def _average_curves(curves: Iterable[Curve]) -> Curve:
    """Return the mean of several runs' curves, round by round."""
    spreads_by_round: dict[int, list[Spread]] = {}
    for curve in curves:
        for number, spread in curve:
            spreads_by_round.setdefault(number, []).append(spread)
    average = []
    for number in sorted(spreads_by_round):
        spread = mean_of(spreads_by_round[number])
        average.append((number, spread))
    return average


def _draw_curve(
    axes: Axes,
    position: int,
    colour: str,
    curve: Curve,
    dashes: Dashes,
    line_count: int,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> Line2D:
    """Draw a curve with its band; the more lines there are, the paler the bands."""
    rounds = [number for number, _ in curve]
    means = [spread.mean for _, spread in curve]
    deviations = [spread.std for _, spread in curve]
    line = draw_line_with_band(
        axes,
        rounds,
        means,
        deviations,
        band_alpha=max(0.05, 0.2 / line_count**0.5),
        band_limits=limits,
        color=colour,
        marker=marker_at(position),
        linestyle=dashes,
        markevery=max(1, len(rounds) // MARKERS_PER_LINE),
        clip_on=len(rounds) > 1,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return line


def _has_band(curve: Curve) -> bool:
    """Whether all rounds have a deviation, which older versions did not record."""
    return all(spread.std is not None for _, spread in curve)


def _rows_of_round(
    label: str, seed: int, round: Round, names: Sequence[str], spreads: dict[str, Spread]
) -> Iterator[Sequence[Any]]:
    """Yield the rows of one run and round, one per name that the round has."""
    for name in names:
        if name in spreads:
            spread = spreads[name]
            yield label, seed, name, round.number, spread.mean, spread.std


def _rows_of_mean(label: str, name: str, curve: Curve) -> Iterator[Sequence[Any]]:
    """Yield the rows of the mean over seeds."""
    for number, spread in curve:
        yield label, "mean", name, number, spread.mean, spread.std
