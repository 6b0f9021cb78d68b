"""Members that share nothing but the names of ten digits: half hold 28x28 MNIST images, half 8x8 UCI digits.

No architecture and no image size is common to both halves, so no weight could be averaged. Does FedProto still help?
This trains the federation and, from the same start on the same images, every member alone; and, to see what the other
half brings, each half as a federation of its own.

    python examples/mixed_inputs.py [SEEDS] [ROUNDS] [FOLDER]     # minutes; 5 seeds and 100 rounds unless told

With a FOLDER it also writes mixed-inputs.json, every member's accuracy, and mixed-inputs.md, the table that README.md
cites: `python examples/mixed_inputs.py 5 100 results`.
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
from fedproto.reproduce.statistics import ACCURACY_MARGIN, decide_family, exact, mean_interval
from fedproto.reproduce.statistics import compare as compare_seeds

MEMBERS = 10  # of each half
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
    """Every client's accuracy, in %."""
    return [100 * client["accuracy"][key] for result in results for client in result.clients]


def train(datasets: Sequence[str], seed: int, rounds: int) -> dict[str, list[float]]:
    """One seed: each way to train and to predict, and the accuracy of ten members of each data set."""
    with tempfile.TemporaryDirectory() as folder:
        start = {"seed": seed, "rounds": rounds, "eval_every": rounds}
        mixed_dataset = ",".join(f"{name}*{MEMBERS}" for name in datasets)
        mix = start | {"dataset": mixed_dataset, "shots": 5, "shots_stdev": 0}
        alone = fedproto.run(algorithm="local", **mix, out=f"{folder}/alone")
        together = fedproto.run(algorithm="fedproto", **mix)
        same_rows = f"file:{folder}/alone/partition.json"
        half = start | {"clients": MEMBERS, "partition": same_rows}
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
    """Everything that was measured: for each seed, way to train and half, every member's accuracy in %."""
    runs = []
    for seed in range(seeds):
        trained = train(list(halves.values()), seed, rounds)
        by_half = {way: _split(values, list(halves)) for way, values in trained.items()}
        runs.append({"seed": seed, "accuracy": by_half})
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    return {"halves": halves, "rounds": rounds, "machine": machine, "runs": runs}


def _split(values: list[float], halves: Sequence[str]) -> dict[str, list[float]]:
    """The members' accuracies by the half they belong to."""
    starts = {half: MEMBERS * position for position, half in enumerate(halves)}
    return {
        half: [round(value, 3) for value in values[start : start + MEMBERS]]
        for half, start in starts.items()
    }


def seed_means(found: dict[str, Any], way: str, half: str) -> dict[int, float]:
    """The mean over a half's members, for each seed."""
    return {run["seed"]: statistics.fmean(run["accuracy"][way][half]) for run in found["runs"]}


def show(found: dict[str, Any]) -> str:
    """A line per way to train and half: the mean of each seed, then the mean of all."""
    seeds = len(found["runs"])
    lines = [
        f"accuracy in %, mean over members: 5 images a class, {found['rounds']} rounds, "
        f"seeds 0 to {seeds - 1}, their mean"
    ]
    for way in found["runs"][0]["accuracy"]:
        for half in found["halves"]:
            means = list(seed_means(found, way, half).values())
            each = " ".join(f"{mean:6.1f}" for mean in means)
            lines.append(f"{way:27} {half:12} {each}    {statistics.fmean(means):6.1f}")
    return "\n".join(lines)


def markdown(found: dict[str, Any]) -> str:
    """The page of results/mixed-inputs.md, from what `measure` returned."""
    halves = list(found["halves"])
    header = f"| | {' | '.join(halves)} |\n|{'---|' * (len(halves) + 1)}"
    ways = []
    for way in found["runs"][0]["accuracy"]:
        numbers = [mean_interval(list(seed_means(found, way, half).values())) for half in halves]
        ways.append(
            f"| {way} | {' | '.join(f'{mean:.2f} ± {half:.2f}' for mean, half in numbers)} |"
        )
    seeds = [str(run["seed"]) for run in found["runs"]]
    return f"""# Members with different input shapes

Ten members with 28x28 MNIST images and a CNN, ten with 8x8 UCI digits and a perceptron, 5 training images per class,
{found["rounds"]} rounds. Seeds {", ".join(seeds)}; the last round is reported; nothing was selected on test data. Made
by `python examples/mixed_inputs.py {len(seeds)} {found["rounds"]} results` on {found["machine"]}.

Accuracy in percent over all ten classes, mean over members and seeds ± the half-width of the 95% interval over seeds:

{header}
{chr(10).join(ways)}

Differences in points, paired by seed. The outcome is "better" or "worse" (Student's paired test), "equivalent" (two
one-sided tests, within ± {ACCURACY_MARGIN} points) or "undecided", each corrected by Holm over the six differences:

{_differences(found)}
"""


def _differences(found: dict[str, Any]) -> str:
    rows = []
    for name, first, second in QUESTIONS:
        for half in found["halves"]:
            ours, theirs = (
                exact({(half, seed): mean for seed, mean in seed_means(found, way, half).items()})
                for way in (first, second)
            )
            comparison = compare_seeds(ours, theirs, margin=ACCURACY_MARGIN)
            rows.append((name, half, comparison))
    decided = decide_family([comparison for _, _, comparison in rows])
    lines = ["| difference | half | points | outcome |", "|---|---|---|---|"]
    for (name, half, _), decision in zip(rows, decided, strict=True):
        lines.append(
            f"| {name} | {half} | {decision.comparison.text()} | {decision.outcome.value} |"
        )
    return "\n".join(lines)


def compare(halves: dict[str, str], seeds: int = 5, rounds: int = 100) -> dict[str, Any]:
    """Print what each half, named with its data set, makes of each way to train."""
    found = measure(halves, seeds, rounds)
    print(show(found))
    return found


if __name__ == "__main__":
    numbers, folders = sys.argv[1:3], sys.argv[3:4]
    measured = compare({"MNIST 28x28": "mnist5k", "digits 8x8": "digits"}, *map(int, numbers))
    for folder in folders:
        write_atomically(Path(folder, "mixed-inputs.json"), (json.dumps(measured) + "\n").encode())
        write_atomically(Path(folder, "mixed-inputs.md"), markdown(measured).encode())
