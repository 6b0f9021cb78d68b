"""Progress bars with an estimate of the time left, for a run and for a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from fedproto.cli.volume import is_verbose
from fedproto.errors import FedProtoError

if TYPE_CHECKING:
    from fedproto.core.rounds import RoundResult
    from fedproto.deploy.flower_runs import Rounds
    from fedproto.runs.execution import OnRound
    from fedproto.runs.sweep import Cell

#: Characters of what is trained, beside the bar.
MAX_NAME_WIDTH = 20


@contextmanager
def progress_bar(
    console: Console, name: str, done: int, rounds: int, unit: str = "round"
) -> Iterator[OnRound]:
    """Yield a function that is called with each round's result and moves a bar over the rounds.

    Evaluated rounds and notes leave a line above the bar. `unit` is what a round is called.
    """
    from fedproto.runs.announcements import describe_round

    with _bar(console, f"{unit}s, left") as bar:
        task = bar.add_task(name, total=rounds, completed=done)

        def show(result: RoundResult) -> None:
            bar.update(task, completed=result.round)
            if result.accuracy or result.validation or is_verbose():
                _print(console, describe_round(name, unit, result))
            for note in result.notes:
                _print(console, f"{unit} {result.round}: {note}", "yellow")

        yield show


@contextmanager
def file_bar(console: Console, files: int) -> Iterator[Callable[[], None]]:
    """Yield a function that is called after each file and moves a bar over them."""
    with _bar(console, "files, left") as bar:
        task = bar.add_task("classifying", total=files)
        yield lambda: bar.advance(task)


@contextmanager
def deployed_bar(console: Console) -> Iterator[Callable[[str, Rounds | None], None]]:
    """Yield a function that prints a line of a server's log, and moves a bar over the rounds.

    It is given what the line says of the rounds, if anything. An estimate of the time left follows
    the lines that end a round.
    """
    seen: list[tuple[float, int]] = []
    with _bar(console, "rounds, left") as bar:
        task = bar.add_task("federation", total=None)

        def show(text: str, rounds: Rounds | None) -> None:
            estimate = ""
            if rounds is not None:
                bar.update(task, completed=rounds.done, total=rounds.total or bar.tasks[0].total)
                seen.append((time.monotonic(), rounds.done))
                estimate = estimate_rest(seen[0], seen[-1], bar.tasks[0].total)
            _print(console, f"{text} ({estimate})" if estimate else text)

        yield show


def estimate_rest(first: tuple[float, int], last: tuple[float, int], total: float | None) -> str:
    """Return how long the remaining rounds take if they take as long as those that were seen."""
    rounds = last[1] - first[1]
    if rounds < 1 or total is None or last[1] >= total:
        return ""
    seconds = (last[0] - first[0]) / rounds * (total - last[1])
    return f"about {seconds:.0f} s left" if seconds < 120 else f"about {seconds / 60:.0f} min left"


@contextmanager
def sweep_bar(
    console: Console, cells: Sequence[Cell], out: Path, broken: list[str] | None = None
) -> Iterator[SweepProgress]:
    """Yield what shows the progress of a sweep: a bar over the rounds of all unfinished cells.

    The names of cells that break down are added to `broken`.
    """
    from fedproto.runs.sweep import batches

    rounds = 0
    for batch in batches(cells, out):
        for cell, _ in batch:
            rounds += cell.config.rounds
    with _bar(console, "rounds of all, left") as bar:
        task = bar.add_task("sweep", total=rounds)
        yield SweepProgress(console, bar, task, [] if broken is None else broken)


class SweepProgress:
    """Shows how a sweep proceeds."""

    def __init__(self, console: Console, bar: Progress, task: TaskID, broken: list[str]) -> None:
        self.console = console
        self.bar = bar
        self.task = task
        self.names_of_broken = broken

    def batch(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> OnRound:
        """Announce cells that are trained together; return what is called after each round."""
        what = cells[0].name if len(cells) == 1 else f"{len(cells)} federations together"
        name = f"{cells[0].config.algorithm.name}: {what}"
        self.bar.update(self.task, description=name)
        _print(self.console, f"{name}, from round {done + 1}")
        for notice in notices:
            _print(self.console, notice, "yellow")

        def show(result: RoundResult) -> None:
            self.bar.advance(self.task)
            if result.diverged:
                _print(self.console, f"round {result.round}: {result.notes[-1]}", "red")

        return show

    def broken(self, cell: Cell, error: FedProtoError) -> None:
        """Report a cell that broke down."""
        self.names_of_broken.append(cell.name)
        _print(self.console, f"{cell.name} broke down: {error}", "red")


@contextmanager
def search_bar(console: Console) -> Iterator[SearchProgress]:
    """Yield what shows the progress of a search: a bar over the rounds of all its candidates."""
    with _bar(console, "rounds of all, left") as bar:
        task = bar.add_task("tune", total=None)
        yield SearchProgress(console, bar, task, [])


class SearchProgress(SweepProgress):
    """Shows how a search proceeds."""

    def rung(self, candidates: int, until: int, rounds_left: int) -> None:
        """Announce that so many candidates are trained up to a round."""
        done = self.bar.tasks[0].completed
        self.bar.update(self.task, total=done + rounds_left)
        noun = "candidate" if candidates == 1 else "candidates"
        _print(self.console, f"{candidates} {noun} up to round {until}")


def _bar(console: Console, unit: str) -> Progress:
    # So that 80 columns are enough for the numbers of rounds and seconds.
    name_column = Column(no_wrap=True, overflow="ellipsis", max_width=MAX_NAME_WIDTH)
    columns = (
        TextColumn("{task.description}", markup=False, table_column=name_column),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn("spent"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(console: Console, sentence: str, style: str = "") -> None:
    console.print(sentence, style=style, highlight=False, markup=False, soft_wrap=True)
