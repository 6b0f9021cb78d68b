"""`fedproto report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import say


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="run folders, folders of them, or folders of `deploy init`"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.html, or a folder [report.html in the run, or here for several]",
            show_default=False,
        ),
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Write runs as one self-contained HTML page with charts and tables, and figures beside it."""
    from fedproto.report import write

    page = write(runs, out, notice=say)
    say(f"written to {page}")
