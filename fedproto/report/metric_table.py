"""The table of metrics of a report: a row per method and way to predict, and per baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedproto.core.calibration_metrics import BINS
from fedproto.core.measurement import METRICS
from fedproto.report.groups import Group
from fedproto.report.read_metrics import MetricSummary
from fedproto.report.summary import Cell, Table
from fedproto.runs.metric_contents import BASELINES

NAMES = {
    "accuracy": "accuracy, %",
    "balanced_accuracy": "balanced accuracy, %",
    "macro_f1": "macro-F1, %",
    "auroc": "AUROC, %",
    "brier": "Brier score",
    "ece": "ECE, %",
}
NOT_DEFINED = "–"


def make_metric_table(groups: Sequence[Group]) -> Table | None:
    """Return the metrics of all groups, means over clients and seeds; None if there are none."""
    rows = []
    names = _list_metrics(groups)
    for group in groups:
        for way in _list_ways(group):
            measured = [run.metrics for run in group.runs if run.metrics is not None]
            summaries = [each.ways[way].metrics for each in measured if way in each.ways]
            rows.append(_make_row(group.label, way, summaries, names))
        for baseline, label in BASELINES.items():
            measured = [run.metrics for run in group.runs if run.metrics is not None]
            found = [each.baselines for each in measured]
            summaries = [each[baseline] for each in found if baseline in each]
            if summaries:
                rows.append(_make_row(group.label, label, summaries, names))
    if not rows:
        return None
    header = ["method", "predicted by"]
    header += [NAMES.get(name, name) for name in names]
    return Table([*header, "worst client's accuracy, %"], rows)


def explain_metrics(groups: Sequence[Group]) -> list[str]:
    """Return sentences on how to read the table of metrics, and warnings."""
    notes = [
        "Metrics are means over clients, ± standard deviation over clients, on the test rows. "
        "Balanced accuracy is the mean sensitivity of the classes; AUROC is the mean over the "
        "classes, each against all others; the Brier score and the expected calibration error "
        f"(ECE, {BINS} bins of the largest probability) are better when they are smaller.",
    ]
    warnings: dict[str, None] = {}
    for group in groups:
        for run in group.runs:
            for sentence in run.warnings:
                warnings[f"Warning: {group.label} with seed {run.seed}: {sentence}."] = None
            missing = {} if run.metrics is None else run.metrics.missing
            for name, reason in missing.items():
                label = BASELINES.get(name, name)
                warnings[f"There is no {label} beside {group.label}: {reason}."] = None
    return [*notes, *warnings]


def _list_ways(group: Group) -> list[str]:
    metrics = group.first.metrics
    return [] if metrics is None else list(metrics.ways)


def _list_metrics(groups: Sequence[Group]) -> list[str]:
    names = dict.fromkeys(METRICS)
    for group in groups:
        metrics = group.first.metrics
        if metrics is not None:
            for way in metrics.ways.values():
                names |= dict.fromkeys(way.metrics)
    return list(names)


def _make_row(
    label: str, way: str, summaries: Sequence[dict[str, MetricSummary]], names: Sequence[str]
) -> list[Cell]:
    cells = [Cell(label), Cell(way)]
    for name in names:
        known = [one[name] for one in summaries if name in one]
        mean = _mean([each.mean for each in known])
        std = _mean([each.std for each in known])
        cells.append(Cell(_format(name, mean, std)))
    worst = _mean([one["accuracy"].worst for one in summaries])
    cells.append(Cell(_format("accuracy", worst, None)))
    return cells


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean over seeds; None if a metric is not defined for one of them."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    return statistics.fmean(numbers)


def _format(name: str, mean: float | None, std: float | None) -> str:
    """Return a metric as text: in percent, but the Brier score and metrics from outside."""
    if mean is None:
        return NOT_DEFINED
    is_percent = name in NAMES and name != "brier"
    scale = 100 if is_percent else 1
    text = f"{scale * mean:.1f}" if is_percent else f"{mean:.3f}"
    if std is None:
        return text
    return f"{text} ± {scale * std:.1f}" if is_percent else f"{text} ± {std:.3f}"
