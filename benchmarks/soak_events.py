"""What a soak does to the processes of a federation, drawn from a seeded generator.

Event number n depends on the seed and n only, so a soak that is taken up again goes on with the
same events.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from benchmarks.soak_processes import Process

SERVER = "server"
SERVER_SHARE = 0.2  # of the events; the others strike a member
RESTART_SHARE = 0.2  # of the events stop all processes of a server or member, and start them later
MOMENT_SECONDS = 8.0  # after the end of a round, within which an event comes
AWAY_SECONDS = 20.0  # at most, until what was stopped is started
FORK_SECONDS = 20.0  # to wait for the process of a message
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


class Event(NamedTuple):
    """Something that happens to the server or to a member."""

    rounds: int  # that are closed between the event before and this one
    owner: str
    role: str  # of the process that gets the signal; "all" is a restart
    signal: str
    moment: float  # seconds after the end of the round
    away: float  # seconds until what was restarted is started again


def draw_event(seed: int, number: int, members: list[str], every: float) -> Event:
    """Return an event; on average, one comes `every` rounds."""
    generator = random.Random(f"soak {seed} {number}")
    rounds = 1 + int(generator.expovariate(1 / max(every - 0.5, 1e-9)))
    is_server = generator.random() < SERVER_SHARE
    owner = SERVER if is_server else generator.choice(members)
    node = "superlink" if is_server else "supernode"
    role = generator.choice(["supervisor", node, "worker", "superexec", "fork"])
    if generator.random() < RESTART_SHARE:
        role = "all"
    name = generator.choice(sorted(SIGNALS))
    moment = generator.uniform(0, MOMENT_SECONDS)
    return Event(rounds, owner, role, name, moment, generator.uniform(0, AWAY_SECONDS))


def strike(event: Event, find: Callable[[], list[Process]]) -> bool:
    """Send the event's signal to one process; return whether there was one.

    The process of a message is awaited: it lives for a fraction of a second.
    """
    deadline = time.monotonic() + (FORK_SECONDS if event.role == "fork" else 0.0)
    while True:
        for process in find():
            if (process.owner, process.role) == (event.owner, event.role):
                with suppress(ProcessLookupError):
                    os.kill(process.number, SIGNALS[event.signal])
                    return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
