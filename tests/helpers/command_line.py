"""The real command line, in this process (fast) or in its own (real signals and exit codes)."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from helpers.patience import PATIENCE_SECONDS

from fedproto.cli.main import main
from fedproto.core.files import LOCK_NAME
from fedproto.runs.folder import LOG

#: A federation that runs in a tenth of a second.
SMALL = ("--dataset", "digits", "--clients", "4", "--rounds", "3", "--shots", "5")

#: Tables unbroken.
ENVIRONMENT = {"COLUMNS": "200"}


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def fedproto(*arguments: str | Path) -> Answer:
    """Return what a shell would see of `fedproto ARGUMENTS`; errors become one line in `main`."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["fedproto", *map(str, arguments)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.dict(os.environ, ENVIRONMENT))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stopped = stack.enter_context(pytest.raises(SystemExit))
        main()
    return Answer(int(stopped.value.code or 0), out.getvalue(), err.getvalue())


#: The command line, but a run waits after it has written a round, until there is a file.
HELD = """
import sys, time
from pathlib import Path
from fedproto.cli.main import main
from fedproto.runs.folder import RunFolder

_, gate, round, *arguments = sys.argv
sys.argv = ["fedproto", *arguments]
add_metrics = RunFolder.add_metrics

def add_and_wait(folder, line):
    add_metrics(folder, line)
    while line["round"] == int(round) and not Path(gate).exists():
        time.sleep(0.01)

RunFolder.add_metrics = add_and_wait
main()
"""


class Gate(NamedTuple):
    """Where a run of another process waits, so that it cannot be over before a test has acted."""

    path: Path
    round: int

    def open(self) -> None:
        self.path.touch()


def process(
    *arguments: str | Path,
    options: tuple[str, ...] = (),
    gate: Gate | None = None,
    own_session: bool = False,
) -> subprocess.Popen:
    """`python OPTIONS -m fedproto ARGUMENTS` in a process of its own."""
    program = ["-m", "fedproto"]
    if gate is not None:
        program = ["-c", HELD, str(gate.path), str(gate.round)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *options, *program, *map(str, arguments)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=os.environ | ENVIRONMENT,
        start_new_session=own_session,
    )


def answer(running: subprocess.Popen) -> Answer:
    """Wait for a process to end by itself."""
    out, err = running.communicate(timeout=PATIENCE_SECONDS)
    return Answer(running.returncode, out, err)


def only_line(text: str) -> str:
    """The one line of a text that must have just one."""
    (line,) = [line for line in text.splitlines() if line.strip()]
    return line


def files_in(folder: Path) -> list[str]:
    """Every file and folder below, by its path, but for locks and logs, which hold no results."""
    ignored = (LOCK_NAME, LOG)
    found = [path for path in folder.rglob("*") if not path.name.startswith(ignored)]
    return sorted(str(path.relative_to(folder)) for path in found)
