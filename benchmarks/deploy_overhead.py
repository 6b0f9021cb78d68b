"""What a deployed round costs beyond training: three members with a few images, in real processes with TLS and keys.

python benchmarks/deploy_overhead.py        # two minutes, on a machine that does nothing else
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers.flower import MODELS, deployed, digits

import fedproto
from fedproto.deploy.flower_transport import POLL_SECONDS

ROUNDS = 5

#: Read by every process of a member's; the one that answers notes when it began, was asked, and had answered.
NOTES = """
import pathlib, sys, time
if any("flwr-clientapp" in word for word in sys.orig_argv):
    began = time.time()
    from fedproto.deploy import member
    true = member.train_round
    def noted(parcel, own):
        asked = time.time()
        told = true(parcel, own)
        with (pathlib.Path(__file__).parent / "times").open("a") as file:
            file.write(f"{parcel.header['round']} {began} {asked} {time.time()}\\n")
        return told
    member.train_round = noted
"""


def started(module: str) -> float:
    """Seconds of a process that imports it and ends; the best of three."""
    times = [time.perf_counter()]
    for _ in range(3):
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        times.append(time.perf_counter())
    return min(later - earlier for earlier, later in pairwise(times))


def main() -> None:
    imports = {
        name: started(name) for name in ("sys", "flwr.clientapp", "torch", "fedproto.deploy.member")
    }
    with tempfile.TemporaryDirectory() as made:
        files, arrays = digits(Path(made))
        (Path(made) / "sitecustomize.py").write_text(NOTES)
        with deployed(Path(made) / "federation", files, PYTHONPATH=made) as federation:
            run = federation.run(rounds=ROUNDS, quorum=3, timeout=300.0)
        times = [
            tuple(map(float, line.split()))
            for line in (Path(made) / "times").read_text().splitlines()
        ]
    split: dict[str, list[float]] = {
        "until begun": [],
        "until asked": [],
        "to answer": [],
        "until counted": [],
    }
    for number, *stamps in (line for line in times if line[0] > 1):
        points = [run.times[int(number) - 1], *stamps, run.times[int(number)]]
        for part, (earlier, later) in zip(split.values(), pairwise(points), strict=True):
            part.append(later - earlier)
    rounds = [run.times[number] - run.times[number - 1] for number in range(2, ROUNDS + 1)]
    models = ",".join(f"{model}*1" for model in MODELS.values())
    simulated = fedproto.run(
        dataset=arrays, model=models, rounds=ROUNDS, dim=50, engine="reference"
    )
    seats = run.rounds[ROUNDS][1]["members"].values()
    report = {
        "seconds of rounds 2 to 5": rounds,
        "seconds of a round in the simulator": simulated.data["seconds"]["per_round"],
        "a member's process in a round, medians": {
            part: statistics.median(found) for part, found in split.items()
        },
        "seconds of a process that imports": imports,
        "seconds between our looks for answers": POLL_SECONDS,
        "bytes of records": {
            way: sum(seat[way] for seat in seats) for way in ("bytes_up", "bytes_down")
        },
        "bytes Flower counts, the app and the last accuracies included": run.traffic,
        "bytes of the simulator's ledger": simulated.communication,
    }
    print(json.dumps(report, indent=2))


main()
