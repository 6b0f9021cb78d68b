"""What a deployed round costs beyond training.

Three members with a few images each run in real processes, with TLS and keys.

    python benchmarks/deploy_overhead.py    # two minutes, on a machine that does nothing else
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers.flower import MODELS, Run, deployed, digits

import fedproto
from fedproto.deploy.flower_transport import POLL_SECONDS

ROUNDS = 5

#: A `sitecustomize.py` that every process of a member reads. The process that answers notes, for
#: each round, when it was started, when it was asked, and when it had answered.
NOTE_TIMES = """
import pathlib, sys, time
if any("flwr-clientapp" in word for word in sys.orig_argv):
    started = time.time()
    from fedproto.deploy import member
    train_round = member.train_round
    def train_and_note(message, own):
        asked = time.time()
        reply = train_round(message, own)
        with (pathlib.Path(__file__).parent / "times").open("a") as file:
            file.write(f"{message.header['round']} {started} {asked} {time.time()}\\n")
        return reply
    member.train_round = train_and_note
"""

#: The parts of a member's time in a round: between two rounds of the server, with its three notes.
PARTS = ("until started", "until asked", "to answer", "until counted")


def time_import(module: str) -> float:
    """Return the seconds of a process that imports the module and ends; the best of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def run_deployed(folder: Path, files: dict[str, dict[str, str]]) -> tuple[Run, list[list[float]]]:
    """Return the finished run and the members' notes: round, started, asked, answered."""
    (folder / "sitecustomize.py").write_text(NOTE_TIMES)
    with deployed(folder / "federation", files, PYTHONPATH=str(folder)) as federation:
        run = federation.run(rounds=ROUNDS, quorum=3, timeout=300.0)
    lines = (folder / "times").read_text().splitlines()
    return run, [_read_note(line) for line in lines]


def _read_note(line: str) -> list[float]:
    return [float(word) for word in line.split()]


def split_times(run: Run, notes: list[list[float]]) -> dict[str, float]:
    """Return the median seconds of each part of a member's round, without the first round."""
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for number, *member_times in notes:
        round = int(number)
        if round == 1:
            continue
        times = [run.times[round - 1], *member_times, run.times[round]]
        for part, (earlier, later) in zip(PARTS, pairwise(times), strict=True):
            seconds[part].append(later - earlier)
    return {part: statistics.median(values) for part, values in seconds.items()}


def main() -> None:
    """Print the report as JSON."""
    modules = ("sys", "flwr.clientapp", "torch", "fedproto.deploy.member")
    imports = {module: time_import(module) for module in modules}
    with tempfile.TemporaryDirectory() as name:
        files, arrays = digits(Path(name))
        run, notes = run_deployed(Path(name), files)
    models = ",".join(f"{model}*1" for model in MODELS.values())
    simulated = fedproto.run(
        dataset=arrays, model=models, rounds=ROUNDS, dim=50, engine="reference"
    )
    seconds = [run.times[round] - run.times[round - 1] for round in range(2, ROUNDS + 1)]
    _, header = run.rounds[ROUNDS]
    record_bytes = {}
    for direction in ("bytes_up", "bytes_down"):
        record_bytes[direction] = sum(record[direction] for record in header["members"].values())
    report: dict[str, Any] = {
        "seconds of rounds 2 to 5": seconds,
        "seconds of a round in the simulator": simulated.data["seconds"]["per_round"],
        "a member's process in a round, medians": split_times(run, notes),
        "seconds of a process that imports": imports,
        "seconds between our polls for replies": POLL_SECONDS,
        "bytes of records": record_bytes,
        "bytes Flower counts, the app and the last accuracies included": run.traffic,
        "bytes of the simulator's ledger": simulated.communication,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
