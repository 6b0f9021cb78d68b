"""The page of a target: its JSON object (tables.py) as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedproto.core.metrics import ACCURACIES
from fedproto.reproduce.markdown import format_columns, format_table

Json = dict[str, Any]

#: Settings that a reader wants to compare with the paper's.
SHOWN_SETTINGS = (
    "clients",
    "shots",
    "batch",
    "lr",
    "momentum",
    "epochs",
    "precision",
    "eval_every",
)

_LEGEND = (
    "Accuracies are in percent: the mean over clients and seeds ± the standard deviation over "
    "clients (mean over seeds) [± the half-width of the 95% interval of the mean over seeds]. "
    "`head` and `prototype` choose among all classes, `own` among the client's own. `difference` "
    "is our accuracy, by what the method predicts with, minus the paper's; `difference, own` is "
    "the same among the client's own classes, which is where the code behind the paper's FedProto "
    "looked for the nearest prototype. `to 99%` is the first evaluated round with 99% of the last "
    "round's accuracy (mean over seeds). Values and bytes are the uploads of all clients per "
    "round. The paper's own ± cannot be compared with ours: the code behind its FedProto did not "
    "reset its counters between clients."
)


def render_page(content: Json) -> str:
    """Return a table of means, then a table per column with everything that was measured."""
    cells = [cell for cell in content["cells"] if cell["runs"]]
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    parts = [f"# {content['title']}"]
    parts.append(_describe_runs(content, cells))
    parts.append(_describe_settings(content))
    if len(columns) > 1:
        parts += _overviews(cells, columns)
    parts.append(_LEGEND)
    for column in columns:
        in_column = [cell for cell in cells if cell["column"] == column]
        parts.append(_section(column, in_column))
    partitions = _list_partitions(cells)
    parts.append(f"Partitions (SHA-256, first 12 digits): {partitions}.")
    return "\n\n".join(parts) + "\n"


# --- the text above the tables


def _describe_runs(content: Json, cells: Sequence[Json]) -> str:
    """Return by which command, with which seeds and on which machines the runs were made."""
    seeds: set[int] = set()
    for cell in cells:
        seeds.update(cell["seeds"])
    seed_list = ", ".join(str(seed) for seed in sorted(seeds))
    machines = ", ".join(content["machines"])
    return (
        f"Seeds {seed_list}, fixed in advance; the last round is reported; nothing was "
        f"selected on test data. Made by `{content['command']}`: {content['seconds']:,.0f} s of "
        f"runs on {machines}."
    )


def _describe_settings(content: Json) -> str:
    """Return what all runs have in common, the spec's note, and which runs have no result."""
    settings = content["settings"]
    shown = ", ".join(f"{key} {settings[key]}" for key in SHOWN_SETTINGS if key in settings)
    parts = [f"Settings of all runs: {shown}."]
    if content["note"]:
        parts.append(content["note"])
    if content["missing"]:
        parts.append(f"**Not run yet:** {', '.join(content['missing'])}.")
    diverged = _describe_diverged(content["cells"])
    if diverged:
        parts.append(diverged)
    return "\n\n".join(parts)


def _describe_diverged(cells: Sequence[Json]) -> str:
    """Return which runs diverged and have no result, and which finished with an exploded loss."""
    without_result = []
    exploded = []
    for cell in cells:
        name = f"{cell['method']} ({cell['column']})"
        records = cell.get("diverged", [])
        without_result += [f"{name}, seed {each['seed']}: {each['reason']}" for each in records]
        exploded += [f"{name}, seed {run['seed']}" for run in cell["runs"] if run.get("diverged")]
    sentences = []
    if without_result:
        listed = "; ".join(without_result)
        sentences.append(f"**Diverged**, so the means below are over the other seeds: {listed}.")
    if exploded:
        listed = "; ".join(exploded)
        sentences.append(f"**The loss exploded**, but the run finished and counts: {listed}.")
    return " ".join(sentences)


def _list_partitions(cells: Sequence[Json]) -> str:
    """Return the hash of each column's and seed's partition.

    Methods share it; a method with a different one, such as the released profile with its own
    noise, is named beside its hash.
    """
    by_run: dict[tuple[str, int], dict[str, str]] = {}
    for cell in cells:
        for run in cell["runs"]:
            methods = by_run.setdefault((cell["column"], run["seed"]), {})
            partition = run["partition"][:12]
            if partition not in methods:
                methods[partition] = cell["method"]
    entries = []
    for (column, seed), methods in by_run.items():
        partitions = _join_partitions(methods)
        entries.append(f"{column}, seed {seed}: {partitions}")
    return "; ".join(entries)


def _join_partitions(methods: dict[str, str]) -> str:
    """Return the shared hash, and the others with the method that has them in parentheses.

    `methods` has the first method of each hash.
    """
    shared, *others = methods
    text = shared
    for partition in others:
        method = methods[partition]
        text += f" ({method}: {partition})"
    return text


# --- tables


def _overviews(cells: Sequence[Json], columns: Sequence[str]) -> list[str]:
    """Return the table of means and, beside the paper, the one among the client's own classes."""
    overviews = [_overview(cells, columns)]
    if any(cell["paper"] for cell in cells):
        overviews.append("The same, choosing only among the client's own classes:")
        overviews.append(_overview(cells, columns, ending="_own"))
    return overviews


