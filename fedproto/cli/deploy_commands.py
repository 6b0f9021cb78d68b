"""`fedproto deploy`: a federation across real machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedproto.cli.output import print_table, say
from fedproto.cli.plain_help import PlainTyper
from fedproto.cli.volume import is_quiet

if TYPE_CHECKING:
    from fedproto.deploy.flower_runs import FlowerRuns

deploy_app = PlainTyper(
    help="Run a federation across real machines, with Flower.",
    no_args_is_help=True,
)


@deploy_app.command("init")
def init_deployment(
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    members: Annotated[
        str, typer.Option(help="names of the members, separated by commas")
    ] = "hospital-a,hospital-b",
    data: Annotated[
        str, typer.Option(help="data set written to the members' files: folder:PATH, csv:PATH, ...")
    ] = "mnist5k",
    classes: Annotated[
        str, typer.Option(help="class names that all members share, separated by commas")
    ] = "0,1,2,3,4,5,6,7,8,9",
) -> None:
    """Write a folder to start a federation from.

    It holds settings, one file per member, keys, scripts and a guide.
    """
    from fedproto.config.options import words
    from fedproto.deploy.scaffold import init

    init(folder, words(members), data, words(classes))
    say(f"written to {folder}; its README.md says how to go on")


@deploy_app.command("status")
def show_status(
    state: Annotated[
        Path,
        typer.Argument(
            help="the server's state: a folder of `deploy init`, or its folder `server`; or a "
            "member's TOML file, whose ledger of epsilon is shown"
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show the members, when each was last heard, rounds, accuracies, bytes and refusals."""
    from fedproto.deploy.status import describe_age, make_rows, read_status

    if state.suffix == ".toml" and state.is_file():
        _show_ledger(state, json)
        return
    found = read_status(state)
    if json:
        from json import dumps

        typer.echo(dumps(found, indent=1))
        return
    headers = (
        "member",
        "last heard",
        "round",
        "classes",
        "accuracy",
        "metrics",
        "epsilon",
        "up",
        "down",
        "beside",
        "refused",
        "failed",
        "why",
    )
    print_table(headers, make_rows(found))
    _show_history(found["history"])
    if found["backup"] is not None:
        last = found["backup"]
        say(f"last backup: round {last['round']}, {describe_age(last['time'])}, in {last['to']}")
    say(f"round {found['round']}, {found['algorithm']}, classes {', '.join(found['classes'])}")
    if found["privacy"] is not None:
        say(found["privacy"]["claim"]["statement"])


def _show_history(history: list[dict[str, Any]]) -> None:
    """Print what happened beside the rounds, if anything did."""
    from fedproto.deploy.status import make_history_rows

    if history:
        print_table(("when", "after round", "event", "what"), make_history_rows(history))


@deploy_app.command("run")
def run_deployment(
    folder: Annotated[Path, typer.Argument(help="the server's folder, made by `deploy init`")],
    settings: Annotated[
        str, typer.Argument(help="settings other than the folder's, such as 'rounds=20 lr=0.005'")
    ] = "",
    stop: Annotated[bool, typer.Option("--stop", help="stop the run that is going on")] = False,
) -> None:
    """Run the remaining rounds at the server, and wait for their end.

    A run that is going on is taken up again. Ctrl-C leaves it going. The exit code is 0 if the run
    completed, and 1 if it failed or was stopped.
    """
    from fedproto.deploy.flower_runs import COMPLETED, FlowerRuns
    from fedproto.errors import ConfigError

    runs = FlowerRuns(folder)
    run = runs.find_current()
    if stop:
        _stop_run(runs, run)
        return
    if run is None:
        run = runs.start(settings)
        say(f"run {run} has started")
    elif settings:
        raise ConfigError(
            f"run {run} is going on, so its settings stay: leave them out to see it, or stop it "
            "first with --stop"
        )
    else:
        say(f"run {run} is going on")
    try:
        errors = _follow_run(runs, run)
    except KeyboardInterrupt:
        say(
            f"run {run} goes on at the server; `fedproto deploy run {folder}` shows it again, and "
            "--stop stops it"
        )
        raise typer.Exit(130) from None
    status = runs.ask_status(run)
    if status != COMPLETED:
        reason = errors[0] if errors else "the server's log does not say why"
        typer.echo(f"error: run {run} has {status}: {reason}", err=True)
        raise typer.Exit(1)


