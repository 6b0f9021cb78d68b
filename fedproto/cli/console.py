"""What a person sees: a progress bar with an estimate, then tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedproto.core.rounds import RoundResult
from fedproto.errors import FedProtoError
from fedproto.runs.experiment import OnRound
from fedproto.runs.sweep import Cell, batches


@contextmanager
def progress_bar(console: Console, name: str, done: int, rounds: int) -> Iterator[OnRound]:
    """A bar that counts rounds; evaluated rounds and notes leave a line above it."""
    with _bar(console, "rounds, left") as bar:
        task = bar.add_task(name, total=rounds, completed=done)

        def show(result: RoundResult) -> None:
            bar.update(task, completed=result.round)
            if result.accuracy:
                console.print(_line(name, result), highlight=False, markup=False, soft_wrap=True)
            for note in result.notes:
                console.print(
                    f"round {result.round}: {note}", style="yellow", highlight=False, markup=False
                )

        yield show


@contextmanager
def sweep_bar(
    console: Console, cells: Sequence[Cell], out: Path, broken: list[str] | None = None
) -> Iterator[SweepTeller]:
    """A bar over the rounds of all federations that are not finished yet; `broken` collects those that broke down."""
    todo = [cell for batch in batches(cells, out) for cell, _ in batch]
    with _bar(console, "rounds of all, left") as bar:
        task = bar.add_task("sweep", total=sum(cell.config.rounds for cell in todo))
        yield SweepTeller(console, bar, task, [] if broken is None else broken)


class SweepTeller:
    """Tells a person how a sweep goes."""

    def __init__(self, console: Console, bar: Progress, task: TaskID, broken: list[str]) -> None:
        self.console, self.bar, self.task, self.names_of_broken = console, bar, task, broken

    def batch(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> OnRound:
        many = f"{len(cells)} federations together" if len(cells) > 1 else cells[0].name
        name = f"{cells[0].config.algorithm.name}: {many}"
        self.bar.update(self.task, description=name)
        self._say(f"{name}, from round {done + 1}")
        for notice in notices:
            self._say(notice, "yellow")

        def show(result: RoundResult) -> None:
            self.bar.advance(self.task)
            if result.diverged:
                self._say(f"round {result.round}: {result.notes[-1]}", "red")

        return show

    def broken(self, cell: Cell, error: FedProtoError) -> None:
        self.names_of_broken.append(cell.name)
        self._say(f"{cell.name} broke down: {error}", "red")

    def _say(self, sentence: str, style: str = "") -> None:
        self.console.print(sentence, style=style, highlight=False, markup=False, soft_wrap=True)


def _bar(console: Console, unit: str) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn("spent"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def sweep_table(cells: Sequence[Cell], results: Sequence[dict[str, Any] | None]) -> Table:
    """A row a federation: what it differs in, its mean accuracies, and its share of the seconds of its stack."""
    varied = list(dict.fromkeys(key for cell in cells for key in cell.varied))
    keys = list(dict.fromkeys(key for result in results if result for key in result["accuracy"]))
    table = Table(
        title="mean test accuracy over clients, %", title_justify="left", box=SIMPLE, pad_edge=False
    )
    for header in varied:
        table.add_column(escape(header), overflow="fold")
    for key in keys:
        table.add_column(key.replace("_", "\n"), justify="right")
    table.add_column("share of\nseconds", justify="right")
    for cell, result in zip(cells, results, strict=True):
        if result is None:
            table.add_row(
                *(escape(str(cell.varied.get(key, ""))) for key in varied),
                "broke down",
                style="red",
            )
            continue
        means = [
            _percent(result["accuracy"][key]["mean"]) if key in result["accuracy"] else ""
            for key in keys
        ]
        values = [escape(str(cell.varied.get(key, ""))) for key in varied]
        table.add_row(*values, *means, f"{result['seconds']['total']:.1f}")
    return table


def bench_table(found: dict[str, Any]) -> Table:
    """A row a contender."""
    machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    table = Table(
        title=escape(f"seconds a round; {machine}"),
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
    )
    table.add_column("work")
    table.add_column("contender")
    for header in ("seconds", "times the\nplain loop", "ms a\nclient", "first\nround", "GB"):
        table.add_column(header, justify="right")
    before = None
    for row in found["rows"]:
        work = f"{row['model']}, {row['clients']:,} clients, {row['precision']}, {row['data']}"
        scaled = "" if row["counted"] == row["clients"] else f" (of {row['counted']})"
        numbers = (
            f"{row['seconds']:.4g}",
            "" if row["ratio"] is None else f"{row['ratio']:.1f}",
            f"{1000 * row['seconds'] / row['clients']:.3g}",
            f"{row['start']:.2f}",
            f"{row['memory']:.2f}",
        )
        table.add_row("" if work == before else work, row["contender"] + scaled, *numbers)
        before = work
    return table


def _line(name: str, result: RoundResult) -> str:
    means = {
        key: a["mean"] for key, a in (result.accuracy or {}).items() if not key.endswith("_own")
    }
    accuracies = "  ".join(f"{key} {mean:.1%}" for key, mean in means.items())
    return f"{name} round {result.round:>4}  loss {sum(result.loss.values()):.3f}  accuracy by {accuracies}"


def clients_table(results: Sequence[dict[str, Any]]) -> Table:
    """The clients of one run, or of several runs over the same clients side by side."""
    first = results[0]
    columns = [
        (result, key) for result in results for key in _shown(result, alone=len(results) == 1)
    ]
    title = escape(f"{len(first['clients'])} clients on {first['dataset']}: test accuracy, %")
    table = Table(
        title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
    )
    longest = max(len(client["model"]) for client in first["clients"])
    table.add_column("client", justify="right")
    table.add_column("model", min_width=min(longest, 20))
    table.add_column("classes")
    table.add_column("train", justify="right")
    for result, key in columns:
        table.add_column(
            escape(_header(result, key, alone=len(results) == 1)), justify="right", overflow="fold"
        )
    for number, client in enumerate(first["clients"]):
        cells = [_percent(result["clients"][number]["accuracy"][key]) for result, key in columns]
        names = (
            escape(client["model"]),
            escape(" ".join(client["classes"])),
        )  # a class may be called [a]
        table.add_row(str(client["id"]), *names, str(client["train"]), *cells)
    table.add_section()
    for statistic in ("mean", "std"):
        cells = [_percent(result["accuracy"][key][statistic]) for result, key in columns]
        table.add_row(statistic, "", "", "", *cells, style="bold" if statistic == "mean" else "dim")
    return table


def _shown(result: dict[str, Any], alone: bool) -> list[str]:
    """Side by side there is room for the two ways to predict; the run alone shows the client's own classes too."""
    return [key for key in result["accuracy"] if alone or not key.endswith("_own")]


