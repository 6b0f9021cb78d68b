"""Accuracy against epsilon of privacy=training: what private steps cost FedProto, FedAvg and Local.

10 clients with 3 classes and 100 rows of each; a perceptron with 32 hidden units; 10 rounds of one
epoch with batches of 30 records on average; gradients and embeddings clipped to norm 1. The rates
were chosen by a few runs on MNIST with another model, so they are not covered by the claim.
results/privacy-training.* were written by it.

    python3 -m benchmarks.private_training          # some 10 minutes on one core
    python3 -m benchmarks.private_training --draw   # the page again, from the .json

MNIST and Fashion-MNIST are read from $FEDPROTO_DATA. The .json is written after each run; called
again, the script measures only what it lacks.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import fedproto
from fedproto.core.files import write_atomically

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "privacy-training"
DATASETS = ("mnist", "fashion-mnist")
EPSILONS = (8.0, 2.0)
SEEDS = (0, 1, 2, 3, 4)
DELTA = 1e-5
SETTINGS: dict[str, Any] = {
    "clients": 10,
    "ways": 3,
    "stdev": 0,
    "shots": 100,
    "test_shots": 40,
    "rounds": 10,
    "batch": 30,
    "momentum": 0.0,
    "model": "mlp(hidden=32)",
    "engine": "vectorised",
    "eval_every": 1000,
}


class Method(NamedTuple):
    """A line of the table."""

    name: str
    settings: dict[str, Any]
    way: str  # which accuracy is shown


METHODS = (
    Method("FedProto", {"algorithm": "fedproto", "absent": "drop", "lr": 0.4}, "prototype"),
    Method("FedProto, head", {"algorithm": "fedproto", "absent": "drop", "lr": 0.4}, "head"),
    Method("Local", {"algorithm": "local", "lr": 0.4}, "head"),
    Method("FedAvg", {"algorithm": "fedavg", "lr": 1.0}, "head"),
)


def name_run(dataset: str, algorithm: str, epsilon: float, seed: int) -> str:
    return f"{dataset} | {algorithm} | epsilon {epsilon:g} | seed {seed}"


def measure(dataset: str, method: Method, epsilon: float, seed: int) -> dict[str, Any]:
    """Return the accuracies of one run, as fractions, what it spent, and its noise."""
    settings = SETTINGS | method.settings
    settings |= {"privacy": "training", "epsilon": epsilon, "delta": DELTA}
    started = time.perf_counter()
    result = fedproto.run(dataset=dataset, seed=seed, **settings)
    claim = result.data["privacy"]
    assert claim["holds"] and claim["epsilon"] <= epsilon
    return {
        "accuracy": {name: each["mean"] for name, each in result.accuracy.items()},
        "spent": claim["epsilon"],
        "mechanism": claim["mechanism"],
        "seconds": time.perf_counter() - started,
    }


def measure_all(path: Path, until: float) -> dict[str, Any]:
    """Measure what the .json lacks, seed by seed, until a time; return everything."""
    found: dict[str, Any] = {"delta": DELTA, "settings": SETTINGS, "runs": {}}
    if path.exists():
        found = json.loads(path.read_text())
    for seed in SEEDS:
        for dataset in DATASETS:
            for epsilon in EPSILONS:
                for method in METHODS:
                    key = name_run(dataset, method.settings["algorithm"], epsilon, seed)
                    if key in found["runs"] or time.time() > until:
                        continue
                    found["runs"][key] = measure(dataset, method, epsilon, seed)
                    write_atomically(path, json.dumps(found, indent=1).encode())
                    seconds = found["runs"][key]["seconds"]
                    print(f"{key}: {seconds:.0f} s", flush=True)
    return found


def list_values(
    found: dict[str, Any], dataset: str, method: Method, epsilon: float, which: str
) -> list[float]:
    """Return the accuracy of each seed that was measured, in %."""
    values = []
    for seed in SEEDS:
        run = found["runs"].get(name_run(dataset, method.settings["algorithm"], epsilon, seed))
        if run is not None:
            values.append(100 * run["accuracy"][f"{method.way}{which}"])
    return values


def make_page(found: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines = [
        "# Accuracy against epsilon of `privacy=training`",
        "",
        "Test accuracy in %, mean over clients, then mean ± standard deviation over seeds (their "
        "number in brackets). 10 clients with 3 classes and 100 rows of each, a perceptron with 32 "
        "hidden units, 10 rounds of one epoch, batches of 30 records on average, gradients and "
        f"embeddings clipped to norm 1, record-level epsilon over the whole run, delta {DELTA:g}. "
        "The rates are for clipped gradients; runs without protection need smaller ones and have "
        "no column here. – was not measured. *own*: among the client's own classes; *all*: "
        "among all ten. Made by `python3 -m benchmarks.private_training`.",
    ]
    headers = ["method", *(f"epsilon {each:g}" for each in EPSILONS)]
    for dataset in DATASETS:
        for which, title in (("_own", "own"), ("", "all")):
            lines += ["", f"## {dataset}, {title} classes", "", f"| {' | '.join(headers)} |"]
            lines.append("|" + "---|" * len(headers))
            for method in METHODS:
                cells = [method.name]
                for epsilon in EPSILONS:
                    values = list_values(found, dataset, method, epsilon, which)
                    cell = "–"
                    if len(values) == 1:
                        cell = f"{values[0]:.1f} (1)"
                    elif values:
                        cell = f"{fmean(values):.1f} ± {pstdev(values):.1f} ({len(values)})"
                    cells.append(cell)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf)
    arguments = parser.parse_args()
    path = arguments.out / f"{NAME}.json"
    if arguments.draw:
        found = json.loads(path.read_text())
    else:
        found = measure_all(path, time.time() + 60 * arguments.minutes)
    write_atomically(path.with_suffix(".md"), make_page(found).encode())


if __name__ == "__main__":
    main()
