"""The clients of a run for a page: what partition.json says at once, and result.json at the end."""

from __future__ import annotations

from typing import Any

from fedproto.watch.numbers import to_count, to_number, to_numbers
from fedproto.watch.series import Series

Client = dict[str, Any]


def describe_planned(partition: dict[str, Any], series: Series) -> list[Client]:
    """Return the clients of a run that goes on: names, classes, rows and when they took part."""
    clients = []
    for number, stored in enumerate(partition["clients"]):
        client = {
            "id": number,
            "name": str(stored.get("name") or number),
            "model": "",
            "dataset": stored["dataset"],
            "classes": stored["classes"],
            "rows": None,
            "train": len(stored["train"]),
            "test": len(stored["test"]),
            "accuracy": {},
            "recall": {},
        }
        clients.append(client | _describe_presence(number, series))
    return clients


def describe_trained(result: dict[str, Any], series: Series) -> list[Client]:
    """Return the clients of a finished run, with their accuracies and recall per class."""
    clients = []
    for stored in result["clients"]:
        rows = stored.get("images")
        metrics = stored.get("metrics")
        client = {
            "id": stored["id"],
            "name": str(stored.get("name", stored["id"])),
            "model": stored["model"],
            "dataset": str(stored.get("dataset", result["dataset"])),
            "classes": stored["classes"],
            "rows": rows,
            "train": to_count(stored.get("train")),
            "test": to_count(stored.get("test")),
            "accuracy": to_numbers(stored["accuracy"]),
            "recall": _read_recall(metrics),
            "traffic": to_numbers(stored.get("communication")),
        }
        clients.append(client | _describe_presence(stored["id"], series))
    return clients


def _describe_presence(number: int, series: Series) -> Client:
    return {
        "last_round": series.last_round.get(number, 0),
        "times": series.times.get(number, 0),
        "diverged": number in series.diverged,
    }


def _read_recall(metrics: Any) -> dict[str, dict[str, float | int | None]]:
    """Return the recall of each class by the way to predict; {} if it was not measured."""
    if not isinstance(metrics, dict):
        return {}
    recall = {}
    for way, values in metrics.items():
        if isinstance(values, dict):
            recall[str(way)] = to_numbers(values.get("sensitivity"))
    return recall


def describe_metrics(result: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics over all clients by the way to predict, and those of the baselines."""
    ways = {}
    stored = result.get("metrics")
    for way, values in (stored if isinstance(stored, dict) else {}).items():
        if isinstance(values, dict):
            ways[str(way)] = _describe_way(values)
    baselines = {}
    stored = result.get("baselines")
    for name, values in (stored if isinstance(stored, dict) else {}).items():
        if isinstance(values, dict):
            baselines[str(name)] = _describe_baseline(values)
    return {"ways": ways, "baselines": baselines}


def _describe_way(values: dict[str, Any]) -> dict[str, Any]:
    summaries = {}
    for name, value in values.items():
        if isinstance(value, dict) and "mean" in value:
            summaries[str(name)] = to_numbers(value)
    bins = values.get("calibration")
    return {
        "summaries": summaries,
        "recall": to_numbers(values.get("sensitivity")),
        "confusion": _read_confusion(values.get("confusion")),
        "bins": [to_numbers(each) for each in bins] if isinstance(bins, list) else [],
    }


def _read_confusion(value: Any) -> list[list[int]] | None:
    """Return a square table of counts; None for anything else."""
    if not isinstance(value, list):
        return None
    for row in value:
        if not isinstance(row, list) or len(row) != len(value):
            return None
        if any(to_count(count) is None for count in row):
            return None
    return value


def _describe_baseline(values: dict[str, Any]) -> dict[str, Any]:
    if "missing" in values:
        return {"missing": str(values["missing"])}
    metrics = values.get("metrics", values)
    summaries = {}
    for name, value in (metrics if isinstance(metrics, dict) else {}).items():
        if isinstance(value, dict) and "mean" in value:
            summaries[str(name)] = to_numbers(value)
    clients = values.get("clients")
    per_client = [to_number(each) for each in clients] if isinstance(clients, list) else []
    return {"summaries": summaries, "clients": per_client}
