"""`fedproto runs`: which runs there are, and how far they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.output import print_json_lines, print_table, say


def runs(
    folder: Annotated[Path, typer.Argument(help="a folder with runs")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON per run")] = False,
    drop_checkpoints: Annotated[
        bool,
        typer.Option(
            "--drop-checkpoints",
            help="delete the checkpoints of finished runs, which predict and export do not need; "
            "such runs can no longer be extended, nor their members changed",
        ),
    ] = False,
) -> None:
    """List the runs in a folder with their state, accuracy and size."""
    from fedproto.cli.numbers import percent
    from fedproto.runs.overview import drop_finished_checkpoints, list_runs

    if drop_checkpoints:
        freed = drop_finished_checkpoints(folder)
        megabytes = f"{freed.bytes / 1e6:.1f} MB"
        say(f"{megabytes} of checkpoints deleted, of {freed.runs} finished runs", stderr=as_json)
    found = list_runs(folder)
    if as_json:
        print_json_lines([each.to_json() for each in found])
        return
    rows = []
    for each in found:
        accuracy = "" if each.accuracy is None else percent(each.accuracy)
        rounds = f"{each.round} of {each.rounds}"
        size = f"{each.bytes / 1e6:.1f}"
        rows.append([each.name, each.algorithm, each.state, rounds, accuracy, size])
    if not rows:
        say(f"{folder} holds no run")
        return
    print_table(["run", "algorithm", "state", "rounds", "accuracy, %", "MB"], rows)
