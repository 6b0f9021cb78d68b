"""The page of a target: its JSON object (tables.py) as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedproto.core.metrics import ACCURACIES

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
    "Accuracies in percent, mean over clients and seeds ± the deviation over clients (mean of the "
    "seeds') [± the half-width of the 95% interval of the mean over seeds]. `head` and `prototype` "
    "choose among all classes, `own` among the client's own. `difference` is ours, by what the "
    "method predicts with, minus the paper's; `difference, own` is that among the client's own "
    "classes, where the code that made the paper's FedProto looked for the nearest prototype. "
    "`to 99%` is the first evaluated round with 99% of the last round's accuracy, mean over seeds. "
    "Values and bytes are uploads of all clients in a round. The paper's own ± cannot be compared "
    "with ours: the code that made FedProto's did not reset its counters between clients."
)


def render_page(content: Json) -> str:
    """Return a table of means, then a table per column with everything that was measured."""
    cells = [cell for cell in content["cells"] if cell["runs"]]
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    parts = [f"# {content['title']}", _describe_runs(content, cells), _describe_settings(content)]
    if len(columns) > 1:
        parts += _overviews(cells, columns)
    parts.append(_LEGEND)
    for column in columns:
        parts.append(_section(column, [cell for cell in cells if cell["column"] == column]))
    parts.append(f"Partitions (SHA-256, first 12 digits): {_list_partitions(cells)}.")
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
        f"Seeds {seed_list}, fixed before looking; the last round is reported; nothing was "
        f"selected on test data. Made by `{content['command']}`: {content['seconds']:,.0f} s of "
        f"runs on {machines}."
    )


def _describe_settings(content: Json) -> str:
    """Return what all runs have in common, the spec's note, and which runs have no result."""
    settings = content["settings"]
    shown = ", ".join(f"{key} {settings[key]}" for key in SHOWN_SETTINGS if key in settings)
    parts = [f"Of all runs: {shown}."]
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
        sentences.append(f"**Diverged**, so the means below are of the other seeds: {listed}.")
    if exploded:
        listed = "; ".join(exploded)
        sentences.append(f"**The loss exploded**, but the run finished and counts: {listed}.")
    return " ".join(sentences)


def _list_partitions(cells: Sequence[Json]) -> str:
    """Return the hash of each column's and seed's partition.

    Methods share it; a method with a different one, such as the released profile with its own
    noise, is named beside its hash.
    """
    methods_by_hash: dict[tuple[str, int], dict[str, str]] = {}
    for cell in cells:
        for run in cell["runs"]:
            methods = methods_by_hash.setdefault((cell["column"], run["seed"]), {})
            methods.setdefault(run["partition"][:12], cell["method"])
    entries = []
    for (column, seed), methods in methods_by_hash.items():
        shared, *others = methods
        entry = f"{column}, seed {seed}: {shared}"
        for other in others:
            entry += f" ({methods[other]}: {other})"
        entries.append(entry)
    return "; ".join(entries)


# --- tables


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


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
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        by_column = {cell["column"]: cell for cell in cells if cell["method"] == method}
        entries = [_overview_entry(by_column.get(column), ending) for column in columns]
        rows.append([method, *entries])
    return _markdown_table(["method", *columns], rows)


def _overview_entry(cell: Json | None, ending: str) -> str:
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
    return f"## {column} ({classes:.1f} classes a client)\n\n{_details(cells)}"


def _details(cells: Sequence[Json]) -> str:
    """Return a table with a row per method and everything that was measured of it."""
    scores = _measured_scores(cells)
    before = _scores_before_training(cells)
    has_travel = any("travel" in cell for cell in cells)
    has_paper = any(cell["paper"] for cell in cells)

    header = ["method"]
    header += [_score_title(score) for score in scores]
    if has_travel:
        header.append("prototype, own, without own share")
    header += [f"before round 1: {_score_title(score)}" for score in before]
    if has_paper:
        header += ["paper", "difference", "difference, own"]
    header += ["seeds", "rounds", "to 99%", "values a round"]
    if has_paper:
        header.append("paper's")
    header.append("bytes a round")

    rows = []
    for cell in cells:
        row = [cell["method"]]
        row += [_accuracy_entry(cell["accuracy"].get(score)) for score in scores]
        if has_travel:
            row.append(_accuracy_entry(cell.get("travel", {}).get("without_own")))
        row += [_accuracy_entry(cell["before"][score]) for score in before]
        if has_paper:
            row += _difference_entries(cell["paper"])
        row += [_seeds_entry(cell), str(cell["rounds"])]
        row.append(f"{statistics.fmean(cell['rounds_to_99']):.0f}")
        row.append(f"{cell['communication']['values_per_round']:,.0f}")
        if has_paper:
            row.append(f"{cell['paper']['params_per_round']:,}" if cell["paper"] else "")
        row.append(f"{cell['communication']['bytes_up_per_round']:,.0f}")
        rows.append(row)
    return _markdown_table(header, rows)


def _measured_scores(cells: Sequence[Json]) -> list[str]:
    """Return the accuracies that at least one cell has, in their usual order."""
    measured: set[str] = set()
    for cell in cells:
        measured.update(cell["accuracy"])
    return [score for score in ACCURACIES if score in measured]


def _scores_before_training(cells: Sequence[Json]) -> list[str]:
    """Return the accuracies that all cells have from before round 1, in their usual order."""
    measured = set(ACCURACIES)
    for cell in cells:
        measured &= set(cell.get("before", {}))
    return [score for score in ACCURACIES if score in measured]


def _score_title(score: str) -> str:
    return score.replace("_own", ", own")


def _accuracy_entry(accuracy: dict[str, float] | None) -> str:
    if accuracy is None:
        return "–"
    entry = f"{_percent(accuracy['mean'])} ± {_percent(accuracy['std_clients'])}"
    if "interval" in accuracy:
        entry += f" [± {_percent(accuracy['interval'])}]"
    return entry


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def _difference_entries(paper: Json | None) -> list[str]:
    """Return the paper's accuracy and our two differences to it."""
    if not paper:
        return ["", "", ""]
    return [
        f"{paper['accuracy']:.2f}",
        f"{paper['difference']:+.2f}",
        f"{paper['difference_own']:+.2f}",
    ]


def _seeds_entry(cell: Json) -> str:
    seeds = len(cell["seeds"])
    diverged = len(cell.get("diverged", []))
    if diverged:
        return f"{seeds} ({diverged} diverged)"
    return str(seeds)
