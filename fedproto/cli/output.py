"""How the commands speak. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape as escape_markup

from fedproto.config import plugin_trust

if TYPE_CHECKING:
    from fedproto.runs.experiment import Experiment
    from fedproto.runs.folder import RunFolder


def _trust_files(wanted: bool) -> bool:
    if wanted:
        plugin_trust.trust_files()
    return wanted


def _look_in(folder: Path | None) -> Path | None:
    if folder is not None:
        plugin_trust.look_in(folder)
    return folder


#: Flags of every command that reads files which may name plug-ins. They act when they are read: `cli.options`
#: ends what they allow with the command.
TrustPlugins = Annotated[
    bool,
    typer.Option(
        "--trust-plugins", help="run the code of plug-ins that files name", callback=_trust_files
    ),
]
PluginDir = Annotated[
    Path | None,
    typer.Option(
        help="where plug-ins lie [the current folder]", show_default=False, callback=_look_in
    ),
]


def say(sentence: str, stderr: bool = False) -> None:
    """A line as it is: a path may hold [brackets], and a script wants it unbroken."""
    Console(stderr=stderr).print(sentence, markup=False, highlight=False, soft_wrap=True)


def wide_console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file has no edge to keep clear of
    return console


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    wide_console().print(table, highlight=False)


def escape(text: str) -> str:
    return escape_markup(" ".join(text.split()))


def execute(experiment: Experiment, folder: RunFolder, of: Path) -> dict[str, Any]:
    """Run with a progress bar; Ctrl-C finishes the round and leaves `of`, which may hold more runs, to be resumed."""
    from fedproto.cli.console import progress_bar
    from fedproto.runs.experiment import Interrupted

    config = experiment.config
    try:
        with progress_bar(
            Console(), experiment.algorithm.name, experiment.progress.round, config.rounds
        ) as on_round:
            return experiment.execute(folder, on_round).data
    except Interrupted as stop:
        done = f"{experiment.algorithm.name} stopped after round {experiment.progress.round} of {config.rounds}"
        if stop.__cause__ is not None:
            done = f"{experiment.algorithm.name} stopped: {stop.__cause__}"
        again = "" if config.checkpoint_every else " (from round 1, since checkpoint_every is 0)"
        say(f"{done}; continue with: fedproto resume {of}{again}", stderr=True)
        raise typer.Exit(130) from None


def show(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> None:
    """The contents of some result.json as tables and sentences."""
    from fedproto.cli.console import clients_table, traffic, verdict

    named = [result | {"algorithm": label} for result, label in zip(results, labels, strict=True)]
    wide_console().print(clients_table(named))
    for sentence in verdict(named) + [traffic(each) for each in named]:
        say(sentence)
    warn_of_divergence(named)


def warn_of_divergence(results: Sequence[dict[str, Any]]) -> None:
    """A red line for each run whose loss exploded."""
    from fedproto.cli.console import divergence

    for sentence in filter(None, map(divergence, results)):
        Console().print(sentence, style="bold red", markup=False, highlight=False, soft_wrap=True)
