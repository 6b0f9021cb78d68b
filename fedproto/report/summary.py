"""The summary of a report: its title, its first sentence and the table of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedproto.plots.labels import describe_accuracy, hide_folders, is_own_accuracy, score_name
from fedproto.report.groups import SHOWN_ACCURACIES, Group, list_differences

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
    clients = _count([len(group.first.clients) for group in groups], "client")
    rounds = _count([len(group.first.rounds) for group in groups], "round")
    size = f"{clients}, {rounds}"
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
        f"all classes is that of {label} by the {_name_predictor(name)}, {best_mean:.1%}."
    )


def _count(numbers: Iterable[int], noun: str) -> str:
    """Return the different numbers in ascending order, with their noun: `1 client`, `2 and 3`."""
    distinct = sorted(set(numbers))
    words = join_names(str(number) for number in distinct)
    return f"{words} {noun}" if distinct == [1] else f"{words} {noun}s"


def _describe_group(group: Group, size: str) -> str:
    """Return what a group reached; `size` says how many clients and rounds it has."""
    seeds = ""
    if len(group.runs) > 1:
        seeds = f", {len(group.runs)} seeds"
    reached = []
    for name, mean in _accuracies_over_all_classes(group).items():
        reached.append(f"{mean:.1%} by the {_name_predictor(name)}")
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
        "“Own classes”: scored among the classes the client has; else all classes compete. The "
        "head is the last layer of a client's model; the nearest prototype is the class whose mean "
        "feature vector, averaged over clients, is closest. Values are numbers uploaded in a "
        "round, and MB are those of all rounds, of all clients together. Columns in which all rows "
        "are equal are left out."
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
                f"was chosen by {best.select_by} on validation rows, {best.score:.1%}; the test "
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
    """Return the table of results: accuracies, traffic and time, one row per group.

    Of several rows, columns that say the same in all are left out.
    """
    columns = [("method", [Cell(group.label) for group in groups])]
    for name in _list_table_accuracies(groups):
        cells = [_accuracy_cell(group, name) for group in groups]
        columns.append((f"{describe_accuracy(name)}, %", cells))
    if any(len(group.runs) > 1 for group in groups):
        columns.append(("seeds", [Cell(str(len(group.runs))) for group in groups]))
    optional = {
        "data set": [group.first.dataset for group in groups],
        "clients": [str(len(group.first.clients)) for group in groups],
        "rounds": [str(len(group.first.rounds)) for group in groups],
        "values per round": [
            f"{group.mean(lambda run: run.values_per_round):,.0f}" for group in groups
        ],
        "MB up": [format_megabytes(group.mean(lambda run: run.bytes_up)) for group in groups],
        "MB down": [format_megabytes(group.mean(lambda run: run.bytes_down)) for group in groups],
    }
    for name, texts in optional.items():
        if len(groups) == 1 or len(set(texts)) > 1:
            columns.append((name, [Cell(text) for text in texts]))
    seconds = [Cell(f"{group.mean(lambda run: run.seconds):.1f}") for group in groups]
    columns.append(("seconds", seconds))
    if any(group.first.asynchrony is not None for group in groups):
        columns.append(("simulated time", [_clock_cell(group) for group in groups]))
    rows = [[cells[number] for _, cells in columns] for number in range(len(groups))]
    return Table([name for name, _ in columns], rows)


def _list_table_accuracies(groups: Sequence[Group]) -> list[str]:
    """Return the accuracies that some group has; one among own classes only if it differs."""
    present = set()
    for group in groups:
        present.update(group.accuracies)
    candidates = [name for name in SHOWN_ACCURACIES if name in present]
    return [name for name in candidates if not _is_repeated(name, groups)]


def _is_repeated(name: str, groups: Sequence[Group]) -> bool:
    """Whether an accuracy among own classes is that over all classes, in all groups."""
    if not is_own_accuracy(name):
        return False
    over_all = score_name(name)
    for group in groups:
        if name not in group.accuracies:
            continue
        if over_all not in group.accuracies:
            return False
        if group.mean_accuracy(name) != group.mean_accuracy(over_all):
            return False
    return True


def format_megabytes(count: float) -> str:
    """Return bytes as MB, with one decimal or, below 10 MB, three digits.

    >>> format_megabytes(30_070_080), format_megabytes(90_400), format_megabytes(0)
    ('30.1', '0.0904', '0')
    """
    megabytes = count / 1e6
    return f"{megabytes:,.1f}" if megabytes >= 10 else f"{megabytes:.3g}"


def _clock_cell(group: Group) -> Cell:
    """Return the simulated time of asynchronous rounds, with their staleness as its detail."""
    found = [run.asynchrony for run in group.runs if run.asynchrony is not None]
    if not found:
        return Cell("–")
    clock = fmean(each.clock for each in found)
    staleness = fmean(each.staleness for each in found)
    return Cell(f"{clock:.1f}", f"staleness {staleness:.1f}")


def _accuracy_cell(group: Group, name: str) -> Cell:
    """Return a cell such as `84.7 ± 4.3`, with the deviation over seeds as its detail."""
    if name not in group.accuracies:
        return Cell("–")
    accuracy = group.mean_accuracy(name)
    mean = 100 * accuracy.mean
    std = 100 * (accuracy.std or 0)
    text = f"{mean:.1f} ± {std:.1f}"
    std_over_seeds = group.std_over_seeds(name)
    if std_over_seeds is None:
        return Cell(text)
    return Cell(text, f"seeds ± {100 * std_over_seeds:.1f}")


def make_difference_table(groups: Sequence[Group]) -> Table | None:
    """Return the settings in which groups differ, a column per group; None if there are none."""
    differences = list_differences(groups)
    if not differences:
        return None
    rows = []
    for key, values in differences.items():
        cells = [Cell("–" if value is None else hide_folders(str(value))) for value in values]
        rows.append([Cell(key), *cells])
    return Table(["setting", *(group.label for group in groups)], rows)
