"""Runs that differ in nothing but the seed, as groups with a label each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.config.settings import GOVERNED
from fedproto.core.metrics import ACCURACIES
from fedproto.plots.colours import look_of_method
from fedproto.report.read import Run, Spread
from fedproto.watch.freeze import name_folders

#: Settings in which the runs of a group may differ. The stack depends on the memory of the GPU.
IGNORED_SETTINGS = ("seed", "stack")
#: Settings that make up the task.
TASK_SETTINGS = ("dataset", "partition", "clients")
#: What a label names of the settings in which runs of one method differ.
MAX_NAMED_DIFFERENCES = 2
MAX_DIFFERENCE_LETTERS = 40
#: The accuracies that tables and figures show, in their order.
SHOWN_ACCURACIES = (
    *ACCURACIES,
    "teacher",
    "teacher_own",
    "head+teacher",
    "head+teacher_own",
    "both+teacher",
    "both+teacher_own",
)


def list_shown_accuracies(present: Collection[str]) -> list[str]:
    """Return the accuracies of a run that tables and figures show, of those present.

    Of the sums with a teacher only the one that has the most opinions is shown; the table of
    metrics has all.

    >>> list_shown_accuracies(["both+teacher", "head+teacher", "teacher", "both", "head"])
    ['head', 'both', 'teacher', 'both+teacher']
    """
    left_out = "head+teacher" if "both+teacher" in present else "both+teacher"
    hidden = (left_out, f"{left_out}_own")
    return [name for name in SHOWN_ACCURACIES if name in present and name not in hidden]


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed, in the order of their seeds."""

    label: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        """The run of the smallest seed, for what is shown of one seed only."""
        return self.runs[0]

    @property
    def colour(self) -> str:
        """The colour of the method, the same on all pages."""
        return look_of_method(self.first.algorithm).colour

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, in ascending order."""
        return [run.seed for run in self.runs]

    @property
    def accuracies(self) -> list[str]:
        """The names of the accuracies that the runs have."""
        return list_shown_accuracies(self.first.accuracy)

    def mean(self, value: Callable[[Run], float]) -> float:
        """Return the mean of a number over the seeds."""
        return statistics.fmean(value(run) for run in self.runs)

    def mean_accuracy(self, name: str) -> Spread:
        """Return the mean over seeds of the mean and of the deviation over clients."""
        return mean_of([run.accuracy[name] for run in self.runs])

    def std_over_seeds(self, name: str) -> float | None:
        """Return the sample standard deviation of the seeds' means; None for a single seed."""
        if len(self.runs) == 1:
            return None
        return statistics.stdev(run.accuracy[name].mean for run in self.runs)


def mean_of(spreads: Sequence[Spread]) -> Spread:
    """Return the mean of the means and of the deviations; no deviation if one is missing."""
    mean = statistics.fmean(spread.mean for spread in spreads)
    deviations = [spread.std for spread in spreads if spread.std is not None]
    if len(deviations) < len(spreads):
        return Spread(mean, None)
    return Spread(mean, statistics.fmean(deviations))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in nothing but the seed, in the order of their first runs.

    A second run with the same settings and the same seed starts a group of its own.
    """
    runs_by_key: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        settings = _write_settings(run)
        copy = 0
        while _has_seed(runs_by_key.get((settings, copy), []), run.seed):
            copy += 1
        runs_by_key.setdefault((settings, copy), []).append(run)
    groups = []
    first_runs = []
    for grouped in runs_by_key.values():
        grouped.sort(key=lambda run: run.seed)
        groups.append(grouped)
        first_runs.append(grouped[0])
    labels = _label_runs(first_runs)
    return [Group(label, grouped) for label, grouped in zip(labels, groups, strict=True)]


def _write_settings(run: Run) -> str:
    """Return the settings that the runs of a group share, as text."""
    compared = {key: run.config[key] for key in run.config if key not in IGNORED_SETTINGS}
    return json.dumps(compared, sort_keys=True)


def _has_seed(runs: Sequence[Run], seed: int) -> bool:
    """Whether one of the runs has this seed."""
    return any(run.seed == seed for run in runs)


def _label_runs(runs: Sequence[Run]) -> list[str]:
    """Return a distinct label for each run.

    It is the algorithm; if several runs have the same one, also the one or two short settings in
    which they differ, or else the folder. `list_differences` has all settings.
    """
    folders = name_folders([run.path for run in runs])
    labels = []
    for run, folder in zip(runs, folders, strict=True):
        rivals = [other for other in runs if other.algorithm == run.algorithm]
        differences = _describe_differences(run, rivals)
        text = ", ".join(differences)
        if len(differences) > MAX_NAMED_DIFFERENCES or len(text) > MAX_DIFFERENCE_LETTERS:
            text = folder
        labels.append(f"{run.algorithm}, {text}" if text else run.algorithm)
    distinct_labels = []
    for label, folder in zip(labels, folders, strict=True):
        if labels.count(label) > 1:
            label = f"{label}, {folder}"
        distinct_labels.append(label)
    return distinct_labels


def list_differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the settings in which groups differ: a value per group, None where there is none."""
    keys: dict[str, None] = {}
    for group in groups:
        keys |= dict.fromkeys(group.first.config)
    differences = {}
    for key in keys:
        values = [group.first.config.get(key) for group in groups]
        is_varied = any(value != values[0] for value in values)
        if is_varied and key not in IGNORED_SETTINGS:
            differences[key] = values
    return differences


def _describe_differences(run: Run, rivals: Sequence[Run]) -> list[str]:
    """Return the settings in which a run differs from a rival, as `key=value`."""
    varied = []
    for key, value in run.config.items():
        is_varied = any(value != rival.config.get(key) for rival in rivals)
        if is_varied and key not in IGNORED_SETTINGS:
            varied.append(key)
    if "profile" in varied:  # the profile implies the settings that it governs
        varied = [key for key in varied if key not in GOVERNED]
    differences = []
    for key in varied:
        short_key = key.rpartition(".")[2]
        differences.append(f"{short_key}={run.config[key]}")
    return differences


def are_comparable(groups: Sequence[Group]) -> bool:
    """Whether accuracies can be compared.

    The groups must share their partitions, or the data set, the kind of partition and the number
    of clients.
    """
    first = groups[0]
    first_partitions = _list_partitions(first)
    if all(_list_partitions(group) == first_partitions for group in groups):
        return True
    first_task = _task_settings(first.first)
    return all(_task_settings(group.first) == first_task for group in groups)


def _list_partitions(group: Group) -> list[str]:
    """Return the hashes of the runs' partitions, in the order of their seeds."""
    return [run.partition for run in group.runs]


def _task_settings(run: Run) -> dict[str, Any]:
    """Return the settings of data set, partition and clients, with their options."""
    keys = [key for key in run.config if key.partition(".")[0] in TASK_SETTINGS]
    return {key: run.config[key] for key in keys}
