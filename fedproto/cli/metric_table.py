"""The metrics of finished runs as a table, beside those of their baselines, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

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


def metric_table(results: Sequence[dict[str, Any]]) -> Table | None:
    """Return a table with a row per way to predict and per baseline: means over clients.

    None for results of an older version, which have no metrics.
    """
    measured = [result for result in results if result.get("metrics")]
    if not measured:
        return None
    names = _list_metrics(measured)
    title = "mean over clients, %; the worst client by accuracy"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("predicted by")
    for name in names:
        table.add_column(escape(head_metric(name)), justify="right", overflow="fold")
    table.add_column("worst\nclient", justify="right")
    table.add_column("", overflow="fold")
    for result in measured:
        prefix = f"{result['algorithm']} " if len(measured) > 1 else ""
        for way in shown_ways(result["metrics"]):
            _add_row(table, prefix + way, result["metrics"][way], names, result)
    table.add_section()
    for label, metrics in _list_baselines(measured[0]):
        _add_row(table, label, metrics, names, measured[0], style="dim")
    return table


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


def _add_row(
    table: Table,
    label: str,
    metrics: dict[str, Any],
    names: Sequence[str],
    result: dict[str, Any],
    style: str = "",
) -> None:
    cells = []
    for name in names:
        mean = metrics.get(name, {}).get("mean")
        cells.append(_format(name, mean))
    cells.append(_format("accuracy", metrics["accuracy"]["worst"]))
    client = result["clients"][metrics["accuracy"]["worst_client"]]
    name = str(client.get("name", client["id"]))
    table.add_row(escape(label), *cells, escape(name), style=style)


def _format(name: str, value: float | None) -> str:
    """Return a metric in percent; one from outside as it is, since its scale is not known."""
    if value is None:
        return NOT_DEFINED
    return f"{100 * value:.1f}" if name in METRICS else f"{value:.3g}"


def warn_of_metrics(result: dict[str, Any]) -> list[str]:
    """Return the warnings of a run: an accuracy that says nothing, metrics that failed."""
    warnings = list_failures(result)
    sentence = explain_majority(result)
    if sentence is not None:
        warnings.insert(0, sentence)
    return [f"warning: {result['algorithm']}: {sentence}" for sentence in warnings]
