"""The summary of a report: its title, its first sentence and the table of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedproto.plots.labels import describe_accuracy, is_own_accuracy
from fedproto.report.groups import SHOWN_ACCURACIES, Group

MAX_NAMED_ALGORITHMS = 4
MAX_NAMED_DATASETS = 3


def join_names(names: Iterable[str]) -> str:
    """Return names as a list in words.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


# --- sentences


def title_groups(groups: Sequence[Group]) -> str:
    """Return the title of a report, such as `local and fedproto on digits`."""
    algorithms = [group.first.algorithm for group in groups]
    datasets = [group.first.dataset for group in groups]
    methods = _name_or_count(algorithms, MAX_NAMED_ALGORITHMS, "methods")
    data = _name_or_count(datasets, MAX_NAMED_DATASETS, "data sets")
    return f"{methods} on {data}"


def _name_or_count(names: Sequence[str], max_named: int, noun: str) -> str:
    """Return the different names, or only their number if they are too many."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) > max_named:
        return f"{len(distinct)} {noun}"
    return join_names(distinct)


def describe_groups(groups: Sequence[Group]) -> str:
    """Return one sentence: what a single group reached, or which of several groups is best."""
    clients = _join_distinct(len(group.first.clients) for group in groups)
    rounds = _join_distinct(len(group.first.rounds) for group in groups)
    size = f"{clients} clients, {rounds} rounds"
    if len(groups) == 1:
        return _describe_group(groups[0], size)
    ranking = []
    for group in groups:
        for name, mean in _accuracies_over_all_classes(group).items():
            ranking.append((mean, group.label, name))
    best_mean, label, name = max(ranking)
    run_count = sum(len(group.runs) for group in groups)
    return (
        f"{len(groups)} configurations ({run_count} runs), {size}: the highest mean accuracy over "
        f"all classes is that of {label} by the {_name_predictor(name)}, {best_mean:.2%}."
    )


def _join_distinct(numbers: Iterable[int]) -> str:
    """Return the different numbers in ascending order, as a list in words."""
    return join_names(str(number) for number in sorted(set(numbers)))


def _describe_group(group: Group, size: str) -> str:
    """Return what a group reached; `size` says how many clients and rounds it has."""
    seeds = ""
    if len(group.runs) > 1:
        seeds = f", {len(group.runs)} seeds"
    reached = []
    for name, mean in _accuracies_over_all_classes(group).items():
        reached.append(f"{mean:.2%} by the {_name_predictor(name)}")
    return f"{size}{seeds}: {join_names(reached)} over all classes, mean over clients."


def _accuracies_over_all_classes(group: Group) -> dict[str, float]:
    """Return the mean of each accuracy that chooses among all classes."""
    names = [name for name in group.accuracies if not is_own_accuracy(name)]
    return {name: group.mean_accuracy(name).mean for name in names}


def _name_predictor(accuracy: str) -> str:
    """Return what predicts, in words that follow `by the`."""
    names = {
        "prototype": "nearest prototype",
        "both": "sum of both",
        "head+teacher": "sum of head and teacher",
        "both+teacher": "sum of all three",
    }
    return names.get(accuracy, accuracy)


def explain_table(groups: Sequence[Group]) -> list[str]:
    """Return sentences on how to read the table, and a warning for each run that diverged."""
    has_validation = any(group.first.validation is not None for group in groups)
    when = "on test rows after the best round" if has_validation else "after the last round"
    notes = [f"Accuracies are in %, mean over clients ± standard deviation over clients, {when}."]
    notes += _describe_validation(groups)
    notes += _describe_gains(groups)
    if any(len(group.runs) > 1 for group in groups):
        notes.append(
            "Runs that differ in nothing but the seed share a row: everything in it is the mean "
            "over their seeds; “seeds ±” is the standard deviation of the mean over them."
        )
    notes.append(
        "“Own classes”: scored among the classes the client has; else all classes compete. Values "
        "uploaded in a round, and bytes in all rounds, are those of all clients together."
    )
    return notes + _warn_of_divergence(groups)


def _describe_validation(groups: Sequence[Group]) -> list[str]:
    """Return a sentence for each run whose best round validation rows chose."""
    sentences = []
    for group in groups:
        for run in group.runs:
            if run.validation is None:
                continue
            best = run.validation
            sentences.append(
                f"{group.label} with seed {run.seed}: round {best.best_round} of {len(run.rounds)} "
                f"was chosen by {best.select_by} on validation rows, {best.score:.2%}; the test "
                "rows were looked at once, at the end."
            )
    return sentences


def _describe_gains(groups: Sequence[Group]) -> list[str]:
    """Return a sentence for each newcomer: what joining gained it against training alone."""
    sentences = []
    for group in groups:
        for run in group.runs:
            if run.gain is None:
                continue
            sentences.append(f"{group.label} with seed {run.seed}: {run.gain.describe()}.")
    return sentences


def _warn_of_divergence(groups: Sequence[Group]) -> list[str]:
    """Return a sentence for each run in which the loss of clients exploded."""
    warnings = []
    for group in groups:
        for run in group.runs:
            if not run.diverged:
                continue
            clients = f"{run.diverged} of {len(run.clients)} clients"
            warnings.append(
                f"Warning: {group.label} with seed {run.seed} diverged: the loss of {clients} "
                "exploded, so its accuracies say little."
            )
    return warnings


# --- the table


@dataclass(frozen=True)
class Cell:
    """A cell of the table, with a detail that goes below it."""

    text: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """A header and one row per group, all as text."""

    header: list[str]
    rows: list[list[Cell]]


def make_table(groups: Sequence[Group]) -> Table:
    """Return the table of results: accuracies, traffic and time, one row per group."""
    present = set()
    for group in groups:
        present.update(group.accuracies)
    accuracies = [name for name in SHOWN_ACCURACIES if name in present]
    has_seeds = any(len(group.runs) > 1 for group in groups)
    header = ["method", "data set"]
    if has_seeds:
        header.append("seeds")
    header += ["clients", "rounds"]
    header += [f"{describe_accuracy(name)}, %" for name in accuracies]
    header += ["values per round", "bytes up", "bytes down", "seconds"]
    rows = [_make_row(group, accuracies, has_seeds) for group in groups]
    if any(group.first.asynchrony is not None for group in groups):
        header.append("simulated time")
        for row, group in zip(rows, groups, strict=True):
            row.append(_clock_cell(group))
    return Table(header, rows)


def _make_row(group: Group, accuracies: Sequence[str], has_seeds: bool) -> list[Cell]:
    """Return the cells of a group, in the order of the header."""
    run = group.first
    cells = [Cell(group.label), Cell(run.dataset)]
    sizes = [len(run.clients), len(run.rounds)]
    if has_seeds:
        sizes.insert(0, len(group.runs))
    cells += [Cell(str(size)) for size in sizes]
    cells += [_accuracy_cell(group, name) for name in accuracies]
    traffic = [
        group.mean(lambda run: run.values_per_round),
        group.mean(lambda run: run.bytes_up),
        group.mean(lambda run: run.bytes_down),
    ]
    cells += [Cell(f"{mean:,.0f}") for mean in traffic]
    seconds = group.mean(lambda run: run.seconds)
    cells.append(Cell(f"{seconds:.1f}"))
    return cells


def _clock_cell(group: Group) -> Cell:
    """Return the simulated time of asynchronous rounds, with their staleness as its detail."""
    found = [run.asynchrony for run in group.runs if run.asynchrony is not None]
    if not found:
        return Cell("–")
    clock = fmean(each.clock for each in found)
    staleness = fmean(each.staleness for each in found)
    return Cell(f"{clock:.1f}", f"staleness {staleness:.1f}")


def _accuracy_cell(group: Group, name: str) -> Cell:
    """Return a cell such as `84.72 ± 4.30`, with the deviation over seeds as its detail."""
    if name not in group.accuracies:
        return Cell("–")
    accuracy = group.mean_accuracy(name)
    mean = 100 * accuracy.mean
    std = 100 * (accuracy.std or 0)
    text = f"{mean:.2f} ± {std:.2f}"
    std_over_seeds = group.std_over_seeds(name)
    if std_over_seeds is None:
        return Cell(text)
    return Cell(text, f"seeds ± {100 * std_over_seeds:.2f}")
