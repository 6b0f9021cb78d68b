"""The metrics of finished runs as a table, beside those of their baselines, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fedproto.cli.fitted_tables import TextColumn, fit_tables
from fedproto.cli.numbers import percent
from fedproto.core.measurement import METRICS
from fedproto.runs.metric_contents import (
    BASELINES,
    explain_majority,
    list_failures,
    shown_metrics,
    shown_ways,
)

#: The metrics that the terminal shows; a report shows the others, too.
SHOWN = ("accuracy", "balanced_accuracy", "macro_f1", "auroc")
HEADERS = {"auroc": "AUROC", "macro_f1": "macro\nF1", "ece": "ECE", "brier": "Brier\nscore"}
NOT_DEFINED = "-"


def metric_tables(results: Sequence[dict[str, Any]], width: int) -> list[Table]:
    """Return a table with a row per way to predict and per baseline: means over clients.

    Columns that do not fit a terminal of this width are in a further table. There is none for
    results of an older version, which have no metrics.
    """
    measured = [result for result in results if result.get("metrics")]
    if not measured:
        return []
    names = _list_metrics(measured)
    rows = []
    for result in measured:
        rows += _rows_of_run(result, names, is_alone=len(measured) == 1)
    first_baseline = len(rows)
    for label, metrics in _list_baselines(measured[0]):
        rows.append(_make_row(label, metrics, names, measured[0]))
    headers = ["predicted by", *(head_metric(name) for name in names), "worst\nclient", "its name"]
    columns = []
    for place, header in enumerate(headers):
        columns.append(TextColumn(header, [row[place] for row in rows]))
    styles = [""] * first_baseline + ["dim"] * (len(rows) - first_baseline)
    title = "mean over clients, %; the worst client by accuracy"
    return fit_tables(columns, width, title, section_after=first_baseline, styles=styles)


def head_metric(name: str) -> str:
    """Return the header of a metric's column, in two lines where that is narrower."""
    return HEADERS.get(name, name.replace("_", "\n"))


def _list_metrics(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the metrics to show: the usual ones, and those that the settings ask for."""
    names = dict.fromkeys(SHOWN)
    for result in results:
        for way in shown_ways(result["metrics"]):
            further = [
                name for name in shown_metrics(result["metrics"][way]) if name not in METRICS
            ]
            names |= dict.fromkeys(further)
    return list(names)


def _list_baselines(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the label and the metrics of each baseline of a result."""
    rows = []
    for name, baseline in result.get("baselines", {}).items():
        metrics = baseline if name == "majority" else baseline.get("metrics")
        if metrics is not None:
            rows.append((BASELINES.get(name, name), metrics))
    return rows


def _rows_of_run(
    result: dict[str, Any], names: Sequence[str], *, is_alone: bool
) -> list[list[str]]:
    """Return a row for each way to predict; where there are several runs, with the algorithm."""
    prefix = "" if is_alone else f"{result['algorithm']} "
    metrics = result["metrics"]
    return [_make_row(prefix + way, metrics[way], names, result) for way in shown_ways(metrics)]


def _make_row(
    label: str, metrics: dict[str, Any], names: Sequence[str], result: dict[str, Any]
) -> list[str]:
    """Return the cells of one row: the label, the metrics, and the worst client with its name."""
    cells = [label]
    for name in names:
        mean = metrics.get(name, {}).get("mean")
        cells.append(_format(name, mean))
    cells.append(_format("accuracy", metrics["accuracy"]["worst"]))
    client = result["clients"][metrics["accuracy"]["worst_client"]]
    cells.append(str(client.get("name", client["id"])))
    return cells


def _format(name: str, value: float | None) -> str:
    """Return a metric in percent; one from outside as it is, since its scale is not known."""
    if value is None:
        return NOT_DEFINED
    return percent(value) if name in METRICS else f"{value:.3g}"


def warn_of_metrics(result: dict[str, Any]) -> list[str]:
    """Return the warnings of a run: an accuracy that says nothing, metrics that failed."""
    warnings = list_failures(result)
    sentence = explain_majority(result)
    if sentence is not None:
        warnings.insert(0, sentence)
    return [f"warning: {result['algorithm']}: {sentence}" for sentence in warnings]
