"""The numbers that claims are judged by: the JSON files of the targets, as measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.core.files import read_json
from fedproto.errors import RunFolderError
from fedproto.reproduce.statistics import Key, Measurement

Cell = dict[str, Any]
Run = dict[str, Any]
#: A number of one federation, from its cell and its run.
Quantity = Callable[[Cell, Run], float]
MeasuredRuns = dict[Key, Measurement]


@dataclass
class Results:
    """The cells of a target, by method and column.

    Cells and runs are those of tables.py.
    """

    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)

    @classmethod
    def from_cells(cls, cells: Iterable[Cell]) -> Results:
        """Return the cells in which at least one run finished or diverged."""
        kept = {}
        for cell in cells:
            if cell["runs"] or diverged_seeds(cell):
                kept[cell["method"], cell["column"]] = cell
        return cls(kept)

    def methods(self) -> list[str]:
        """Return the names of all methods, in the order of the target's rows."""
        return list(dict.fromkeys(method for method, _ in self.cells))

    def has(self, *methods: str) -> bool:
        """Return whether all these methods were run."""
        return set(methods) <= set(self.methods())

    def columns_of(self, method: str) -> Iterator[tuple[str, Cell]]:
        """Yield each column in which a method was run, with its cell."""
        for (name, column), cell in self.cells.items():
            if name == method:
                yield column, cell

    def measure(self, method: str, quantity: Quantity) -> MeasuredRuns:
        """Return one number per federation, by column and seed; None if the run diverged."""
        measured: MeasuredRuns = {}
        for column, cell in self.columns_of(method):
            for run in cell["runs"]:
                value = quantity(cell, run)
                measured[column, run["seed"]] = Measurement(value)
            for seed in diverged_seeds(cell):
                measured[column, seed] = Measurement(None)
        return measured

    def mean(self, method: str, quantity: Quantity) -> float | None:
        """Return the mean over the federations that finished; None if all of them diverged."""
        measured = self.measure(method, quantity).values()
        values = [each.value for each in measured if each.value is not None]
        return statistics.fmean(values) if values else None


def diverged_seeds(cell: Cell) -> list[int]:
    """Return the seeds whose training ended in numbers that are not finite."""
    return [record["seed"] for record in cell.get("diverged", [])]


# --- reading


def read_results(folder: Path) -> dict[str, Results]:
    """Return the results of all targets in a folder, without quick versions.

    Raises RunFolderError for a JSON file that is not a target's.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if not isinstance(content, dict):
            raise not_a_targets_file(path)
        if "cells" not in content or content.get("quick"):
            continue
        try:
            results[path.stem] = Results.from_cells(content["cells"])
        except (KeyError, TypeError) as error:
            raise not_a_targets_file(path) from error
    return results


def not_a_targets_file(path: Path) -> RunFolderError:
    """Return the error for a JSON file whose content is not what a target writes."""
    return RunFolderError(
        f"{path} is not a file of `fedproto reproduce`: delete it, or make its target again"
    )


# --- quantities


def measure_accuracy(cell: Cell, run: Run, score: str | None = None) -> float:
    """Return the mean accuracy over clients in percent, by what the method predicts with.

    `score` names another accuracy instead.
    """
    return 100 * statistics.fmean(run["accuracy"][score or cell["score"]])


def measure_deviation(cell: Cell, run: Run) -> float:
    """Return the standard deviation over clients of what the method predicts with, in points."""
    return 100 * float(np.std(run["accuracy"][cell["score"]]))


def measure_travel(cell: Cell, run: Run) -> float:
    """Return the accuracy among own classes without the client's own share, in percent."""
    return 100 * statistics.fmean(client["without_own"] for client in run["travel"])


def measure_distance(cell: Cell, run: Run, lam: float) -> float:
    """Return the distance to the prototypes: the last round's regulariser is lambda times it."""
    return run["loss"]["regulariser"] / lam


def measure_before(cell: Cell, run: Run, score: str) -> float:
    """Return the mean accuracy over clients before round 1, in percent."""
    return 100 * statistics.fmean(client[score] for client in run["before"])


def measure_gain(
    table: Results, method: str, before: str, after: str, quantity: Quantity = measure_accuracy
) -> MeasuredRuns:
    """Return what a quantity gains from one column to another, by seed.

    It is unknown where one of the two runs diverged.
    """
    measured = table.measure(method, quantity)
    gains: MeasuredRuns = {}
    for column, seed in measured:
        if column != before or (after, seed) not in measured:
            continue
        old = measured[before, seed].value
        new = measured[after, seed].value
        gain = None if old is None or new is None else new - old
        gains[before, seed] = Measurement(gain)
    return gains


def measure_rounds(table: Results, method: str, goals: dict[Key, float]) -> MeasuredRuns:
    """Return the first evaluated round in which each federation reached its goal.

    A goal is an accuracy, as a fraction. A federation that never reached it needs at least the
    rounds it was given.
    """
    measured: MeasuredRuns = {}
    for column, cell in table.columns_of(method):
        for run in cell["runs"]:
            key = (column, run["seed"])
            if key in goals:
                measured[key] = _first_round(run["curve"], cell["score"], goals[key])
        for seed in diverged_seeds(cell):
            measured[column, seed] = Measurement(None)
    return measured


def _first_round(curve: dict[str, list[Any]], score: str, goal: float) -> Measurement:
    """Return the first evaluated round with an accuracy of at least `goal`.

    If there is none, it is at least the last round.
    """
    for round, value in zip(curve["round"], curve[score], strict=True):
        if value >= goal:
            return Measurement(float(round))
    return Measurement(float(curve["round"][-1]), at_least=True)
