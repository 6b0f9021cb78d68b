"""Members that share nothing but the names of ten digits: half hold 28x28 MNIST images, half 8x8 UCI digits.

No architecture and no image size is common to both halves, so no weight could be averaged. Does FedProto still help?
This trains the federation and, from the same start on the same images, every member alone; and, to see what the other
half brings, each half as a federation of its own.

    python examples/mixed_inputs.py [SEEDS] [ROUNDS]      # minutes; README.md shows what 3 seeds and 100 rounds gave
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence

import fedproto


def accuracies(key: str, *results: fedproto.Result) -> list[float]:
    """Every client's accuracy, in %."""
    return [100 * client["accuracy"][key] for result in results for client in result.clients]


def trained(datasets: Sequence[str], seed: int, rounds: int) -> dict[str, list[float]]:
    """One seed: each way to train and to predict, and the accuracy of ten members of each data set."""
    with tempfile.TemporaryDirectory() as folder:
        start = {"seed": seed, "rounds": rounds, "eval_every": rounds}
        mix = start | {"dataset": ",".join(f"{name}*10" for name in datasets), "shots": 5, "shots_stdev": 0}
        alone = fedproto.run(algorithm="local", **mix, out=f"{folder}/alone")
        together = fedproto.run(algorithm="fedproto", **mix)
        half = start | {"clients": 10, "partition": f"file:{folder}/alone/partition.json"}  # the same rows again
        apart = [fedproto.run(algorithm="fedproto", dataset=dataset, **half) for dataset in datasets]
    return {
        "alone, head": accuracies("head", alone),
        "together, head": accuracies("head", together),
        "together, prototype": accuracies("prototype", together),
        "each half apart, head": accuracies("head", *apart),
        "each half apart, prototype": accuracies("prototype", *apart),
    }


def compare(halves: dict[str, str], seeds: int = 3, rounds: int = 100) -> None:
    """Print what each half, named with its data set, makes of each way to train."""
    runs = [trained(list(halves.values()), seed, rounds) for seed in range(seeds)]
    print(f"accuracy in %, mean over members: 5 images a class, {rounds} rounds, seeds 0 to {seeds - 1}, their mean")
    for name in runs[0]:
        for position, half in enumerate(halves):
            means = [statistics.fmean(run[name][10 * position : 10 * position + 10]) for run in runs]
            print(f"{name:27} {half:12}", *(f"{mean:6.1f}" for mean in means), f"   {statistics.fmean(means):6.1f}")


if __name__ == "__main__":
    compare({"MNIST 28x28": "mnist5k", "digits 8x8": "digits"}, *map(int, sys.argv[1:]))
