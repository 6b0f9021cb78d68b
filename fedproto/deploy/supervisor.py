"""Keep the processes of a server or a member running.

    python -m fedproto.deploy.supervisor NAME FOLDER -- COMMAND... -- COMMAND...

starts the commands, and when one of them ends, ends the others and starts all again after a pause.
They belong together: Flower would wait for ever for a member whose executor has died, while its
SuperNode still says that it is there. SIGTERM, SIGINT and SIGHUP end everything; each process gets
one signal, since of a second one Flower dies before it has taken its leave of the server.

FOLDER holds what `fedproto deploy health` reads: a lock while the supervisor lives, and
`supervisor.json`. A word `{secret}` in a command becomes the path of a file in FOLDER with a new
random secret, which only its owner can read. The environment may say:

RETRY     seconds until what has ended is started again (10); each time in a row twice as long, up
          to a minute
LOG       a file for the output of all processes, in place of the supervisor's own output. It is
          rotated: LOG.1 to LOG.5 are older, of 10 MB each
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fedproto.core.files import hold_lock, write_atomically
from fedproto.errors import FedProtoError

STATUS_FILE = "supervisor.json"
SECRET_FILE = "executor.secret"
LOG_BYTES = 10_000_000
OLD_LOGS = 5
RETRY_SECONDS = 10.0
MAX_RETRY_SECONDS = 60.0
LOOK_SECONDS = 0.2
LEAVE_SECONDS = 30.0  # for a process to take its leave, until it is killed
STEADY_SECONDS = 120.0  # after which a failure is not one in a row
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class Supervisor:
    """The commands, their processes, and what is known of their failures."""

    def __init__(self, name: str, folder: Path, commands: list[list[str]]) -> None:
        self.name = name
        self.folder = folder
        self.commands = commands
        self.retry = float(os.environ.get("RETRY", RETRY_SECONDS))
        self.output: int | None = None  # a descriptor that processes write to; None: ours
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failures: list[float] = []  # when each happened, the latest hundred
        self.last_failure = ""
        self.say: Callable[[str], None] = _print
        self.stopping = threading.Event()
        self.signal = 0  # that has come to stop everything

    def stop(self, number: int, _: object = None) -> None:
        """Make `run` return; a handler of signals, which must not interrupt a start half-way."""
        self.signal = number
        self.stopping.set()

    def run(self) -> None:
        """Start everything again and again, until `stop` is called."""
        pause = self.retry
        while True:
            started = time.monotonic()
            self.start()
            problem = self.wait()
            self.end()
            if self.stopping.is_set():
                return
            if time.monotonic() - started > STEADY_SECONDS:
                pause = self.retry
            self.note_failure(problem)
            self.say(f"{problem}; {self.name} keeps trying; Ctrl-C stops it")
            if self.stopping.wait(pause):
                return
            pause = min(2 * pause, max(MAX_RETRY_SECONDS, self.retry))

    def start(self) -> None:
        """Start all commands, each as a process group of its own."""
        secret = self.folder / SECRET_FILE
        write_atomically(secret, secrets.token_bytes(32), private=True)
        for command in self.commands:
            words = [word.replace("{secret}", str(secret)) for word in command]
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                start_new_session=True,
            )
            self.processes.append(process)
        self.write_status()

    def wait(self) -> str:
        """Wait until a process ends; return a sentence about it, empty if we are to stop."""
        while not self.stopping.wait(LOOK_SECONDS):
            for command, process in zip(self.commands, self.processes, strict=True):
                status = process.poll()
                if status is not None:
                    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
                    return f"{_name_command(command)} ended {how}"
        return ""

    def end(self) -> None:
        """End all processes: a signal each, time to take their leave, and then force."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has left behind
            process.wait()
        self.processes = []

    def note_failure(self, problem: str) -> None:
        """Record when something has ended by itself."""
        self.failures = [*self.failures[-99:], time.time()]
        self.last_failure = problem
        self.write_status()

    def write_status(self) -> None:
        """Write what `fedproto deploy health` reads."""
        processes = []
        for command, process in zip(self.commands, self.processes, strict=False):
            processes.append({"name": _name_command(command), "process": process.pid})
        status: dict[str, Any] = {
            "name": self.name,
            "commands": self.commands,
            "processes": processes,
            "failures": self.failures,
            "last_failure": self.last_failure,
            "written": time.time(),
        }
        write_atomically(self.folder / STATUS_FILE, json.dumps(status, indent=1).encode())


def _name_command(command: list[str]) -> str:
    """Return a command's program, or the module that Python runs for it."""
    if "-m" in command:
        module = command[command.index("-m") + 1]
        return module.rpartition(".")[2]
    return Path(command[0]).name


def _print(sentence: str) -> None:
    print(sentence, flush=True)


class RotatedLog:
    """A file that a pipe's lines go to, rotated before it is too long."""

    def __init__(self, path: Path) -> None:
        self.handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=OLD_LOGS, encoding="utf-8", errors="replace"
        )
        reading, self.output = os.pipe()
        self._thread = threading.Thread(
            target=self._copy, args=(os.fdopen(reading, "rb"),), daemon=True
        )
        self._thread.start()

    def write(self, line: str) -> None:
        """Write a line; a full disk loses the line, and stops nothing."""
        record = logging.LogRecord("", logging.INFO, "", 0, line, None, None)
        with suppress(OSError):
            self.handler.handle(record)

    def _copy(self, pipe: BinaryIO) -> None:
        logging.raiseExceptions = False
        for line in pipe:
            self.write(line.decode(errors="replace").rstrip("\n"))


def main(words: list[str]) -> int:
    """Run the supervisor; return its exit status, as a shell's after that signal."""
    name, folder, commands = _read_words(words)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    supervisor = Supervisor(name, folder, commands)
    if os.environ.get("LOG"):
        log = RotatedLog(Path(os.environ["LOG"]))
        supervisor.output = log.output
        supervisor.say = log.write
    for number in _SIGNALS:
        signal.signal(number, supervisor.stop)
    try:
        with hold_lock(folder):
            supervisor.run()
    except FedProtoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 128 + supervisor.signal


def _read_words(words: list[str]) -> tuple[str, Path, list[list[str]]]:
    """Return the name, the folder and the commands of a command line."""
    name, folder, *rest = words
    commands: list[list[str]] = []
    for word in rest:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return name, Path(folder), commands


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