def _header(result: dict[str, Any], key: str, alone: bool) -> str:
    """In two lines, so that it is no wider than its numbers need."""
    return key.replace("_", "\n") if alone else f"{result['algorithm']}\n{key}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def verdict(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each later run and way to predict: how it compares with the head of the first run."""
    first, *others = results
    sentences = []
    for other in others:
        if [client["model"] for client in other["clients"]] != [
            client["model"] for client in first["clients"]
        ]:
            sentences.append(
                f"{other['algorithm']} has other models than {first['algorithm']}, whose column is shown"
            )
        for key in _shown(other, alone=False):
            pairs = zip(first["clients"], other["clients"], strict=True)
            gains = [100 * (b["accuracy"][key] - a["accuracy"]["head"]) for a, b in pairs]
            sentences.append(
                f"{other['algorithm']} {key} against {first['algorithm']} head: {statistics.fmean(gains):+.1f} points, "
                f"better for {sum(gain > 0 for gain in gains)} of {len(gains)} clients"
            )
    return sentences


def divergence(result: dict[str, Any]) -> str | None:
    """A warning for a run that finished although its loss exploded."""
    exploded = result.get("diverged")
    if not exploded:
        return None
    first = min(exploded, key=lambda each: each["round"])
    return (
        f"warning: {result['algorithm']} diverged: the loss of {len(exploded)} of {len(result['clients'])} clients "
        f"exploded, first that of client {first['client']} in round {first['round']}; its accuracies say little, "
        "and a smaller lr may help"
    )


def traffic(result: dict[str, Any]) -> str:
    sent = result["communication"]
    return (
        f"{result['algorithm']}: {sent['values_per_round']:,.0f} values uploaded a round by all clients, "
        f"{sent['bytes_up']:,} bytes up and {sent['bytes_down']:,} down in {result['rounds']} rounds, "
        f"{result['seconds']['total']:.1f} s"
    )
