"""The results of a spec's runs as one JSON object, with every number that its page shows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedproto.errors import RunFolderError
from fedproto.reproduce.plan import PlannedRun, Row, Spec
from fedproto.runs.folder import DIVERGED, RunFolder

#: Probes (probes.py) whose results are one object per client.
CLIENT_PROBES = ("travel", "before")
#: The accuracy of the paper's pre-trained network on CIFAR-10 before round 1.
PAPERS_START = 0.2755
#: A method is close to its end in the first evaluated round with this fraction of the last
#: round's accuracy.
CLOSE_FRACTION = 0.99

Json = dict[str, Any]


@cache
def paper_rows() -> list[Json]:
    """Return the rows of the paper's tables 2 to 4."""
    content = json.loads((Path(__file__).parent / "paper.json").read_text())
    return content["rows"]


def gather(spec: Spec, planned: Sequence[PlannedRun], runs: Path, command: str) -> Json:
    """Return the content of `<target>.json`: enough to compute every number of the page again.

    `runs` is the folder of the target's run folders; runs that are not finished are left out.
    `command` is the command line that makes the target.
    """
    cells = []
    for row in spec.rows:
        for column in row.columns:
            of_cell = [each for each in planned if each.row is row and each.column == column]
            cells.append(_gather_cell(spec, row, column, of_cell, runs))
    machines = set()
    seconds = []
    for cell in cells:
        for run in cell["runs"]:
            machines.add(", ".join(run["machine"].values()))
            seconds.append(run["seconds"])
    return {
        "title": spec.title,
        "quick": spec.quick,
        "note": spec.note,
        "missing": [row.name for row in spec.rows if not _was_run(row.name, cells)],
        "command": command,
        "settings": spec.settings,
        "machines": sorted(machines),
        # The sum over all runs; federations that are trained together share their time.
        "seconds": round(sum(seconds), 1),
        "cells": cells,
    }


def _was_run(method: str, cells: Sequence[Json]) -> bool:
    """Return whether a run of the method finished or diverged."""
    return any(cell["runs"] or cell["diverged"] for cell in cells if cell["method"] == method)


# --- one run


def _read_run(runs: Path, planned: PlannedRun) -> Json | None:
    """Return the results of one federation, or None if it is not finished.

    A run of the same name with another number of rounds (`--rounds`) is not the planned one.
    """
    folder = RunFolder(runs / planned.cell.name)
    result = folder.result()
    if result is None or result["rounds"] != planned.cell.config.rounds:
        return None
    metrics = folder.metrics()
    scores = list(result["accuracy"])
    accuracies = {}
    for score in scores:
        accuracies[score] = [round(client["accuracy"][score], 5) for client in result["clients"]]
    losses = {name: round(value, 6) for name, value in metrics[-1]["loss"].items()}
    class_counts = [len(client["classes"]) for client in result["clients"]]
    run: Json = {
        "seed": planned.seed,
        "rounds": result["rounds"],
        "partition": result["partition"],
        "machine": result["machine"],
        "seconds": round(result["seconds"]["total"], 3),
        "classes": statistics.fmean(class_counts),
        "accuracy": accuracies,
        "curve": _read_curve(metrics, scores),
        "loss": losses,
        "communication": result["communication"],
    }
    if result.get("diverged"):
        run["diverged"] = True
    for probe in CLIENT_PROBES:
        if (folder.path / f"{probe}.json").exists():
            run[probe] = _read_probe(folder, probe)
    return run


def _read_curve(metrics: Sequence[Json], scores: Sequence[str]) -> dict[str, list[Any]]:
    """Return the evaluated rounds and the mean accuracies over all classes in them."""
    evaluated = [line for line in metrics if line["accuracy"]]
    rounds = [line["round"] for line in evaluated]
    accuracies = [line["accuracy"] for line in evaluated]
    curve: dict[str, list[Any]] = {"round": rounds}
    for score in scores:
        if score.endswith("_own"):
            continue
        means = [accuracy[score]["mean"] for accuracy in accuracies]
        curve[score] = [round(mean, 5) for mean in means]
    return curve


def _read_probe(folder: RunFolder, probe: str) -> list[Json]:
    """Return what a probe found out about each client's model."""
    clients = folder.read_json(f"{probe}.json").get("clients")
    if isinstance(clients, list) and clients and all(isinstance(each, dict) for each in clients):
        return clients
    raise RunFolderError(
        f"{folder.path / probe}.json is damaged: it must hold a list of objects, 'clients'"
    )


def _find_diverged(runs: Path, planned: Sequence[PlannedRun]) -> list[Json]:
    """Return the seeds that have no result because training diverged, each with the reason."""
    diverged = []
    for each in planned:
        folder = RunFolder(runs / each.cell.name)
        if not (folder.path / DIVERGED).exists() or folder.result() is not None:
            continue
        record = folder.read_json(DIVERGED)
        if record.get("rounds") == each.cell.config.rounds:
            diverged.append({"seed": each.seed, "reason": str(record.get("error"))})
    return diverged


