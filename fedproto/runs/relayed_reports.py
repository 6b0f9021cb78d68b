"""The progress of runs that are trained in another process, told to the reporter of this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedproto.core.rounds import RoundResult
from fedproto.runs.workers import Worker, make_portable

if TYPE_CHECKING:
    from fedproto.runs.execution import OnRound

#: The report of one round; all others are calls of the reporter's method of that name.
ROUND = "round"


class SentReports:
    """A reporter in a worker: it sends what it is told to the process that waits."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def batch(self, *arguments: Any) -> OnRound:
        """Send that cells are trained together; return what sends the result of each round."""
        self.worker.report(("batch", arguments))
        return self._round

    def _round(self, result: RoundResult) -> None:
        self.worker.report((ROUND, replace(result, clients=None)))

    def broken(self, cell: Any, error: Exception) -> None:
        """Send that the training of a cell broke down."""
        self.worker.report(("broken", (cell, make_portable(error))))

    def rung(self, *arguments: Any) -> None:
        """Send that candidates of a search are trained up to a round."""
        self.worker.report(("rung", arguments))


class ReceivedReports:
    """What calls a reporter with the reports of several tasks."""

    def __init__(self, methods: dict[str, Callable[..., Any]]) -> None:
        self.methods = methods
        self.on_round: dict[int, OnRound] = {}

    def __call__(self, number: int, report: tuple[str, Any]) -> None:
        """Pass on a report of a task."""
        kind, content = report
        if kind == ROUND:
            self.on_round[number](content)
            return
        returned = self.methods[kind](*content)
        if kind == "batch":
            self.on_round[number] = returned
