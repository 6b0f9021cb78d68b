"""What a deployed server's own work costs, for many members and classes, without Flower.

    python benchmarks/server_scale.py                        # this code
    git worktree add ../before main
    python benchmarks/server_scale.py --before ../before     # old against new, in turns

The server's own loop of rounds runs over a transport whose members reply at random, each with rows
of a few classes; what they do themselves is not measured. Each case runs in a process of its own,
which reports the CPU time of the last round by its parts, and how much memory it needed at most.
Only ratios within one call are meaningful.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3  # of which the last is reported: by then all uploads are remembered
DIM = 512  # values of a prototype
CLASSES_PER_MEMBER = 10  # or half of all classes, if that is less
#: What is timed of the server's state; `rest` is the loop around it.
PARTS = ("make_request", "accept_reply", "refuse_outliers", "close_round", "save", "rest")
MEMBERS = (10, 100, 1_000, 10_000)
CLASSES = (10, 100, 1_000)


class RoundsAreOver(Exception):
    """Ends the server's loop before it asks everybody for accuracies."""


class Stopwatch:
    """Adds up CPU seconds by part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds[part] += time.thread_time() - start


def measure_case(members: int, classes: int) -> dict[str, float]:
    """Return the CPU seconds of each part of the last round, and the MB that the server needed."""
    import torch

    from fedproto.deploy.round_protocol import serve
    from fedproto.deploy.settings import ServerSettings, TrainingTerms

    torch.set_num_threads(1)
    watch = Stopwatch()
    names = [f"member-{number}" for number in range(members)]
    class_names = [f"class-{number}" for number in range(classes)]
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(
            state=folder,
            rounds=ROUNDS + 1,
            classes=",".join(class_names),
            members=",".join(names),
            quorum=members,
            max_classes=max(1000, classes),
        )
        before = peak_megabytes()
        state = make_timed_state(watch, settings, TrainingTerms(dim=DIM))
        transport = SyntheticMembers(state, watch, names, class_names)
        with suppress(RoundsAreOver):
            serve(state, transport, lambda sentence: None)
        checksum = float(state.server["prototypes"].double().sum())
        size = state.path.stat().st_size / 2**20
    needed = peak_megabytes() - before
    seconds = transport.last_round
    seconds["rest"] = seconds.pop("whole") - sum(seconds.values())
    return {**seconds, "megabytes": needed, "file": size, "checksum": checksum}


def make_timed_state(watch: Stopwatch, settings: Any, terms: Any) -> Any:
    """Return a server's state that reports how long its methods take."""
    from fedproto.deploy.server_state import ServerState

    state = ServerState(settings, terms)

    def add_time(part: str, method: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            with watch.time(part):
                return method(*given, **named)

        return timed

    for part in PARTS:
        if part != "rest":
            setattr(state, part, add_time(part, getattr(state, part)))
    return state


class SyntheticMembers:
    """A transport to members that all reply; the time that they take is set apart."""

    def __init__(
        self, state: Any, watch: Stopwatch, names: list[str], class_names: list[str]
    ) -> None:
        self.state = state
        self.watch = watch
        self.names = names
        self.class_names = class_names
        self.began = time.thread_time()
        self.round = 0  # the one that is looked at
        self.last_round: Counter[str] = Counter()  # CPU seconds by part of the latest whole round

    def find_members(self) -> list[str]:
        """Return all members, at the beginning of a round."""
        now = time.thread_time()
        if self.state.round > self.round:
            self.watch.seconds["whole"] = now - self.began
            self.last_round = self.watch.seconds.copy()
        if self.state.round == ROUNDS:
            raise RoundsAreOver
        self.round = self.state.round
        self.watch.seconds.clear()
        self.began = now
        return self.names

    def exchange(self, kind: str, requests: Any, timeout: float) -> Iterator[Any]:
        from fedproto.deploy.server_actions import Reply

        for number, name in enumerate(self.names):
            with self.watch.time("members"):
                reply = make_reply(name, number, self.state.round + 1, self.class_names)
            yield Reply(name, reply, 0)

    def sent_bytes(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 0)

    def take_lateness(self) -> dict[str, float]:
        return {}


def make_reply(name: str, number: int, round: int, classes: list[str]) -> Any:
    """Return a reply with rows of some classes; the same for every version of the code."""
    from fedproto.deploy.messages import Message

    held = min(CLASSES_PER_MEMBER, len(classes) // 2)
    draw = np.random.default_rng([number, round])
    rows = np.sort(np.random.default_rng(number).choice(len(classes), held, replace=False))
    counts = draw.integers(5, 50, held).astype(np.float32)
    values = draw.normal(size=(held, DIM)).astype(np.float32) * counts[:, None]
    arrays = {
        "prototypes/value.prototypes": values,
        "prototypes/extra.weight": counts,
        "prototypes/extra.rows": np.arange(held, dtype=np.int32),
    }
    spoken = [classes[row] for row in rows]
    return Message({"member": name, "round": round, "spoken": spoken}, arrays)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_case(root: Path, case: tuple[int, int]) -> dict[str, float]:
    """Return what a process that uses the package in a folder measures."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--case", *map(str, case)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def describe(case: tuple[int, int], new: dict[str, float], old: dict[str, float] | None) -> str:
    """Return a row of the table: milliseconds per member and round, and megabytes."""
    members, classes = case
    cells = [f"{members:,}", f"{classes:,}"]
    each = 1000 * sum(new[part] for part in PARTS) / members
    if old is None:
        cells += ["", f"{each:.2f}", "", "", f"{new['megabytes']:.0f}"]
    else:
        if not np.isclose(new["checksum"], old["checksum"], rtol=1e-12):
            raise SystemExit(f"{case}: {new['checksum']} is not {old['checksum']}")
        before = 1000 * sum(old[part] for part in PARTS) / members
        cells += [f"{before:.2f}", f"{each:.2f}", f"{before / each:.1f}"]
        cells += [f"{old['megabytes']:.0f}", f"{new['megabytes']:.0f}"]
    cells.append(f"{new['file']:.1f}")
    cells.append(", ".join(f"{part} {1000 * new[part] / members:.3f}" for part in PARTS))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="a checkout of the code to compare with")
    parser.add_argument("--members", type=int, nargs="+", default=MEMBERS)
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--case", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure_case(*given.case)))
        return
    head = (
        "members | classes | ms before | ms | ratio | MB before | MB | file, MB | parts of ms after"
    )
    print(f"| {head} |\n|{'---|' * 9}", flush=True)
    for members in given.members:
        for classes in given.classes:
            case = (members, classes)
            old = run_case(given.before.resolve(), case) if given.before else None
            print(describe(case, run_case(ROOT, case), old), flush=True)


if __name__ == "__main__":
    main()
