"""Runs that differ in nothing but the seed, as groups with a label each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.config.settings import GOVERNED
from fedproto.core.metrics import ACCURACIES
from fedproto.report.read import Run, Spread

#: Settings in which the runs of a group may differ. The stack depends on the memory of the GPU.
IGNORED_SETTINGS = ("seed", "stack")
#: Settings that make up the task.
TASK_SETTINGS = ("dataset", "partition", "clients")


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed, in the order of their seeds."""

    label: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def accuracies(self) -> list[str]:
        """The names of the accuracies that the runs have."""
        return [name for name in ACCURACIES if name in self.first.accuracy]

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
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        compared = {key: run.config[key] for key in run.config if key not in IGNORED_SETTINGS}
        settings = json.dumps(compared, sort_keys=True)
        copy = 0
        while _has_seed(groups.get((settings, copy), []), run.seed):
            copy += 1
        groups.setdefault((settings, copy), []).append(run)
    ordered = [sorted(members, key=lambda run: run.seed) for members in groups.values()]
    labels = _label_runs([members[0] for members in ordered])
    return [Group(label, members) for label, members in zip(labels, ordered, strict=True)]


def _has_seed(runs: Sequence[Run], seed: int) -> bool:
    return any(run.seed == seed for run in runs)


def _label_runs(runs: Sequence[Run]) -> list[str]:
    """Return a distinct label for each run.

    It is the algorithm; if several runs have the same one, also the settings in which they differ;
    and if that is not enough, also the folder.
    """
    labels = []
    for run in runs:
        rivals = [other for other in runs if other.algorithm == run.algorithm]
        labels.append(", ".join([run.algorithm, *_describe_differences(run, rivals)]))
    distinct = []
    for label, run in zip(labels, runs, strict=True):
        is_unique = labels.count(label) == 1
        distinct.append(label if is_unique else f"{label}, {run.path}")
    return distinct


def _describe_differences(run: Run, rivals: Sequence[Run]) -> list[str]:
    """Return the settings in which a run differs from a rival, as `key=value`."""
    varied = []
    for key, value in run.config.items():
        is_varied = any(value != rival.config.get(key) for rival in rivals)
        if is_varied and key not in IGNORED_SETTINGS:
            varied.append(key)
    if "profile" in varied:  # the profile implies the settings that it governs
        varied = [key for key in varied if key not in GOVERNED]
    return [f"{key.rpartition('.')[2]}={run.config[key]}" for key in varied]


def are_comparable(groups: Sequence[Group]) -> bool:
    """Whether accuracies can be compared.

    The groups must share their partitions, or the data set, the kind of partition and the number
    of clients.
    """
    partitions = {tuple(run.partition for run in group.runs) for group in groups}
    if len(partitions) == 1:
        return True
    tasks = {json.dumps(_task_settings(group.first), sort_keys=True) for group in groups}
    return len(tasks) == 1


def _task_settings(run: Run) -> dict[str, Any]:
    keys = [key for key in run.config if key.partition(".")[0] in TASK_SETTINGS]
    return {key: run.config[key] for key in keys}
