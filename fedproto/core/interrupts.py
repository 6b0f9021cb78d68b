"""Ctrl-C and SIGTERM: a run finishes its round first, everything else ends at once.

Batch systems, systemd and `timeout` send SIGTERM to a whole process group, and some send it twice.
So a command handles SIGTERM like one Ctrl-C, however often it arrives; only a second Ctrl-C, or
SIGKILL, ends a run in the middle of a round.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_attended: threading.Event | None = None  # of the run that is in its rounds now


def handle_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C, in this process and from now on."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the first
    if _attended is None:
        raise KeyboardInterrupt
    _attended.set()


@contextmanager
def finish_round_on_interrupt(interrupted: threading.Event) -> Iterator[None]:
    """Set the event on SIGTERM and on the first Ctrl-C, so that the round can be finished.

    The second Ctrl-C stops at once. Outside the main thread, signals are left alone.
    """
    global _attended
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(signum: int, frame: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    outer = _attended
    previous = signal.signal(signal.SIGINT, first)
    _attended = interrupted
    try:
        yield
    finally:
        _attended = outer
        signal.signal(signal.SIGINT, previous)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back while a process is forked.

    The new process must not die of them before it ignores them.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Ignore Ctrl-C and SIGTERM in a worker.

    Its parent needs it to finish the round, and then ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # the parent held them back while it forked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
