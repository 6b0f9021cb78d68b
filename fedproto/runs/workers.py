"""Tasks that several processes of this machine share, each with its own copy of torch and data.

A small model leaves most of a GPU idle, because one process cannot start its steps fast enough.
Several processes fill it. Each is started anew, since CUDA does not survive a fork, and takes one
task after the other, so that torch is imported and data is read once per process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from fedproto.config import plugin_trust
from fedproto.core.interrupts import handle_sigterm, held_back, leave_to_parent
from fedproto.engines.vectorised.memory import share_gpu
from fedproto.errors import FedProtoError, LostProcessError
from fedproto.runs.sweep_data import SweepData

#: Kinds of messages from a worker.
REPORTED = "reported"
RETURNED = "returned"
FAILED = "failed"


@dataclass
class Worker:
    """What a task is given of the process that it runs in.

    report  tells the process that waits for the task something, at once
    data    the data sets that this process has read
    """

    report: Callable[[Any], None]
    data: SweepData = field(default_factory=SweepData)


class Task(NamedTuple):
    """A call of a function of some module, with the worker before its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


#: Is given the number of a task, and what it reports.
OnReport = Callable[[int, Any], None]


def run_tasks(
    tasks: Sequence[Task],
    jobs: int,
    on_report: OnReport,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each task and what it returned, as they end.

    An error of a task is raised here, and ends the others after their round, like Ctrl-C.

    Args:
        tasks: what is to be done, begun in this order.
        jobs: how many processes share it.
        on_report: is called with what tasks report, in this process.
        is_over: whether no further task may begin.
    """
    pool = _Pool(tasks, on_report, is_over)
    try:
        pool.start(min(jobs, len(tasks)))
        yield from pool.finish()
    finally:
        pool.close()


class _Pool:
    """Processes by the connection to each, and the number of the task that each has."""

    def __init__(
        self, tasks: Sequence[Task], on_report: OnReport, is_over: Callable[[], bool]
    ) -> None:
        self.tasks = tasks
        self.on_report = on_report
        self.is_over = is_over
        self.begun = 0
        self.processes: dict[Connection, BaseProcess] = {}
        self.busy: dict[Connection, int] = {}

    def start(self, jobs: int) -> None:
        """Start the processes and give each its first task."""
        context = multiprocessing.get_context("spawn")
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, jobs, plugin_trust.current()), daemon=True
            )
            with held_back():  # a new process must not die of Ctrl-C before it handles it
                process.start()
            theirs.close()
            self.processes[ours] = process
            self._give_task(ours)

    def _give_task(self, connection: Connection) -> None:
        if self.begun == len(self.tasks) or self.is_over():
            return
        connection.send(self.tasks[self.begun])
        self.busy[connection] = self.begun
        self.begun += 1

    def finish(self) -> Iterator[tuple[int, Any]]:
        """Yield what tasks return until no more may begin and all are done."""
        while self.busy:
            for ready in wait(list(self.busy)):
                assert isinstance(ready, Connection)
                number = self.busy[ready]
                kind, content = _receive(ready)
                if kind == REPORTED:
                    self.on_report(number, content)
                    continue
                del self.busy[ready]
                if kind == FAILED:
                    raise content
                self._give_task(ready)
                yield number, content

    def close(self) -> None:
        """End all processes; one in the middle of a run writes a checkpoint first.

        Idle ones end by themselves when their connection is closed.
        """
        for connection, process in self.processes.items():
            connection.close()
            if connection in self.busy:
                process.terminate()
        for process in self.processes.values():
            process.join()


def _receive(connection: Connection) -> tuple[str, Any]:
    """Return the next message of a worker; raise LostProcessError if it has ended."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError) as error:
        raise LostProcessError(
            "a worker process has ended, perhaps for want of memory: run it again with fewer --jobs"
        ) from error


# --- in a worker


def _serve(connection: Connection, jobs: int, trust: plugin_trust.Trust) -> None:
    """Do the tasks that come through a connection until it is closed, as one of several workers."""
    leave_to_parent()
    handle_sigterm()
    share_gpu(jobs)
    plugin_trust.adopt(trust)
    worker = Worker(lambda content: _send(connection, (REPORTED, content)))
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            task = connection.recv()
            try:
                content = (RETURNED, task.function(worker, *task.arguments))
            except Exception as error:
                content = (FAILED, make_portable(error))
            _send(connection, content)


def _send(connection: Connection, message: tuple[str, Any]) -> None:
    """Send a message; if nobody listens any more, stop as if told to."""
    try:
        connection.send(message)
    except ConnectionError:
        os.kill(os.getpid(), signal.SIGTERM)


def make_portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process, of the same kind where possible."""
    if not isinstance(error, FedProtoError):
        return RuntimeError("in a worker process:\n" + "".join(traceback.format_exception(error)))
    for kind in type(error).__mro__:
        if issubclass(kind, FedProtoError) and kind.__init__ is Exception.__init__:
            return kind(str(error))
    return FedProtoError(str(error))
