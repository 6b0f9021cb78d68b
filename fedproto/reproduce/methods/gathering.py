"""The results of the benchmark as one JSON object, with every number that its page shows.

The cells have what reproduce/evidence.py reads: method, column, score and runs with accuracies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedproto.reproduce.methods.benchmark import (
    CPU,
    FULL,
    QUICK,
    TARGET,
    Benchmark,
    BenchmarkRun,
)
from fedproto.reproduce.methods.records import Records
from fedproto.reproduce.tables import summary

Json = dict[str, Any]

#: What asks for a size.
_FLAGS = {FULL: "", CPU: " --size cpu", QUICK: " --quick"}


def gather(
    benchmark: Benchmark, planned: Sequence[BenchmarkRun], records: Records, trials: int
) -> Json:
    """Return the content of `table-methods.json`; what is not finished is left out.

    `trials` settings were tried to tune all methods.
    """
    cells: dict[tuple[str, str], Json] = {}
    machines = set()
    for run in planned:
        record = records.find(run)
        if record is None:
            continue
        cell = cells.setdefault((run.method.name, run.column.name), _begin_cell(run))
        if "run" in record:
            found = dict(record["run"])
            machines.add(found.pop("machine"))
            cell["runs"].append(found)
        else:
            cell["diverged"].append({"seed": run.seed, "reason": record["diverged"]})
    for cell in cells.values():
        cell["seeds"] = [run["seed"] for run in cell["runs"]]
        if cell["runs"]:
            cell["accuracy"] = _summarise(cell["runs"])
    seconds = [run["seconds"] for cell in cells.values() for run in cell["runs"]]
    title = benchmark.tables["title"]
    if benchmark.size != FULL:
        title += f", {benchmark.tables['sizes'][benchmark.size]['title']}"
    return {
        "title": title,
        "size": benchmark.size,
        "quick": benchmark.size == QUICK,
        "command": f"fedproto reproduce {TARGET}{_FLAGS[benchmark.size]}",
        "settings": benchmark.settings,
        "methods": [method.name for method in benchmark.methods],
        "trials": trials,
        "tuning": benchmark.tuning,
        "titles": _list_titles(benchmark),
        "machines": sorted(machines),
        "seconds": round(sum(seconds), 1),
        "cells": list(cells.values()),
    }


def _list_titles(benchmark: Benchmark) -> Json:
    """Return what pages call the data sets and the partitions."""
    titles: Json = {}
    for axis in ("datasets", "partitions"):
        titles[axis] = {name: benchmark.title_of(axis, name) for name in benchmark.tables[axis]}
    return titles


def _begin_cell(run: BenchmarkRun) -> Json:
    """Return what a method in a column is, before its runs are added."""
    config = run.cell.config
    column = run.column
    return {
        "method": run.method.name,
        "algorithm": config.algorithm.name,
        "column": column.name,
        "dataset": column.dataset,
        "partition": column.partition,
        "architecture": column.architecture,
        "k": column.k,
        "score": run.method.score,
        "shares_weights": run.method.shares_weights,
        "rounds": config.rounds,
        "runs": [],
        "diverged": [],
        "paper": None,
    }


def _summarise(runs: Sequence[Json]) -> Json:
    """Return the summary of each accuracy over the seeds, after the best round."""
    summaries = {}
    for way in runs[0]["accuracy"]:
        summaries[way] = summary([run["accuracy"][way] for run in runs])
    return summaries
