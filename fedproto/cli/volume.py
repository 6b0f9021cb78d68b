"""How much a command prints: flags that run, resume and sweep share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass
class Volume:
    """What the flags of the present command ask for."""

    quiet: bool = False
    verbose: bool = False


_volume = Volume()


def is_quiet() -> bool:
    """Whether only warnings, errors and JSON are to be printed."""
    return _volume.quiet


def is_verbose() -> bool:
    """Whether every round is to be printed, not only those that are evaluated."""
    return _volume.verbose


@contextmanager
def own_volume() -> Iterator[None]:
    """Let what a command's flags ask for end with the command."""
    try:
        yield
    finally:
        _volume.quiet = False
        _volume.verbose = False


def _set_quiet(is_wanted: bool) -> bool:
    _volume.quiet = _volume.quiet or is_wanted
    return is_wanted


def _set_verbose(is_wanted: bool) -> bool:
    _volume.verbose = is_wanted
    return is_wanted


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="print warnings and errors only", callback=_set_quiet),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="print every round", callback=_set_verbose)
]
#: Other output would spoil the JSON.
AsJson = Annotated[
    bool,
    typer.Option("--json", help="print the results as lines of JSON only", callback=_set_quiet),
]
