"""A soak: a real federation runs a thousand rounds while its processes are killed and restarted.

A server and five members run by the scripts of `fedproto deploy init`, with TLS and keys, on one
machine, with little data and a small model. Again and again something is killed (SIGKILL or
SIGTERM: a supervisor, Flower's own process, a warm worker, the process of one message), or a whole
member or server is stopped and started later. The last member is left alone, and the last rounds
are calm, so that some processes live long enough to show a leak. At the end all rounds are
replayed.

    OMP_NUM_THREADS=1 python -m benchmarks.soak FOLDER --minutes 70    # results/soak.json and .md
    python -m benchmarks.soak FOLDER --minutes 0                       # verify what is there
    python -m benchmarks.soak --draw                                   # the page, from the JSON

Called again with the same folder, it goes on after the rounds that are done.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.soak_events import SERVER, Event, draw_event, strike
from benchmarks.soak_federation import (
    MEMBERS,
    MODEL,
    POLL_SECONDS,
    RETRY_SECONDS,
    TIMEOUT_SECONDS,
    configure_run,
    flower,
    write_data,
)
from benchmarks.soak_page import make_page
from benchmarks.soak_processes import describe, find_processes, measure_files
from benchmarks.soak_record import Journal, Watcher
from benchmarks.soak_replay import verify
from fedproto.core.files import write_atomically

NAME = "soak"
SAMPLE_ROUNDS = 5  # between two samples of memory and files
LOOK_SECONDS = 3.0  # between two looks whether a run goes on
RUN_SECONDS = 40.0  # for a run's process to appear, before it is submitted again
STALL_SECONDS = 240.0  # without a round, after which the server is restarted, as a person would


class Soak:
    """The federation of a folder, and what is done to it."""

    def __init__(self, folder: Path, members: str, rounds: int, seed: int, every: float) -> None:
        self.folder = folder
        self.home = folder / "federation"
        self.members = list(members)
        self.rounds = rounds
        self.seed = seed
        self.every = every
        self.journal = Journal(folder / "journal.jsonl")
        self.files = write_data(folder, self.members)
        lines = self.journal.read()
        struck = [line["round"] for line in lines if line["what"] == "event"]
        sampled = [line["round"] for line in lines if line["what"] == "sample"]
        self.events = len(struck)
        self.struck = max(struck, default=0)  # the round of the latest event
        self.sampled = max(sampled, default=-SAMPLE_ROUNDS)
        self.starts: dict[str, float] = {}  # when what was stopped is started again
        self.looked = self.without_run = self.submitted = 0.0  # moments, by time.monotonic()
        self.federation = flower.Deployed(self.home, self.files)
        for name in ("tmp", "logs"):
            (self.home / name).mkdir(exist_ok=True)
        self.watcher = Watcher(self.home, self.members, self.journal)

    # --- running

    def run(self, minutes: float, calm: int, note: str = "") -> None:
        """Run rounds until all are done or the time is over; end everything.

        calm  the number of last rounds in which nothing is struck; of the time, the same share
        note  what is special about this session, for the page
        """
        deadline = time.monotonic() + 60 * minutes
        calm_after = deadline - 60 * minutes * calm / self.rounds
        self.journal.write("session", every=self.every, timeout=TIMEOUT_SECONDS, note=note)
        try:
            self._start_all()
            self.watcher.start()
            self.watcher.closed = time.monotonic()
            event = self._draw()
            while self.watcher.round < self.rounds and time.monotonic() < deadline:
                self._keep_up()
                is_calm = time.monotonic() > calm_after or self.watcher.round > self.rounds - calm
                if not is_calm and self.watcher.round >= self.struck + event.rounds:
                    self._strike(event)
                    event = self._draw()
                if self.watcher.round >= self.sampled + SAMPLE_ROUNDS:
                    self._sample()
                time.sleep(0.2)
            self._sample()
        finally:
            self._stop_all()

    def _draw(self) -> Event:
        return draw_event(self.seed, self.events, self.members[:-1], self.every)

    def _start_all(self) -> None:
        self._start(SERVER)
        flower.until(self._listens, "the server listens")
        if not any(line["what"] == "run" for line in self.journal.read()):
            self.federation.admit(*self.members)
        for name in self.members:
            self._start(name)
        if not (self.home / "server" / "server.safetensors").exists():
            self.federation.bring(*self.members)  # so that all are asked in the first round
        self._submit()

    def _start(self, name: str) -> None:
        self.starts.pop(name, None)
        environment = {
            "LOG": f"logs/{name}.log",
            "RETRY": str(RETRY_SECONDS),
            "TMPDIR": str(self.home / "tmp"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(POLL_SECONDS),
        }
        if name == SERVER:
            self.federation.start(SERVER, "./server.sh", **environment)
        else:
            self.federation.start_member(name, **environment)

    def _listens(self) -> bool:
        return flower._listens(self.federation.port)

    def _keep_up(self) -> None:
        """Do what systemd and a person do: start what has ended, and go on with the run."""
        now = time.monotonic()
        for name in (SERVER, *self.members):
            process = self.federation.processes.get(name)
            has_ended = process is not None and process.poll() is not None
            if has_ended and name not in self.starts:
                self.starts[name] = now + RETRY_SECONDS
            if name in self.starts and now >= self.starts[name]:
                self._start(name)
        if now > self.looked + LOOK_SECONDS and self._listens():
            self.looked = now
            if self._count_runs():
                self.without_run = now
            elif now > max(self.without_run + LOOK_SECONDS, self.submitted + RUN_SECONDS):
                self._submit()
        if now > self.watcher.closed + STALL_SECONDS:
            self._restart_stalled()

    def _count_runs(self) -> int:
        processes = find_processes(self.home)
        return sum((each.owner, each.role) == (SERVER, "fork") for each in processes)

    def _submit(self) -> None:
        """Start a run, which continues after the rounds that are done."""
        self.submitted = time.monotonic()
        config = configure_run(self.rounds, str(self.home / "server"))
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        with suppress(Exception):  # the server may be killed meanwhile: tried again later
            # As ./run.sh does. Flower deletes what an ended run has left when runs are listed.
            self.federation.flwr("list", "federation", "--format", "json")
            done = self.federation.flwr(
                "run", ".", "federation", "--format", "json", "--run-config", words
            )
            said = (done.stdout + done.stderr)[-300:] if done.returncode else ""
            self.journal.write("run", round=self.watcher.round, status=done.returncode, said=said)

    def _restart_stalled(self) -> None:
        processes = [describe(each) for each in find_processes(self.home)]
        self.journal.write("stall", round=self.watcher.round, processes=processes)
        self.watcher.closed = time.monotonic()
        self.federation.kill(SERVER)
        self._start(SERVER)

    # --- events and samples

    def _strike(self, event: Event) -> None:
        time.sleep(event.moment)
        found = True
        if event.role == "all":
            self.starts[event.owner] = float("inf")
            if event.owner in self.federation.processes:
                self._end(event.owner, event.signal)
            self.starts[event.owner] = time.monotonic() + event.away
        else:
            found = strike(event, lambda: find_processes(self.home))
        if event.owner == SERVER:
            self.submitted = 0.0  # the run has ended with it
        self.struck = self.watcher.round
        self.journal.write(
            "event", round=self.struck, number=self.events, found=found, **event._asdict()
        )
        self.events += 1

    def _end(self, name: str, signal: str) -> None:
        """End a server or member; with SIGTERM it takes its leave, as by `systemctl stop`."""
        if signal == "SIGKILL":
            self.federation.kill(name)
            return
        try:
            self.federation.stop(name)
        except AssertionError:
            left = flower._end(f"FLWR_HOME={self.home}/.flwr-{name}")
            self.journal.write("slow", round=self.watcher.round, owner=name, left=len(left))

    def _sample(self) -> None:
        self.sampled = self.watcher.round
        self.journal.write(
            "sample",
            round=self.sampled,
            load=round(os.getloadavg()[0], 2),
            processes=[describe(each) for each in find_processes(self.home)],
            files=measure_files(self.home),
        )

    def _stop_all(self) -> None:
        """End everything as systemd would, and note what is left."""
        self.watcher.stop()
        for name in list(self.federation.processes):
            self._end(name, "SIGTERM")
        left = [describe(each) for each in find_processes(self.home)]
        files = measure_files(self.home)
        self.journal.write("end", round=self.watcher.round, left=left, files=files)
        flower.until(lambda: not flower._end(str(self.home)), "nothing is left", 30)

    def verify(self) -> dict[str, Any]:
        """Return everything that results/soak.json holds, with the replay's verdict."""
        settings = configure_run(self.rounds, "server") | {
            "members": len(self.members),
            "model": MODEL,
            "seed": self.seed,
            "retry": RETRY_SECONDS,
            "poll": POLL_SECONDS,
            "stall": STALL_SECONDS,
        }
        found = verify(self.journal.read(), self.files, self.folder / "replay")
        return {"settings": settings} | found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, verify and write; or write the page again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of the federation and its journal")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0, help="0: verify what is there")
    parser.add_argument("--calm", type=int, default=200, help="last rounds without events")
    parser.add_argument("--every", type=float, default=8.0, help="rounds between two events")
    parser.add_argument("--members", default=MEMBERS, help="a letter each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--note", default="", help="what is special about this session")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--draw", action="store_true", help="the page again, from the JSON")
    options = parser.parse_args(arguments)
    path = options.out / f"{NAME}.json"
    if not options.draw:
        if options.folder is None:
            parser.error("say in which folder the federation runs")
        soak = Soak(options.folder, options.members, options.rounds, options.seed, options.every)
        if options.minutes > 0:
            soak.run(options.minutes, options.calm, options.note)
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(soak.verify(), indent=1).encode())
    write_atomically(options.out / f"{NAME}.md", make_page(json.loads(path.read_text())).encode())


if __name__ == "__main__":
    main()