def _stop_run(runs: FlowerRuns, run: str | None) -> None:
    if run is None:
        say("no run is going on")
        return
    runs.stop(run)
    say(f"run {run} is stopped; the next run continues with the round that was open")


def _follow_run(runs: FlowerRuns, run: str) -> list[str]:
    """Show a run's log and progress until it has ended; return its errors."""
    from fedproto.cli.progress import deployed_bar
    from fedproto.deploy.flower_runs import read_rounds

    errors = []
    with deployed_bar(Console(quiet=is_quiet())) as show:
        for line in runs.follow(run):
            show(line.text, read_rounds(line.text))
            if line.level == "ERROR":
                errors.append(line.text)
    return errors


@deploy_app.command("health")
def show_health(
    path: Annotated[
        Path,
        typer.Argument(help="the server's folder, made by `deploy init`; or a member's TOML file"),
    ],
    home: Annotated[
        Path | None,
        typer.Option(help="FLWR_HOME of the script, if it has one", envvar="FLWR_HOME"),
    ] = None,
    port: Annotated[
        int, typer.Option(help="port of the server", envvar="PORT", min=1, max=65535)
    ] = 9443,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say whether a server or member is well.

    The exit code is 0 if it is, 1 if something wants attention, and 3 if it is down.
    """
    from fedproto.deploy.health import check_health, describe, judge

    findings = check_health(path, home, port)
    if json:
        from json import dumps

        typer.echo(dumps(describe(findings), indent=1))
    else:
        rows = [[each.what, each.verdict.name.lower(), each.why] for each in findings]
        print_table(("what", "verdict", "why"), rows)
    raise typer.Exit(judge(findings))


@deploy_app.command("renew")
def renew_certificate(
    folder: Annotated[Path, typer.Argument(help="the server's folder, made by `deploy init`")],
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST]...", help="names and addresses of the server; if left out, as before"
        ),
    ] = None,
) -> None:
    """Write a new certificate of the server, from the authority that its members know.

    A running server uses it from the next connection on; nothing has to be started again.
    """
    from fedproto.deploy.certificates import renew_certificate

    ends = renew_certificate(folder, hosts or [])
    say(f"{folder / 'keys' / 'server.pem'} is valid until {ends:%Y-%m-%d}")


@deploy_app.command("wheels")
def make_wheels(
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    source: Annotated[
        str, typer.Option(help="a checkout of fedproto, a wheel of it, or a name that pip knows")
    ] = ".",
    extras: Annotated[
        str, typer.Option(help="extras to install with it, separated by commas")
    ] = "flower,privacy",
) -> None:
    """Make a folder of wheels from which fedproto installs without a network.

    The wheels fit machines with the same operating system, processor and Python as this one.
    """
    from fedproto.config.options import words
    from fedproto.deploy.wheels import INSTALL_FILE, collect_wheels

    count = collect_wheels(folder, source, words(extras))
    say(f"{count} wheels are in {folder}; on the other machine, run {folder / INSTALL_FILE}")


def _show_ledger(path: Path, json: bool) -> None:
    """Print what a member has spent of its budget, from its own ledger."""
    from fedproto.deploy.status import make_ledger_rows, read_ledger

    spent = read_ledger(path)
    if json:
        from json import dumps

        typer.echo(dumps(spent, indent=1))
        return
    print_table(("federation", "rounds", "last", "epsilon"), make_ledger_rows(spent))
    _show_history(spent["history"])
    limit = spent["max_epsilon_per_year"]
    budget = "no budget is set" if limit is None else f"the budget is {limit:g}"
    say(
        f"{spent['member']} has spent epsilon {spent['epsilon']:.4g} (delta {spent['delta']:g}) "
        f"within a year; {budget}; {spent['ledger']}"
    )