def _overview(cells: Sequence[Json], columns: Sequence[str], ending: str = "") -> str:
    """Return a table of methods by columns: the mean accuracy, by what each method predicts with.

    `ending` is "_own" for the accuracy among the client's own classes.
    """
    by_place = {(cell["method"], cell["column"]): cell for cell in cells}
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        row = [method]
        for column in columns:
            cell = by_place.get((method, column))
            row.append(_overview_entry(cell, ending))
        rows.append(row)
    return format_table(["method", *columns], rows)


def _overview_entry(cell: Json | None, ending: str) -> str:
    """Return a mean accuracy with its interval, and the paper's in parentheses.

    The entry is empty where the method was not run in the column.
    """
    if cell is None:
        return ""
    accuracy = cell["accuracy"][cell["score"] + ending]
    entry = _percent(accuracy["mean"])
    if "interval" in accuracy:
        entry += f" ± {_percent(accuracy['interval'])}"
    if cell["paper"]:
        entry += f" ({cell['paper']['accuracy']:.2f})"
    return entry


def _section(column: str, cells: Sequence[Json]) -> str:
    """Return a column's table, with how many classes its clients really had: noise stops at 2."""
    class_counts: list[float] = []
    for cell in cells:
        class_counts += [run["classes"] for run in cell["runs"]]
    classes = statistics.fmean(class_counts)
    return f"## {column} ({classes:.1f} classes per client)\n\n{_details(cells)}"


def _details(cells: Sequence[Json]) -> str:
    """Return a table with a row per method and everything that was measured of it."""
    has_travel = any("travel" in cell for cell in cells)
    has_paper = any(cell["paper"] for cell in cells)
    columns = {"method": [cell["method"] for cell in cells]}
    for score in _measured_scores(cells):
        columns[_score_title(score)] = _accuracy_entries(cells, "accuracy", score)
    if has_travel:
        title = "prototype, own, without own share"
        columns[title] = _accuracy_entries(cells, "travel", "without_own")
    for score in _scores_before_training(cells):
        title = f"before round 1: {_score_title(score)}"
        columns[title] = _accuracy_entries(cells, "before", score)
    if has_paper:
        columns["paper"] = _paper_entries(cells, "accuracy", ".2f")
        columns["difference"] = _paper_entries(cells, "difference", "+.2f")
        columns["difference, own"] = _paper_entries(cells, "difference_own", "+.2f")
    columns["seeds"] = [_seeds_entry(cell) for cell in cells]
    columns["rounds"] = [str(cell["rounds"]) for cell in cells]
    columns["to 99%"] = [_close_entry(cell) for cell in cells]
    columns["values per round"] = _traffic_entries(cells, "values_per_round")
    if has_paper:
        columns["paper's values per round"] = _paper_entries(cells, "params_per_round", ",")
    columns["bytes per round"] = _traffic_entries(cells, "bytes_up_per_round")
    return format_columns(columns)


def _measured_scores(cells: Sequence[Json]) -> list[str]:
    """Return the accuracies that at least one cell has, in their usual order; then others."""
    measured: dict[str, None] = {}
    for cell in cells:
        measured |= dict.fromkeys(cell["accuracy"])
    usual = [score for score in ACCURACIES if score in measured]
    return usual + [score for score in measured if score not in ACCURACIES]


def _scores_before_training(cells: Sequence[Json]) -> list[str]:
    """Return the accuracies that all cells have from before round 1, in their usual order."""
    measured = set(ACCURACIES)
    for cell in cells:
        measured &= set(cell.get("before", {}))
    return [score for score in ACCURACIES if score in measured]


def _score_title(score: str) -> str:
    return score.replace("_own", ", own")


def _accuracy_entries(cells: Sequence[Json], group: str, name: str) -> list[str]:
    """Return an accuracy of each cell, from its `accuracy` or from a probe."""
    return [_accuracy_entry(cell.get(group, {}).get(name)) for cell in cells]


def _accuracy_entry(accuracy: dict[str, float] | None) -> str:
    """Return a mean ± the deviation over clients [± the half-width of the interval]."""
    if accuracy is None:
        return "–"
    mean = _percent(accuracy["mean"])
    deviation = _percent(accuracy["std_clients"])
    entry = f"{mean} ± {deviation}"
    if "interval" in accuracy:
        interval = _percent(accuracy["interval"])
        entry += f" [± {interval}]"
    return entry


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def _paper_entries(cells: Sequence[Json], name: str, number_format: str) -> list[str]:
    """Return a number of the paper's row for each cell; nothing where the paper has no row."""
    entries = []
    for cell in cells:
        paper = cell["paper"]
        entries.append(format(paper[name], number_format) if paper else "")
    return entries


def _traffic_entries(cells: Sequence[Json], name: str) -> list[str]:
    return [f"{cell['communication'][name]:,.0f}" for cell in cells]


def _close_entry(cell: Json) -> str:
    """Return the first round with 99% of the last accuracy, as the mean over seeds."""
    mean = statistics.fmean(cell["rounds_to_99"])
    return f"{mean:.0f}"


def _seeds_entry(cell: Json) -> str:
    """Return the number of seeds that finished, and of those that diverged."""
    seeds = len(cell["seeds"])
    diverged = len(cell.get("diverged", []))
    if diverged:
        return f"{seeds} ({diverged} diverged)"
    return str(seeds)
