"""Start a run at the server, follow it to its end, and learn how it ended.

Flower's own command line is used, in the folder that `deploy init` made and with the environment of
its scripts. `flwr run --stream` exits with 0 also if the run failed, and a log ends in the same way
then, so the end is asked for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedproto.errors import ConfigError

FEDERATION = "federation"  # the server's name in Flower's configuration, which env.sh writes
COMPLETED = "finished:completed"
FINISHED = "finished"
CALL_SECONDS = 120.0
LOOK_SECONDS = 3.0  # before a log that broke off is read again
GIVE_UP_SECONDS = 300.0  # without an answer of the server
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR)\s*:\s*(\S.*)")
_DONE_BEFORE = re.compile(r"round (\d+) of (\d+) is done")
_DONE_NOW = re.compile(
    r"round (\d+): (?:\d+ of \d+ replies accepted|\d+ replies accepted.* still open"
    r"|.* were added in a secure sum|.* has been added$|.*; the round ends without an update)"
)


class LogLine(NamedTuple):
    """A line of the server's log."""

    level: str
    text: str


class Rounds(NamedTuple):
    """How far a run is, as a line of the log says."""

    done: int
    total: int | None  # None: the line does not say


class FlowerRuns:
    """The runs of one server."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "env.sh").is_file() or not (folder / "pyproject.toml").is_file():
            raise ConfigError(f"{folder} is not a folder that `fedproto deploy init` made")
        self.folder = folder.absolute()

    def find_current(self) -> str | None:
        """Return the latest run that has not ended, or None."""
        runs = self._ask("list", FEDERATION).get("runs", [])
        going = [run for run in runs if not str(run.get("status", "")).startswith(FINISHED)]
        return str(going[0]["run-id"]) if going else None

    def start(self, settings: str = "") -> str:
        """Start a run; settings such as `rounds=20 lr=0.005` replace those of the folder."""
        changed = ("--run-config", settings) if settings else ()
        return str(self._ask("run", ".", FEDERATION, *changed)["run-id"])

    def ask_status(self, run: str) -> str:
        """Return `finished:completed`, `finished:failed`, `running` and the like."""
        return str(self._ask("list", FEDERATION, "--run-id", run)["runs"][0]["status"])

    def stop(self, run: str) -> None:
        """Stop a run; the round that is not finished stays open, and the next run continues."""
        self._ask("stop", run, FEDERATION)

    def follow(self, run: str) -> Iterator[LogLine]:
        """Yield the lines of a run's log until it has ended, also over restarts of the server."""
        seen = 0
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            for number, line in enumerate(self._stream(run)):
                if number >= seen:  # a log that is read again begins anew
                    seen = number + 1
                    yield line
                    deadline = time.monotonic() + GIVE_UP_SECONDS
            try:
                if self.ask_status(run).startswith(FINISHED):
                    return
                deadline = time.monotonic() + GIVE_UP_SECONDS
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_SECONDS)

    def _stream(self, run: str) -> Iterator[LogLine]:
        """Yield the lines of Flower's log as they come; it may break off."""
        command = self._command("log", run, FEDERATION, "--stream")
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us
        )
        assert process.stdout is not None
        try:
            for text in process.stdout:
                line = read_line(text)
                if line is not None:
                    yield line
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _ask(self, *words: str) -> dict[str, Any]:
        """Return Flower's answer, or raise ConfigError with its reason."""
        command = self._command(*words, "--format", "json")
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CALL_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"the server does not answer `flwr {words[0]}` within {CALL_SECONDS:g} s"
            ) from error
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = None
        if done.returncode == 0 and isinstance(answer, dict) and answer.get("success", True):
            return answer
        reason = answer.get("error-message") if isinstance(answer, dict) else None
        text = str(reason or done.stderr or done.stdout).strip()
        raise ConfigError(
            f"the server does not accept `flwr {words[0]}`: {_show(text)[:1000]}; "
            "is ./server.sh running, on this PORT?"
        )

    def _command(self, *words: str) -> list[str]:
        return ["bash", "-c", '. ./env.sh; exec flwr "$@"', "./flwr", *words]


def _environment() -> dict[str, str]:
    """Return this environment, with the programs beside this Python in front."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path}


def read_line(text: str) -> LogLine | None:
    """Return a line of Flower's log without its colours; None if it says nothing."""
    found = _LINE.match(_COLOUR.sub("", text).strip())
    return None if found is None else LogLine(found[1], _show(found[2]))


def _show(text: str) -> str:
    """Return somebody else's text on one line, without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def read_rounds(text: str) -> Rounds | None:
    """Return how far the rounds are, if a line of the log says so."""
    before = _DONE_BEFORE.search(text)
    if before is not None:
        return Rounds(int(before[1]), int(before[2]))
    now = _DONE_NOW.search(text)
    return None if now is None else Rounds(int(now[1]), None)
