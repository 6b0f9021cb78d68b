"""What a deployed server's own work costs, for many members and classes, without Flower.

    python benchmarks/server_scale.py                        # this code
    git worktree add ../before main
    python benchmarks/server_scale.py --before ../before     # old against new, in turns

Members reply at random, each with rows of a few classes; what they do themselves is not measured.
Each case runs in a process of its own, which reports the CPU time of a round's parts and how much
memory the server needed at most. Only ratios within one call are meaningful.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3  # of which the last is reported: by then all uploads are remembered
PARTS = ("request", "accept", "outliers", "close", "save")
#: Members, classes, values of a prototype, classes per member.
CASES = ((10, 10, 512, 5), (100, 10, 512, 5), (100, 100, 512, 10), (50, 1_000, 512, 10))
#: Those that take the code before too long: it copied all uploads for every reply.
LARGE_CASES = ((10_000, 10, 512, 5), (10_000, 100, 512, 10), (10_000, 1_000, 512, 10))


def measure_case(members: int, classes: int, dim: int, held: int) -> dict[str, float]:
    """Return the CPU seconds of each part of the last round, and the MB that the server needed."""
    import torch

    from fedproto.deploy.messages import Message
    from fedproto.deploy.server_state import ServerState
    from fedproto.deploy.settings import ServerSettings, TrainingTerms

    torch.set_num_threads(1)
    seconds: Counter[str] = Counter()

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        start = time.process_time()
        yield
        seconds[part] += time.process_time() - start

    names = [f"member-{number}" for number in range(members)]
    class_names = [f"class-{number}" for number in range(classes)]
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(
            state=folder,
            rounds=ROUNDS,
            classes=",".join(class_names),
            members=",".join(names),
            max_classes=max(1000, classes),
        )
        before = peak_megabytes()
        state = ServerState(settings, TrainingTerms(dim=dim))
        for round in range(1, ROUNDS + 1):
            seconds.clear()
            for number, name in enumerate(names):
                with timed("request"):
                    state.make_request(name)
                reply = make_reply(Message, name, number, round, class_names, dim, held)
                with timed("accept"):
                    expected = state.expect_reply(name, frozenset([name]))
                    state.accept_reply(name, reply, expected)
            with timed("outliers"):
                refused = state.refuse_outliers()
            assert not refused, refused
            with timed("close"):
                state.close_round()
            with timed("save"):
                state.save()
        checksum = float(state.server["prototypes"].double().sum())
        size = state.path.stat().st_size / 2**20
    needed = peak_megabytes() - before
    return {**seconds, "megabytes": needed, "file": size, "checksum": checksum}


def make_reply(
    message: Any, name: str, number: int, round: int, classes: list[str], dim: int, held: int
) -> Any:
    """Return a reply with rows of some classes; the same for every version of the code."""
    draw = np.random.default_rng([number, round])
    rows = np.sort(np.random.default_rng(number).choice(len(classes), held, replace=False))
    counts = draw.integers(5, 50, held).astype(np.float32)
    values = draw.normal(size=(held, dim)).astype(np.float32) * counts[:, None]
    arrays = {
        "prototypes/value.prototypes": values,
        "prototypes/extra.weight": counts,
        "prototypes/extra.rows": np.arange(held, dtype=np.int32),
    }
    spoken = [classes[row] for row in rows]
    return message({"member": name, "round": round, "spoken": spoken}, arrays)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_case(root: Path, case: tuple[int, ...]) -> dict[str, float]:
    """Return what a process that uses the package in a folder measures."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--case", *map(str, case)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def describe(case: tuple[int, ...], new: dict[str, float], old: dict[str, float] | None) -> str:
    """Return a row of the table: milliseconds per member and round, and megabytes."""
    members, classes, dim, held = case
    each = 1000 * sum(new[part] for part in PARTS) / members
    cells = [f"{members:,}", f"{classes:,}", str(dim), str(held)]
    if old is None:
        cells += ["", f"{each:.2f}", "", "", f"{new['megabytes']:.0f}", ""]
    else:
        if not np.isclose(new["checksum"], old["checksum"], rtol=1e-12):
            raise SystemExit(f"{case}: {new['checksum']} is not {old['checksum']}")
        before = 1000 * sum(old[part] for part in PARTS) / members
        megabytes = (old["megabytes"], new["megabytes"])
        cells += [f"{before:.2f}", f"{each:.2f}", f"{before / each:.1f}"]
        cells += [
            f"{megabytes[0]:.0f}",
            f"{megabytes[1]:.0f}",
            f"{megabytes[0] / megabytes[1]:.1f}",
        ]
    parts = ", ".join(f"{part} {1000 * new[part] / members:.2f}" for part in PARTS)
    return f"| {' | '.join(cells)} | {parts} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, help="a checkout of the code to compare with")
    parser.add_argument("--large", action="store_true", help="10,000 members, with this code only")
    parser.add_argument("--case", type=int, nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure_case(*given.case)))
        return
    head = (
        "members | classes | dim | held | ms before | ms | ratio | MB before | MB | ratio | parts"
    )
    print(f"| {head} |\n|{'---|' * 11}", flush=True)
    for case in CASES:
        old = run_case(given.before.resolve(), case) if given.before else None
        print(describe(case, run_case(ROOT, case), old), flush=True)
    for case in LARGE_CASES if given.large else ():
        print(describe(case, run_case(ROOT, case), None), flush=True)


if __name__ == "__main__":
    main()