# --- one cell: the runs of a method in a column, one per seed


def _gather_cell(
    spec: Spec, row: Row, column: str, planned: Sequence[PlannedRun], folder: Path
) -> Json:
    """Return the results of a row in a column: its runs, one per seed, and their summary.

    `folder` holds the run folders.
    """
    runs = []
    for each in planned:
        run = _read_run(folder, each)
        if run is not None:
            runs.append(run)
    settings = row.settings | spec.columns[column]
    cell: Json = {
        "dataset": settings["dataset"],
        "method": row.name,
        "column": column,
        "n": settings.get("ways", 3),
        "stdev": settings.get("stdev", 2),
        "rounds": settings.get("rounds", 100),
        "seeds": [run["seed"] for run in runs],
        "score": row.score,
        "runs": runs,
    }
    if runs:
        cell |= _summarise_runs(runs, row.score)
        cell["paper"] = _compare_with_paper(spec, cell)
        cell |= _summarise_probes(runs)
    cell["diverged"] = _find_diverged(folder, planned)
    return cell


def _summarise_runs(runs: Sequence[Json], score: str) -> Json:
    """Return what the runs of a cell have in common: means over their seeds."""
    accuracies = {}
    for name in runs[0]["accuracy"]:
        accuracies[name] = summary([run["accuracy"][name] for run in runs])
    traffic = [_traffic_per_round(run) for run in runs]
    communication = {}
    for name in traffic[0]:
        communication[name] = statistics.fmean(each[name] for each in traffic)
    return {
        "accuracy": accuracies,
        "rounds_to_99": [rounds_to_close(run["curve"], score) for run in runs],
        "communication": communication,
    }


def _traffic_per_round(run: Json) -> dict[str, float]:
    """Return the values uploaded per round, and the mean bytes per round in both directions."""
    communication = run["communication"]
    return {
        "values_per_round": communication["values_per_round"],
        "bytes_up_per_round": communication["bytes_up"] / run["rounds"],
        "bytes_down_per_round": communication["bytes_down"] / run["rounds"],
    }


def _summarise_probes(runs: Sequence[Json]) -> Json:
    """Return the summary of each probe that was made of all runs, by probe and quantity."""
    summaries: Json = {}
    for probe in CLIENT_PROBES:
        if not all(probe in run for run in runs):
            continue
        quantities = [name for name in runs[0][probe][0] if name != "id"]
        summaries[probe] = {}
        for name in quantities:
            values = [_client_values(run, probe, name) for run in runs]
            summaries[probe][name] = summary(values)
    return summaries


def _client_values(run: Json, probe: str, name: str) -> list[float]:
    return [client[name] for client in run[probe]]


def summary(accuracies: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the summary of one accuracy, given per seed as one value per client.

    mean         over clients and seeds
    std_clients  the standard deviation over clients, mean over seeds
    interval     the half-width of the 95% interval of the mean over seeds (Student's t);
                 left out where there is one seed
    """
    means = [statistics.fmean(clients) for clients in accuracies]
    deviations = [np.std(clients) for clients in accuracies]
    result = {"mean": statistics.fmean(means), "std_clients": statistics.fmean(deviations)}
    if len(means) > 1:
        quantile = stats.t.ppf(0.975, len(means) - 1)
        half_width = quantile * stats.sem(means)
        if not np.isnan(half_width):
            result["interval"] = float(half_width)
    return result


def rounds_to_close(curve: dict[str, list[Any]], score: str) -> int:
    """Return the first evaluated round with 99% of the last round's accuracy."""
    accuracies = curve[score]
    goal = CLOSE_FRACTION * accuracies[-1]
    position = next(i for i, value in enumerate(accuracies) if value >= goal)
    return curve["round"][position]


def _compare_with_paper(spec: Spec, cell: Json) -> Json | None:
    """Return the paper's row for the cell with our differences to it in points, if it has one.

    The released profile is compared with the paper's FedProto, which its code made.
    """
    method = "FedProto" if cell["method"] == "FedProto, released" else cell["method"]
    wanted = {
        "dataset": spec.paper,
        "method": method,
        "n": cell["n"],
        "stdev": cell["stdev"],
    }
    for row in paper_rows():
        if any(row[key] != value for key, value in wanted.items()):
            continue
        differences = {}
        for ending in ("", "_own"):
            ours = 100 * cell["accuracy"][cell["score"] + ending]["mean"]
            differences[f"difference{ending}"] = round(ours - row["accuracy"], 2)
        return row | differences
    return None
