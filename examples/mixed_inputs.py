"""Train clients that share only the names of ten digits: half have MNIST images, half UCI digits.

MNIST's images are 28x28, UCI's 8x8. The halves have no architecture and no image size in common,
so no weights could be averaged. Does FedProto still help? This trains the federation; every client
alone, from the same start on the same images; and, to see what the other half contributes, each
half as a federation of its own.

    python examples/mixed_inputs.py [SEEDS] [ROUNDS] [FOLDER]     # minutes; default: 5 100

With a FOLDER it also writes mixed-inputs.json, the accuracy of every client, and mixed-inputs.md,
the table that README.md cites: `python examples/mixed_inputs.py 5 100 results`.
"""

import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fedproto
from fedproto.core.files import write_atomically
from fedproto.reproduce.statistics import (
    ACCURACY_MARGIN,
    Measurement,
    decide_family,
    exact,
    mean_interval,
)
from fedproto.reproduce.statistics import compare as compare_seeds

CLIENTS_PER_HALF = 10
#: What is compared: the name of a difference, then the two ways to train and predict.
QUESTIONS = (
    ("together − alone, by the head", "together, head", "alone, head"),
    ("together − each half apart, by the head", "together, head", "each half apart, head"),
    (
        "together − each half apart, by the prototype",
        "together, prototype",
        "each half apart, prototype",
    ),
)


def accuracies(key: str, *results: fedproto.Result) -> list[float]:
    """Return the accuracy of every client, in percent."""
    clients = [client for result in results for client in result.clients]
    return [100 * client["accuracy"][key] for client in clients]


def train(datasets: Sequence[str], seed: int, rounds: int) -> dict[str, list[float]]:
    """Run one seed; return the clients' accuracies for each way to train and to predict.

    Ten clients have the first data set, the next ten the second one.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = {"seed": seed, "rounds": rounds, "eval_every": rounds}
        mixed_dataset = ",".join(f"{name}*{CLIENTS_PER_HALF}" for name in datasets)
        mix = start | {"dataset": mixed_dataset, "shots": 5, "shots_stdev": 0}
        alone = fedproto.run(algorithm="local", **mix, out=f"{folder}/alone")
        together = fedproto.run(algorithm="fedproto", **mix)
        same_rows = f"file:{folder}/alone/partition.json"
        half = start | {"clients": CLIENTS_PER_HALF, "partition": same_rows}
        apart = [
            fedproto.run(algorithm="fedproto", dataset=dataset, **half) for dataset in datasets
        ]
    return {
        "alone, head": accuracies("head", alone),
        "together, head": accuracies("head", together),
        "together, prototype": accuracies("prototype", together),
        "each half apart, head": accuracies("head", *apart),
        "each half apart, prototype": accuracies("prototype", *apart),
    }


def measure(halves: dict[str, str], seeds: int, rounds: int) -> dict[str, Any]:
    """Return everything that is measured.

    For each seed, way to train and half, that is the accuracy of every client in percent.
    """
    runs = []
    for seed in range(seeds):
        trained = train(list(halves.values()), seed, rounds)
        by_half = {way: _split_halves(values, list(halves)) for way, values in trained.items()}
        runs.append({"seed": seed, "accuracy": by_half})
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    return {"halves": halves, "rounds": rounds, "machine": machine, "runs": runs}


def _split_halves(values: list[float], halves: Sequence[str]) -> dict[str, list[float]]:
    """Return the clients' accuracies by the half they belong to."""
    rounded = [round(value, 3) for value in values]
    by_half = {}
    for position, half in enumerate(halves):
        start = CLIENTS_PER_HALF * position
        by_half[half] = rounded[start : start + CLIENTS_PER_HALF]
    return by_half


def seed_means(found: dict[str, Any], way: str, half: str) -> dict[int, float]:
    """Return the mean accuracy of a half's clients, for each seed."""
    return {run["seed"]: statistics.fmean(run["accuracy"][way][half]) for run in found["runs"]}


def show(found: dict[str, Any]) -> str:
    """Return a line per way to train and half: the mean of each seed, then the mean of all."""
    seeds = len(found["runs"])
    lines = [
        f"accuracy in %, mean over clients: 5 images per class, {found['rounds']} rounds, "
        f"seeds 0 to {seeds - 1}, their mean"
    ]
    for way in found["runs"][0]["accuracy"]:
        for half in found["halves"]:
            means = list(seed_means(found, way, half).values())
            each = " ".join(f"{mean:6.1f}" for mean in means)
            lines.append(f"{way:27} {half:12} {each}    {statistics.fmean(means):6.1f}")
    return "\n".join(lines)


def markdown(found: dict[str, Any]) -> str:
    """Return the page of results/mixed-inputs.md, from what `measure` returned."""
    halves = list(found["halves"])
    lines = ["| " + _row(halves), "|" + "---|" * (len(halves) + 1)]
    for way in found["runs"][0]["accuracy"]:
        cells = [way]
        for half in halves:
            mean, half_width = mean_interval(list(seed_means(found, way, half).values()))
            cells.append(f"{mean:.2f} ± {half_width:.2f}")
        lines.append(_row(cells))
    accuracy_table = "\n".join(lines)
    seeds = [str(run["seed"]) for run in found["runs"]]
    return f"""# Members with different input shapes

Ten members with 28x28 MNIST images and a CNN, ten with 8x8 UCI digits and a perceptron, 5 \
training images per class,
{found["rounds"]} rounds. Seeds {", ".join(seeds)}; the last round is reported; nothing was \
selected on test data. Made
by `python examples/mixed_inputs.py {len(seeds)} {found["rounds"]} results` on {found["machine"]}.

Accuracy in percent over all ten classes, mean over members and seeds ± the half-width of the 95% \
interval over seeds:

{accuracy_table}

Differences in points, paired by seed. The outcome is "better" or "worse" (Student's paired test), \
"equivalent" (two
one-sided tests, within ± {ACCURACY_MARGIN} points) or "undecided", each corrected by Holm over \
the six differences:

{_differences(found)}
"""


def _row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def _differences(found: dict[str, Any]) -> str:
    """Return the table of differences, in points."""
    labels = []
    comparisons = []
    for name, first, second in QUESTIONS:
        for half in found["halves"]:
            ours = _exact_means(found, first, half)
            theirs = _exact_means(found, second, half)
            comparisons.append(compare_seeds(ours, theirs, margin=ACCURACY_MARGIN))
            labels.append((name, half))
    lines = [_row(["difference", "half", "points", "outcome"]), "|---|---|---|---|"]
    for label, decision in zip(labels, decide_family(comparisons), strict=True):
        lines.append(_row([*label, decision.comparison.text(), decision.outcome.value]))
    return "\n".join(lines)


def _exact_means(found: dict[str, Any], way: str, half: str) -> dict[tuple[str, int], Measurement]:
    """Return the means by seed as measurements that are known exactly."""
    means = seed_means(found, way, half)
    return exact({(half, seed): mean for seed, mean in means.items()})


def compare(halves: dict[str, str], seeds: int = 5, rounds: int = 100) -> dict[str, Any]:
    """Measure and print the accuracy of each half, given by name with its data set."""
    found = measure(halves, seeds, rounds)
    print(show(found))
    return found


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:3]]
    measured = compare({"MNIST 28x28": "mnist5k", "digits 8x8": "digits"}, *numbers)
    if len(sys.argv) > 3:
        folder = Path(sys.argv[3])
        content = json.dumps(measured) + "\n"
        write_atomically(folder / "mixed-inputs.json", content.encode())
        write_atomically(folder / "mixed-inputs.md", markdown(measured).encode())
