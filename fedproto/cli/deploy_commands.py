"""The commands for a federation across real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.output import print_table, say

deploy_app = typer.Typer(
    help="Run a federation across real machines, on Flower.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@deploy_app.command("init")
def deploy_init(
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    members: Annotated[
        str, typer.Option(help="their names, with commas")
    ] = "hospital-a,hospital-b",
    data: Annotated[
        str, typer.Option(help="what their files begin with: folder:PATH, csv:PATH, ...")
    ] = "mnist5k",
    classes: Annotated[
        str, typer.Option(help="the names they share, with commas")
    ] = "0,1,2,3,4,5,6,7,8,9",
) -> None:
    """Write a folder from which a federation is started: settings, a file a member, keys, scripts, a guide."""
    from fedproto.config.options import words
    from fedproto.deploy.scaffold import init

    init(folder, words(members), data, words(classes))
    say(f"written to {folder}; its README.md says how to go on")


@deploy_app.command("status")
def deploy_status(
    state: Annotated[
        Path,
        typer.Argument(
            help="the server's state: a folder of `deploy init`, or its folder `server`"
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show members, when they were last heard, rounds, accuracies, bytes, and what was refused."""
    from fedproto.deploy.status import make_rows, read_status

    found = read_status(state)
    if json:
        from json import dumps

        typer.echo(dumps(found, indent=1))
        return
    heads = (
        "member",
        "last heard",
        "round",
        "classes",
        "accuracy",
        "up",
        "down",
        "beside",
        "refused",
        "failed",
        "why",
    )
    print_table(heads, make_rows(found))
    say(f"round {found['round']}, {found['algorithm']}, classes {', '.join(found['classes'])}")
