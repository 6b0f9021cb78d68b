"""Flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.config import plugin_trust


def _trust_files(is_wanted: bool) -> bool:
    if is_wanted:
        plugin_trust.trust_files()
    return is_wanted


def _look_in(folder: Path | None) -> Path | None:
    if folder is not None:
        plugin_trust.look_in(folder)
    return folder


# Flags of every command that reads files which may name plug-ins. They take effect when they are
# parsed; the callback of `cli.main` ends what they allow together with the command.
TrustPlugins = Annotated[
    bool,
    typer.Option(
        "--trust-plugins", help="run the code of plug-ins that files name", callback=_trust_files
    ),
]
PluginDir = Annotated[
    Path | None,
    typer.Option(
        help="folder with plug-ins [the current folder]", show_default=False, callback=_look_in
    ),
]
