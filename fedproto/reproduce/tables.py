"""The results of a spec's runs: every number as JSON, and what people read as Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedproto.core.metrics import ACCURACIES
from fedproto.errors import RunFolderError
from fedproto.reproduce.plan import Planned, Row, Spec
from fedproto.runs.folder import DIVERGED, RunFolder

SEEN = ("travel", "before")  # what `probes.py` found out, a list of clients
PAPERS_START = 0.2755  # the accuracy of the paper's pre-trained network on CIFAR-10 before round 1
CLOSE = 0.99  # of the last round's accuracy: a method is there in the first evaluated round that has so much


@cache
def paper_rows() -> list[dict[str, Any]]:
    return json.loads((Path(__file__).parent / "paper.json").read_text())["rows"]


def gather(spec: Spec, planned: Sequence[Planned], runs: Path, command: str) -> dict[str, Any]:
    """The content of `<name>.json`: enough to compute every number of the table again."""
    cells = []
    for row in spec.rows:
        for column in row.columns:
            there = [p for p in planned if p.row is row and p.column == column]
            found = [_run(runs, each) for each in there]
            finished = [run for run in found if run is not None]
            diverged = _find_diverged(runs, there)
            cells.append(_cell(spec, row, column, finished) | {"diverged": diverged})
    machines = sorted(
        {", ".join(run["machine"].values()) for cell in cells for run in cell["runs"]}
    )
    seconds = sum(run["seconds"] for cell in cells for run in cell["runs"])
    return {
        "title": spec.title,
        "quick": spec.quick,
        "note": spec.note,
        "missing": [row.name for row in spec.rows if not _was_run(row.name, cells)],
        "command": command,
        "settings": spec.settings,
        "machines": machines,
        "seconds": round(seconds, 1),  # of all runs; federations of one stack share theirs
        "cells": cells,
    }


def _was_run(method: str, cells: Sequence[dict[str, Any]]) -> bool:
    """Whether a run of the method finished or diverged."""
    return any(cell["runs"] or cell["diverged"] for cell in cells if cell["method"] == method)


def _find_diverged(runs: Path, planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """The seeds that have no result because training diverged, each with the reason."""
    found = []
    for each in planned:
        folder = RunFolder(runs / each.cell.name)
        if (folder.path / DIVERGED).exists() and folder.result() is None:
            noted = folder.read_json(DIVERGED)
            if noted.get("rounds") == each.cell.config.rounds:
                found.append({"seed": each.seed, "reason": str(noted.get("error"))})
    return found


def _run(runs: Path, planned: Planned) -> dict[str, Any] | None:
    """What one federation gave, if it is finished; `--rounds` may have made another one of the same name."""
    path = runs / planned.cell.name
    folder = RunFolder(path)
    result = folder.result()
    if result is None or result["rounds"] != planned.cell.config.rounds:
        return None
    metrics = folder.metrics()
    evaluated = [line for line in metrics if line["accuracy"]]
    return {
        "seed": planned.seed,
        "rounds": result["rounds"],
        "partition": result["partition"],
        "machine": result["machine"],
        "seconds": round(result["seconds"]["total"], 3),
        "classes": statistics.fmean(len(client["classes"]) for client in result["clients"]),
        "accuracy": {
            key: [round(client["accuracy"][key], 5) for client in result["clients"]]
            for key in result["accuracy"]
        },
        "curve": {
            "round": [line["round"] for line in evaluated],
            **{
                key: [round(line["accuracy"][key]["mean"], 5) for line in evaluated]
                for key in result["accuracy"]
                if not key.endswith("_own")
            },
        },
        "loss": {name: round(value, 6) for name, value in metrics[-1]["loss"].items()},
        "communication": result["communication"],
        **({"diverged": True} if result.get("diverged") else {}),
        **{name: _clients(folder, name) for name in SEEN if _is(path, name)},
    }


def _clients(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    """What was found out about each client's model."""
    clients = folder.read_json(f"{name}.json").get("clients")
    if (
        not isinstance(clients, list)
        or not clients
        or not all(isinstance(each, dict) for each in clients)
    ):
        raise RunFolderError(
            f"{folder.path / name}.json is damaged: it must hold a list of objects, 'clients'"
        )
    return clients


def _is(path: Path, name: str) -> bool:
    return (path / f"{name}.json").exists()


