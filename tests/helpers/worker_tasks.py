"""Tasks for worker processes, which import them by the name of this module."""

import os
import signal
import time
from pathlib import Path

from fedproto.errors import ConfigError
from fedproto.runs.workers import Worker


def double(worker: Worker, value: int) -> tuple[int, int]:
    """Report a value, and return its double and the process that did it."""
    worker.report(value)
    return 2 * value, os.getpid()


def meet(worker: Worker, folder: Path, others: int, value: int) -> tuple[int, int]:
    """Do the same once so many tasks have begun, of which each has a file in the folder."""
    (folder / str(value)).touch()
    while len(list(folder.iterdir())) < others:
        time.sleep(0.01)
    return double(worker, value)


def fail(worker: Worker, kind: str) -> None:
    """Fail in one of two ways."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ConfigError("lr must be positive, not -1")
