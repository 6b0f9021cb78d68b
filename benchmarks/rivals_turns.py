"""Processes that take turns: one trains a round while all others are stopped.

Needs Linux: processes are stopped and continued by signals, and their CPU time is read from /proc.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

#: What a process prints once per round is waited for this long.
MAX_ROUND_SECONDS = 900
#: Two marks at least: the first may be at the start of the first round, which is not counted.
WARM_UP_MARKS = 2
KEPT_LINES = 40
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Contender:
    """A program that trains rounds, and prints a line that `mark` matches once per round."""

    name: str
    command: Sequence[str]
    folder: Path  # that it is started in
    mark: str
    environment: Mapping[str, str] = field(default_factory=dict)


class Lap(NamedTuple):
    """What one round took."""

    seconds: float
    cpu_seconds: float


class EndedError(Exception):
    """A process ended, or was too slow, before it had done its rounds."""


class Racer:
    """A contender's process. Between its turns it is stopped."""

    def __init__(self, contender: Contender, log: Path) -> None:
        self.mark = re.compile(contender.mark)
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.log = log.open("w")
        self.process = subprocess.Popen(
            contender.command,
            cwd=contender.folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **contender.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a process group of its own, with its workers
        )
        self.is_over = False
        self.cpu_at_mark = 0.0
        self.seconds_after_mark = 0.0  # that it went on before it was stopped

    def run_round(self) -> Lap:
        """Let the process run to its next mark, and return what that took."""
        continued = time.perf_counter()
        os.killpg(self.process.pid, signal.SIGCONT)
        self._read_to_mark()
        marked = time.perf_counter()
        cpu = read_group_cpu(self.process.pid)
        lap = Lap(marked - continued + self.seconds_after_mark, cpu - self.cpu_at_mark)
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.seconds_after_mark = time.perf_counter() - marked
        self.cpu_at_mark = cpu
        return lap

    def _read_to_mark(self) -> None:
        """Read what the process prints, up to its next mark."""
        assert self.process.stdout is not None
        too_late = threading.Timer(MAX_ROUND_SECONDS, self._kill)
        too_late.start()
        try:
            for line in self.process.stdout:
                self.log.write(line)
                if self.mark.search(line):
                    return
                self.last_lines.append(line)
        finally:
            too_late.cancel()
        self.is_over = True  # nobody holds the other end of the pipe any more
        code = self.process.wait()
        if code == -signal.SIGKILL:
            raise EndedError(f"no round within {MAX_ROUND_SECONDS} s, or it was killed")
        if code == 0:
            raise EndedError("it ended after too few rounds")
        raise EndedError(f"exit code {code}: {find_reason(self.last_lines)}")

    def _kill(self) -> None:
        if not self.is_over:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and its workers."""
        self._kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


def find_reason(lines: Sequence[str]) -> str:
    """Return the last line that is not empty, which is where Python prints an exception."""
    for line in reversed(lines):
        if line.strip():
            return line.strip()[:200]
    return "it printed nothing"


def read_group_cpu(group: int) -> float:
    """Return the CPU seconds of all processes of a group, and of their children that ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if int(fields[2]) == group:
            ticks += sum(int(count) for count in fields[11:15])
    return ticks / CLOCK_TICKS


def take_turns(
    contenders: Sequence[Contender], rounds: int, logs: Path, say: Callable[[str], None]
) -> dict[str, list[Lap] | str]:
    """Return each contender's laps by name, or why it did not run.

    All are started and stopped again one after the other; then each does one round, `rounds` times.
    Output of the processes is written to files in `logs`.
    """
    found: dict[str, list[Lap] | str] = {}
    racers: dict[str, Racer] = {}
    try:
        for contender in contenders:
            say(f"starting {contender.name}")
            racer = Racer(contender, logs / f"{contender.name}.log")
            racers[contender.name] = racer
            _let_run(found, contender.name, racer, WARM_UP_MARKS)
            if isinstance(found[contender.name], list):
                found[contender.name] = []
        for turn in range(rounds):
            say(f"turn {turn + 1} of {rounds}")
            for name, racer in racers.items():
                if isinstance(found[name], list):
                    _let_run(found, name, racer, 1)
    finally:
        for racer in racers.values():
            racer.close()
    return found


def _let_run(found: dict[str, list[Lap] | str], name: str, racer: Racer, rounds: int) -> None:
    """Add laps of a contender, or put the reason why there are none in their place."""
    laps = found.setdefault(name, [])
    assert isinstance(laps, list)
    try:
        for _ in range(rounds):
            laps.append(racer.run_round())
    except EndedError as error:
        found[name] = str(error)