def _cell(spec: Spec, row: Row, column: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    settings = row.settings | spec.columns[column]
    cell: dict[str, Any] = {
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
        cell["accuracy"] = {
            key: summary([run["accuracy"][key] for run in runs]) for key in runs[0]["accuracy"]
        }
        cell["rounds_to_99"] = [rounds_to_close(run["curve"], row.score) for run in runs]
        per_round = [_per_round(run) for run in runs]
        cell["communication"] = {
            key: statistics.fmean(each[key] for each in per_round) for key in per_round[0]
        }
        cell["paper"] = _papers(spec, cell)
        for name in SEEN:
            if all(name in run for run in runs):
                kinds = [kind for kind in runs[0][name][0] if kind != "id"]
                cell[name] = {
                    kind: summary([[client[kind] for client in run[name]] for run in runs])
                    for kind in kinds
                }
    return cell


def summary(clients: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of one accuracy, a list of clients a seed: the mean over both, the mean over seeds of the deviation over clients,
    and the half-width of the 95% interval of the mean over seeds (Student's t; nothing for one seed)."""
    means = [statistics.fmean(each) for each in clients]
    half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means) if len(means) > 1 else float("nan")
    found = {
        "mean": statistics.fmean(means),
        "std_clients": statistics.fmean(np.std(each) for each in clients),
    }
    return found | ({} if np.isnan(half) else {"interval": float(half)})


def rounds_to_close(curve: dict[str, list[Any]], score: str) -> int:
    """The first evaluated round with 99% of the last round's accuracy."""
    enough = CLOSE * curve[score][-1]
    return next(
        round for round, value in zip(curve["round"], curve[score], strict=True) if value >= enough
    )


def _per_round(run: dict[str, Any]) -> dict[str, float]:
    sent = run["communication"]
    return {
        "values_per_round": sent["values_per_round"],
        "bytes_up_per_round": sent["bytes_up"] / run["rounds"],
        "bytes_down_per_round": sent["bytes_down"] / run["rounds"],
    }


def _papers(spec: Spec, cell: dict[str, Any]) -> dict[str, Any] | None:
    """The paper's row for the cell; the released profile is compared with its FedProto, which it made."""
    method = "FedProto" if cell["method"] == "FedProto, released" else cell["method"]
    for row in paper_rows():
        if (row["dataset"], row["method"], row["n"], row["stdev"]) == (
            spec.paper,
            method,
            cell["n"],
            cell["stdev"],
        ):
            ours = {
                name: 100 * cell["accuracy"][cell["score"] + name]["mean"] for name in ("", "_own")
            }
            return row | {
                f"difference{name}": round(mean - row["accuracy"], 2) for name, mean in ours.items()
            }
    return None


# --- Markdown


def markdown(found: dict[str, Any]) -> str:
    """A table of means, then a table a column with everything that was measured."""
    cells = [cell for cell in found["cells"] if cell["runs"]]
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    seeds = sorted({seed for cell in cells for seed in cell["seeds"]})
    parts = [
        f"# {found['title']}",
        f"Seeds {', '.join(map(str, seeds))}, fixed before looking; the last round is reported; nothing was selected "
        "on test data. "
        f"Made by `{found['command']}`: {found['seconds']:,.0f} s of runs on {', '.join(found['machines'])}.",
        _said(found),
        *(_overviews(cells, columns) if len(columns) > 1 else []),
        _LEGEND,
        *(_section(column, [c for c in cells if c["column"] == column]) for column in columns),
        "Partitions (SHA-256, first 12 digits): " + _partitions(cells) + ".",
    ]
    return "\n\n".join(parts) + "\n"


_LEGEND = (
    "Accuracies in percent, mean over clients and seeds ± the deviation over clients (mean of the seeds') [± the "
    "half-width of the 95% interval of the mean over seeds]. `head` and `prototype` choose among all classes, `own` "
    "among the client's own. `difference` is ours, by what the method predicts with, minus the paper's; `difference, "
    "own` is that among the client's own classes, where the code that made the paper's FedProto looked for the "
    "nearest prototype. `to 99%` is the first evaluated round with 99% of the last round's accuracy, mean over seeds."
    " Values and bytes are uploads of all clients in a round. The paper's own ± cannot be compared with ours: the "
    "code that made FedProto's did not reset its counters between clients."
)


#: Settings that a reader wants to compare with the paper's.
SHOWN = ("clients", "shots", "batch", "lr", "momentum", "epochs", "precision", "eval_every")


def _said(found: dict[str, Any]) -> str:
    """What all runs have in common, what is missing, and the note."""
    settings = ", ".join(
        f"{key} {found['settings'][key]}" for key in SHOWN if key in found["settings"]
    )
    missing = f"**Not run yet:** {', '.join(found['missing'])}." if found["missing"] else ""
    parts = (f"Of all runs: {settings}.", found["note"], missing, _say_diverged(found["cells"]))
    return "\n\n".join(part for part in parts if part)


def _say_diverged(cells: Sequence[dict[str, Any]]) -> str:
    """Which runs have no result because their training diverged, and which finished with a loss that exploded."""
    lost = []
    exploded = []
    for cell in cells:
        name = f"{cell['method']} ({cell['column']})"
        lost += [
            f"{name}, seed {each['seed']}: {each['reason']}" for each in cell.get("diverged", [])
        ]
        exploded += [f"{name}, seed {run['seed']}" for run in cell["runs"] if run.get("diverged")]
    sentences = []
    if lost:
        sentences.append(
            f"**Diverged**, so the means below are of the other seeds: {'; '.join(lost)}."
        )
    if exploded:
        sentences.append(
            f"**The loss exploded**, but the run finished and counts: {'; '.join(exploded)}."
        )
    return " ".join(sentences)


def _section(column: str, cells: Sequence[dict[str, Any]]) -> str:
    """A column, with how many classes its clients really had: noise stops at 2."""
    held = statistics.fmean(run["classes"] for cell in cells for run in cell["runs"])
    return f"## {column} ({held:.1f} classes a client)\n\n{_details(cells)}"


def _overviews(cells: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """By what the methods predict with; and, beside the paper, among the client's own classes."""
    found = [_overview(cells, columns)]
    if any(cell["paper"] for cell in cells):
        found += [
            "The same, choosing only among the client's own classes:",
            _overview(cells, columns, "_own"),
        ]
    return found


def _overview(cells: Sequence[dict[str, Any]], columns: Sequence[str], own: str = "") -> str:
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for method in methods:
        mine = {cell["column"]: cell for cell in cells if cell["method"] == method}
        lines.append(
            f"| {method} | "
            + " | ".join(_short(mine.get(column), own) for column in columns)
            + " |"
        )
    return "\n".join(lines)


def _short(cell: dict[str, Any] | None, own: str) -> str:
    if cell is None:
        return ""
    found, paper = cell["accuracy"][cell["score"] + own], cell["paper"]
    beside = f" ({paper['accuracy']:.2f})" if paper else ""
    return f"{100 * found['mean']:.2f}{_half(found)}{beside}"


def _half(found: dict[str, float]) -> str:
    return f" ± {100 * found['interval']:.2f}" if "interval" in found else ""


def _details(cells: Sequence[dict[str, Any]]) -> str:
    there = [key for key in ACCURACIES if any(key in cell["accuracy"] for cell in cells)]
    papers = any(cell["paper"] for cell in cells)
    travels = any("travel" in cell for cell in cells)
    before = [key for key in ACCURACIES if all(key in cell.get("before", {}) for cell in cells)]
    heads = [
        "method",
        *(key.replace("_own", ", own") for key in there),
        *(["prototype, own, without own share"] if travels else []),
        *(f"before round 1: {key.replace('_own', ', own')}" for key in before),
        *(["paper", "difference", "difference, own"] if papers else []),
        "seeds",
        "rounds",
        "to 99%",
        "values a round",
        *(["paper's"] if papers else []),
        "bytes a round",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for cell in cells:
        paper = cell["paper"] or {}
        numbers = [_full(cell["accuracy"].get(key)) for key in there]
        if travels:
            numbers.append(_full(cell.get("travel", {}).get("without_own")))
        numbers += [_full(cell["before"][key]) for key in before]
        if papers:
            numbers += _against(paper) if paper else [""] * 3
        lost = len(cell.get("diverged", []))
        seeds = f"{len(cell['seeds'])} ({lost} diverged)" if lost else str(len(cell["seeds"]))
        numbers += [seeds, str(cell["rounds"]), f"{statistics.fmean(cell['rounds_to_99']):.0f}"]
        numbers.append(f"{cell['communication']['values_per_round']:,.0f}")
        if papers:
            numbers.append(f"{paper['params_per_round']:,}" if paper else "")
        numbers.append(f"{cell['communication']['bytes_up_per_round']:,.0f}")
        lines.append(f"| {cell['method']} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def _against(paper: dict[str, Any]) -> list[str]:
    return [
        f"{paper['accuracy']:.2f}",
        f"{paper['difference']:+.2f}",
        f"{paper['difference_own']:+.2f}",
    ]


def _full(found: dict[str, float] | None) -> str:
    if found is None:
        return "–"
    half = f" [± {100 * found['interval']:.2f}]" if "interval" in found else ""
    return f"{100 * found['mean']:.2f} ± {100 * found['std_clients']:.2f}{half}"


def _partitions(cells: Sequence[dict[str, Any]]) -> str:
    """Of all methods; of one that has another, as the released profile with its own noise, beside it."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for cell in cells:
        for run in cell["runs"]:
            found.setdefault((cell["column"], run["seed"]), {}).setdefault(
                run["partition"][:12], cell["method"]
            )
    return "; ".join(
        f"{column}, seed {seed}: {_stamps(of)}" for (column, seed), of in found.items()
    )


def _stamps(of: dict[str, str]) -> str:
    first, *others = of
    return first + "".join(f" ({of[stamp]}: {stamp})" for stamp in others)
