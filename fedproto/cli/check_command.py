"""`fedproto check`: what a run would be, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import print_table, say
from fedproto.errors import ConfigError

if TYPE_CHECKING:
    from fedproto.core.federation import Federation, Member
    from fedproto.setup.check import Check, CheckedRun

#: Clients that the table shows.
MAX_SHOWN_CLIENTS = 50
#: Characters of a list of classes.
MAX_CLASSES_WIDTH = 30


def check(
    target: Annotated[
        str, typer.Argument(metavar="FILE|DATA", help="a configuration (.toml), or your data")
    ],
    times: Annotated[
        bool, typer.Option("--times/--no-times", help="train some batches to estimate the time")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Check a configuration and its data without training; exit code 2 if a run would be refused.

    Says who would have what, how long a round takes, how many bytes it sends, and what is
    suspicious about the data.
    """
    from fedproto.setup.check import check as check_target

    found = check_target(target, times=times)
    if as_json:
        from json import dumps

        typer.echo(dumps(_to_json(found)))
    else:
        _show(found)
    if found.errors:
        noun = "problem" if len(found.errors) == 1 else "problems"
        raise ConfigError(f"{target} would be refused: {len(found.errors)} {noun}, listed above")


def _show(found: Check) -> None:
    from fedproto.runs.row_counts import describe_rows

    if found.runs:
        say(describe_rows(found.runs[0].federation))
        _show_clients(found.runs[0])
    for checked in found.runs:
        for sentence in _describe_cost(checked):
            say(sentence)
    for warning in found.warnings:
        say(f"suspicious: {warning}", style="yellow")
    for error in found.errors:
        say(f"problem: {error}", style="bold red")
    if not found.errors and not found.warnings:
        say("nothing suspicious was found")


def _show_clients(checked: CheckedRun) -> None:
    """Print who would have what."""
    from fedproto.cli.tables import shorten_classes

    federation = checked.federation
    headers = ["client", "model", "classes", "train"]
    if federation.has_validation:
        headers.append("validation")
    headers.append("test")
    rows = []
    for member in federation.members[:MAX_SHOWN_CLIENTS]:
        names = [federation.classes[label] for label in member.classes]
        row = [member.name, member.model, shorten_classes(names, MAX_CLASSES_WIDTH)]
        row.append(f"{len(member.train):,}")
        if member.validation is not None:
            row.append(f"{len(member.validation):,}")
        row.append(f"{len(member.test):,}")
        rows.append(row)
    print_table(headers, rows)
    others = len(federation.members) - MAX_SHOWN_CLIENTS
    if others > 0:
        say(f"and {others:,} more clients")


def _describe_cost(checked: CheckedRun) -> list[str]:
    """Return sentences on the time and the bytes of a run."""
    cost = checked.cost
    if cost is None:
        return []
    duration = _say_seconds(cost.seconds)
    sentences = [
        f"{checked.algorithm}: a round takes about {_say_seconds(cost.seconds_per_round)}, an "
        f"evaluation {_say_seconds(cost.seconds_per_evaluation)}; {cost.rounds:,} rounds with "
        f"{cost.evaluations:,} evaluations about {duration}"
    ]
    sent = f"{cost.bytes_up:,} bytes up and {cost.bytes_down:,} down per round by all clients"
    if cost.first_bytes_up != cost.bytes_up:
        sent += f", {cost.first_bytes_up:,} up in the first"
    sentences.append(f"{checked.algorithm}: {sent}")
    return sentences


def _say_seconds(seconds: float) -> str:
    """Return a duration such as `20 ms`, `1.5 s`, `12 min` or `3.5 h`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _to_json(found: Check) -> dict[str, Any]:
    runs = []
    for checked in found.runs:
        federation = checked.federation
        clients = [_client_to_json(federation, member) for member in federation.members]
        cost = None if checked.cost is None else vars(checked.cost)
        runs.append({"algorithm": checked.algorithm, "clients": clients, "cost": cost})
    return {"runs": runs, "warnings": found.warnings, "errors": found.errors}


def _client_to_json(federation: Federation, member: Member) -> dict[str, Any]:
    return {
        "name": member.name,
        "model": member.model,
        "classes": [federation.classes[label] for label in member.classes],
        "train": len(member.train),
        "validation": 0 if member.validation is None else len(member.validation),
        "test": len(member.test),
    }
