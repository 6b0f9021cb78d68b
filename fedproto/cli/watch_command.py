"""`fedproto watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.output import say


def watch(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="a run, a folder of runs, or a folder of `deploy init`; it is only read",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="the address to listen on; any but this one shows it to a network")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="the port to listen on; 0 is any free one", min=0, max=65535)
    ] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open", help="open the page in the browser of this machine")
    ] = False,
) -> None:
    """Show runs and deployed federations as a web page that follows them live.

    The address that is printed holds a secret token. Ctrl-C ends it.
    """
    from fedproto.errors import need

    need("starlette", "'.[watch]'", "watch")
    need("uvicorn", "'.[watch]'", "watch")
    from fedproto.watch.server import Watch

    server = Watch(folder, host, port)
    say(f"watching {folder} at {server.address} (Ctrl-C ends it)")
    if open_browser:
        import webbrowser

        webbrowser.open(server.address)
    server.serve()
