"""What the commands print. Nothing heavy is imported at the top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape as escape_markup

from fedproto.cli.volume import is_quiet

if TYPE_CHECKING:
    from fedproto.runs.experiment import Experiment
    from fedproto.runs.folder import RunFolder

#: Columns of a table that is printed to a file, which has no edge to keep clear of.
COLUMNS_OF_A_FILE = 200


def say(sentence: str, *, style: str = "", stderr: bool = False) -> None:
    """Print a line as it is: paths may hold [brackets], and scripts want lines unbroken.

    With --quiet, only lines for stderr and warnings, which have a style, are printed, all there.
    """
    if is_quiet():
        if not style and not stderr:
            return
        stderr = True
    console = Console(stderr=stderr)
    console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)


def wide_console() -> Console:
    """Return a console that does not break lines of a usual width when it prints to a file."""
    console = Console()
    if not console.is_terminal:
        console.width = COLUMNS_OF_A_FILE
    return console


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of plain text under their headers; what is too wide follows below."""
    from fedproto.cli.fitted_tables import TextColumn, fit_tables

    columns = []
    for place, header in enumerate(headers):
        cells = [" ".join(row[place].split()) for row in rows]
        columns.append(TextColumn(header, cells))
    console = wide_console()
    for table in fit_tables(columns, console.width):
        console.print(table, highlight=False)


def print_json_lines(objects: Sequence[dict[str, Any]]) -> None:
    """Print one JSON object per line."""
    from json import dumps

    for each in objects:
        typer.echo(dumps(each))


def escape(text: str) -> str:
    """Return text on one line, without what rich takes for markup."""
    one_line = " ".join(text.split())
    return escape_markup(one_line)


def execute(experiment: Experiment, folder: RunFolder, resumable: Path) -> dict[str, Any]:
    """Run an experiment with a progress bar and return the contents of its result.json.

    Ctrl-C finishes the round, says how to resume `resumable` (the run folder, or a folder with
    several runs that includes it), and exits with code 130.
    """
    from fedproto.cli.progress import progress_bar
    from fedproto.runs.execution import Interrupted

    name = experiment.algorithm.name
    rounds = experiment.config.rounds
    console = Console(quiet=is_quiet())
    try:
        with progress_bar(console, name, experiment.progress.round, rounds) as on_round:
            return experiment.execute(folder, on_round).data
    except Interrupted as interruption:
        if interruption.__cause__ is not None:
            what = f"{name} stopped: {interruption.__cause__}"
        else:
            what = f"{name} stopped after round {experiment.progress.round} of {rounds}"
        remedy = f"continue with: fedproto resume {resumable}"
        if not experiment.config.checkpoint_every:
            remedy += " (from round 1, since checkpoint_every is 0)"
        say(f"{what}; {remedy}", stderr=True)
        raise typer.Exit(130) from None


def show_results(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> None:
    """Print the contents of some result.json files, each under its label, side by side."""
    from fedproto.cli.metric_table import metric_tables, warn_of_metrics
    from fedproto.cli.tables import (
        clients_tables,
        compare_runs,
        describe_privacy,
        describe_traffic,
        describe_validation,
    )

    labelled = []
    for result, label in zip(results, labels, strict=True):
        labelled.append(result | {"algorithm": label})
    console = wide_console()
    console.quiet = is_quiet()
    for table in clients_tables(labelled, console.width):
        console.print(table)
    for table in metric_tables(labelled, console.width):
        console.print(table)
    for result in labelled:
        chosen = describe_validation(result)
        if chosen is not None:
            say(chosen)
    for result in labelled:
        claim = describe_privacy(result)
        if claim is not None:
            say(claim)
    for sentence in compare_runs(labelled):
        say(sentence)
    for result in labelled:
        say(describe_traffic(result))
    for result in labelled:
        for sentence in warn_of_metrics(result):
            say(sentence, style="bold red")
    warn_of_divergence(labelled)


def warn_of_divergence(results: Sequence[dict[str, Any]]) -> None:
    """Print a red line for each run whose loss exploded."""
    from fedproto.cli.tables import describe_divergence

    for result in results:
        sentence = describe_divergence(result)
        if sentence is not None:
            say(sentence, style="bold red")
