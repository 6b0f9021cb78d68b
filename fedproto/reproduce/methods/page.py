"""The page of the benchmark: its JSON object as Markdown, a section per data set and partition."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedproto.plots.labels import format_bytes
from fedproto.reproduce.markdown import format_columns, format_table
from fedproto.reproduce.methods.benchmark import ARCHITECTURES, name_files
from fedproto.reproduce.statistics import (
    ACCURACY_MARGIN,
    Comparison,
    Decision,
    Measurement,
    compare,
    decide_family,
)

LOCAL = "Local"

Json = dict[str, Any]
Quantity = Callable[[Json], float]
MeasuredRuns = dict[tuple[Any, int], Measurement]

_LEGEND = (
    "Accuracies are in percent, means over clients and seeds. `own` chooses among the classes that "
    "a client trains with, `all` among all classes; `last round` is the first of these after the "
    "last round, everything else is after the best round by validation. `macro-F1` is over own "
    "classes, and `worst client` is the lowest accuracy over own classes, mean over seeds. Bytes "
    "are those of all clients over all rounds. Seconds are a federation's share of those that were "
    "trained together. Differences are of `own`, paired by seed, with 95% intervals (Student's "
    "t); *better*, *worse* and *equivalent* (within "
    f"{ACCURACY_MARGIN} points) are decided at 5% after Holm's correction over the methods of the "
    "table. The best method is the one with the highest mean."
)


def render_page(content: Json) -> str:
    """Return an overview, then a section per data set and partition with everything measured."""
    cells = [cell for cell in content["cells"] if cell["runs"]]
    parts = [f"# {content['title']}", _describe_runs(content, cells), _LEGEND]
    for dataset in dict.fromkeys(cell["dataset"] for cell in cells):
        of_dataset = [cell for cell in cells if cell["dataset"] == dataset]
        parts.append(f"## {content['titles']['datasets'][dataset]}")
        parts.append(_overview(of_dataset, content["titles"]["partitions"]))
        for partition in dict.fromkeys(cell["partition"] for cell in of_dataset):
            parts.append(f"### {content['titles']['partitions'][partition]}")
            in_partition = [cell for cell in of_dataset if cell["partition"] == partition]
            parts += _sections(in_partition)
    return "\n\n".join(parts) + "\n"


def _describe_runs(content: Json, cells: Sequence[Json]) -> str:
    """Return how the runs were made, and what was looked at before."""
    machines = ", ".join(content["machines"])
    federations = sum(len(cell["runs"]) for cell in cells)
    tuning = content["tuning"]
    text = (
        f"{federations:,} federations, made by `{content['command']}`: {content['seconds']:,.0f} s "
        f"of runs on {machines}. "
    )
    settings = [f"{name} {value}" for name, value in content["settings"].items()]
    text += f"Settings of all runs, unless a data set has its own: {', '.join(settings)}. "
    run_methods = {cell["method"] for cell in cells}
    missing = [name for name in content["methods"] if name not in run_methods]
    if missing:
        text += f"**Not run yet**: {', '.join(missing)}. "
    if content["trials"]:
        text += (
            f"Every method's settings were chosen on validation rows before any test row was "
            f"looked at: {tuning['budget']} settings per method and data set, up to "
            f"{tuning['rounds']} rounds, {content['trials']:,} in all, with seeds that the table "
            f"does not use. They are in `{name_files(content['size'])}-tuned.json`."
        )
    else:
        text += "Settings are the defaults: nothing was tuned."
    diverged = _list_diverged(content["cells"])
    if diverged:
        text += f" **Diverged** and without a result: {'; '.join(diverged)}."
    return text


def _list_diverged(cells: Sequence[Json]) -> list[str]:
    """Return each method and setting in which training broke down, with the seeds."""
    places = []
    for cell in cells:
        seeds = [str(record["seed"]) for record in cell["diverged"]]
        if seeds:
            noun = "seed" if len(seeds) == 1 else "seeds"
            places.append(f"{cell['method']} ({cell['column']}), {noun} {', '.join(seeds)}")
    return places


# --- tables


def _overview(cells: Sequence[Json], titles: Mapping[str, str]) -> str:
    """Return a table of methods by partitions: accuracy over own classes, over all seeds."""
    places = dict.fromkeys((cell["partition"], cell["architecture"], cell["k"]) for cell in cells)
    by_place = {}
    for cell in cells:
        place = (cell["partition"], cell["architecture"], cell["k"])
        by_place[cell["method"], place] = cell
    header = ["own classes"]
    for partition, architecture, k in places:
        mark = "" if architecture == ARCHITECTURES[0] else f", {architecture}"
        header.append(f"{titles[partition]}, k = {k}{mark}")
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        row = [method]
        for place in places:
            found = by_place.get((method, place))
            row.append("" if found is None else _percent(_mean(found, measure_own)))
        rows.append(row)
    return format_table(header, rows)


def _sections(cells: Sequence[Json]) -> list[str]:
    """Return a heading and a table for each kind of architectures and number of rows."""
    parts = []
    for architecture in ARCHITECTURES:
        for k in sorted({cell["k"] for cell in cells}):
            chosen = [
                cell for cell in cells if cell["architecture"] == architecture and cell["k"] == k
            ]
            if chosen:
                parts.append(f"**{architecture.capitalize()} architectures, k = {k}**")
                parts.append(_details(chosen))
    return parts


def _details(cells: Sequence[Json]) -> str:
    """Return a table with a row per method and everything that was measured of it."""
    to_local = compare_with(cells, LOCAL)
    to_best = compare_with(cells, find_best(cells))
    columns = {
        "method": [cell["method"] for cell in cells],
        "own": _entries(cells, measure_own),
        "all": _entries(cells, measure_all),
        "macro-F1": _entries(cells, lambda run: 100 * run["macro_f1"]),
        "worst client": _entries(cells, measure_worst),
        "last round": _entries(cells, measure_last),
        "minus Local": [_format_decision(to_local, cell["method"]) for cell in cells],
        "minus the best": [_format_decision(to_best, cell["method"]) for cell in cells],
        "up": [_format_bytes(cell, "bytes_up") for cell in cells],
        "down": [_format_bytes(cell, "bytes_down") for cell in cells],
        "seconds": [f"{_mean(cell, lambda run: run['seconds']):.1f}" for cell in cells],
        "seeds": [str(len(cell["runs"])) for cell in cells],
    }
    return format_columns(columns)


def _entries(cells: Sequence[Json], quantity: Quantity) -> list[str]:
    return [_percent(_mean(cell, quantity)) for cell in cells]


def _percent(value: float) -> str:
    return f"{value:.2f}"


def _mean(cell: Json, quantity: Quantity) -> float:
    """Return the mean of a number over the runs of a cell."""
    return statistics.fmean(quantity(run) for run in cell["runs"])


def _format_bytes(cell: Json, name: str) -> str:
    return format_bytes(_mean(cell, lambda run: run[name]))


# --- what is measured of a run, in percent


def measure_own(run: Json) -> float:
    """Return the mean accuracy over clients, over own classes, after the best round."""
    return 100 * statistics.fmean(_own(run["accuracy"]))


def measure_all(run: Json) -> float:
    """Return the mean accuracy over clients, over all classes, after the best round."""
    (values,) = [each for way, each in run["accuracy"].items() if not way.endswith("_own")]
    return 100 * statistics.fmean(values)


def measure_worst(run: Json) -> float:
    """Return the accuracy of the worst client over own classes, after the best round."""
    return 100 * min(_own(run["accuracy"]))


def measure_last(run: Json) -> float:
    """Return the mean accuracy over clients, over own classes, after the last round."""
    return 100 * statistics.fmean(_own(run["last"]["accuracy"]))


def _own(accuracies: Json) -> list[float]:
    (values,) = [each for way, each in accuracies.items() if way.endswith("_own")]
    return values


# --- comparisons


def find_best(cells: Sequence[Json]) -> str:
    """Return the method with the highest mean accuracy over own classes."""
    return max(cells, key=lambda cell: _mean(cell, measure_own))["method"]


def compare_with(cells: Sequence[Json], other: str) -> dict[str, Decision]:
    """Return the decision on every other method against one of them, as one family."""
    measured = {cell["method"]: _measure(cell) for cell in cells}
    if other not in measured:
        return {}
    comparisons: dict[str, Comparison] = {}
    for method, runs in measured.items():
        if method != other:
            comparisons[method] = compare(runs, measured[other], margin=ACCURACY_MARGIN)
    decisions = decide_family(list(comparisons.values()))
    return dict(zip(comparisons, decisions, strict=True))


def _measure(cell: Json) -> MeasuredRuns:
    """Return the accuracy over own classes by seed; None where the run diverged."""
    measured = {}
    for run in cell["runs"]:
        measured[cell["column"], run["seed"]] = Measurement(measure_own(run))
    for record in cell["diverged"]:
        measured[cell["column"], record["seed"]] = Measurement(None)
    return measured


def _format_decision(decisions: Mapping[str, Decision], method: str) -> str:
    """Return a difference with its interval and what it means; nothing for the method itself."""
    if method not in decisions:
        return ""
    decision = decisions[method]
    return f"{decision.comparison.text()}, {decision.outcome.value}"
