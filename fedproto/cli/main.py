"""The command line: all commands, and what happens to errors.

Heavy imports stay inside the commands, so that `fedproto --help` does not load torch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from fedproto.cli.audit_command import audit
from fedproto.cli.bench_command import bench
from fedproto.cli.check_command import check
from fedproto.cli.data_commands import data_app
from fedproto.cli.deploy_backup_commands import (
    backup,
    contribute,
    move_data,
    rebuild,
    rename,
    restore,
)
from fedproto.cli.deploy_commands import deploy_app
from fedproto.cli.inference_commands import export, predict
from fedproto.cli.init_command import init
from fedproto.cli.list_command import list_plugins
from fedproto.cli.membership_commands import extend, join, members
from fedproto.cli.output import escape
from fedproto.cli.plain_help import PlainTyper
from fedproto.cli.report_command import report
from fedproto.cli.run_commands import RUN_EPILOG, resume, run
from fedproto.cli.runs_command import runs
from fedproto.cli.sweep_commands import reproduce, sweep
from fedproto.cli.theory_command import theory
from fedproto.cli.tune_command import tune
from fedproto.cli.volume import own_volume
from fedproto.cli.watch_command import watch
from fedproto.config import plugin_trust
from fedproto.core.interrupts import handle_sigterm
from fedproto.errors import FedProtoError

app = PlainTyper(
    help="Federated learning by class prototypes, for clients that share only class names.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(init)
app.command()(check)
app.command(epilog=RUN_EPILOG)(run)
app.command()(resume)
app.command()(sweep)
app.command()(tune)
app.command()(theory)
app.command()(reproduce)
app.command()(bench)
app.command()(report)
app.command()(watch)
app.command()(audit)
app.command()(runs)
app.command("list")(list_plugins)
app.command()(predict)
app.command()(export)
app.command()(join)
app.command()(members)
app.command()(extend)
deploy_app.command()(backup)
deploy_app.command()(restore)
deploy_app.command()(rename)
deploy_app.command()(move_data)
deploy_app.command()(contribute)
deploy_app.command()(rebuild)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        import fedproto

        typer.echo(f"fedproto {fedproto.__version__}")
        raise typer.Exit


@app.callback()
def prepare_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="show the version and exit", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    context.with_resource(own_volume())
    context.with_resource(plugin_trust.own_trust())  # what a command's flags allow ends with it


def main() -> None:
    """Run a command; a FedProtoError becomes one line and exit code 2.

    SIGTERM is handled like Ctrl-C, except under torchrun: when one process dies, torchrun ends
    the others by SIGTERM, and they must stop at once.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        handle_sigterm()
    try:
        app()
    except FedProtoError as error:
        message = f"[red]error:[/] {escape(str(error))}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        sys.exit(2)
