"""How long `fedproto run` takes until its first round is on disk, beside the import of torch.

    python -m benchmarks.first_round [TURNS]

Each turn starts three processes, one after the other: `import torch` alone (the floor), and
`fedproto run` with a perceptron and with the CNN on the data of the package (20 clients). A run's
first round is over when its line is in metrics.jsonl. Files are in the cache: the first turn is not
counted.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 0.002  # between two looks into metrics.jsonl
MODELS = ("mlp", "cnn")
FLOOR = "import torch"


class Taken(NamedTuple):
    """Seconds from the start of a process."""

    first_round: float  # until the first round's line is written
    whole: float  # until the process has ended


def time_import() -> Taken:
    """Return how long a process takes that only imports torch."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    seconds = time.perf_counter() - started
    return Taken(seconds, seconds)


def time_run(model: str, out: Path) -> Taken:
    """Return how long a run of one round takes, and when the round was done."""
    command = [sys.executable, "-m", "fedproto", "run", "--quiet", "--dataset", "mnist5k"]
    command += ["--model", model, "--rounds", "1", "--out", str(out)]
    metrics = out / "metrics.jsonl"
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    first_round = None
    while process.poll() is None:
        if first_round is None and metrics.exists() and b"\n" in metrics.read_bytes():
            first_round = time.perf_counter() - started
        time.sleep(LOOK_SECONDS)
    whole = time.perf_counter() - started
    if process.returncode or first_round is None:
        raise SystemExit(f"{' '.join(command)} failed with code {process.returncode}")
    return Taken(first_round, whole)


def measure(turns: int) -> dict[str, list[Taken]]:
    """Return the times of each turn, by what was started."""
    taken: dict[str, list[Taken]] = {name: [] for name in (FLOOR, *MODELS)}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns + 1):
            found = {FLOOR: time_import()}
            for model in MODELS:
                found[model] = time_run(model, Path(folder) / f"{model}-{turn}")
            if turn > 0:
                for name, times in found.items():
                    taken[name].append(times)
    return taken


def main() -> None:
    """Measure, and print a table of medians."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    taken = measure(turns)
    print("| | first round, s | least to most | whole process, s |")
    print("|---|---|---|---|")
    for name, times in taken.items():
        rounds = sorted(each.first_round for each in times)
        whole = statistics.median(each.whole for each in times)
        middle = statistics.median(rounds)
        print(f"| {name} | {middle:.2f} | {rounds[0]:.2f} to {rounds[-1]:.2f} | {whole:.2f} |")


if __name__ == "__main__":
    main()
