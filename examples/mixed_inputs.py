"""Members that share nothing but the names of ten digits: half hold 28x28 MNIST images, half 8x8 UCI digits.

No architecture, no pixel and no image size is common to both halves, so no weight could be averaged. Does FedProto still
help? This trains the federation and, from the same start on the same images, every member alone; and, to see where a gain
comes from, each half as a federation of its own.

    python examples/mixed_inputs.py [SEEDS] [ROUNDS]
"""

import statistics
import sys

import fedproto

MIX = "mnist5k*10,digits*10"


def accuracies(dataset: str, algorithm: str, seed: int, rounds: int, **options) -> list[float]:
    """Each client's accuracy among its own classes: FedProto's by nearest prototype, that of training alone by head."""
    result = fedproto.run(
        dataset=dataset, algorithm=algorithm, seed=seed, rounds=rounds, shots=5, shots_stdev=0, eval_every=rounds, **options
    )
    key = "prototype_own" if "prototype_own" in result.accuracy else "head_own"
    return [100 * client["accuracy"][key] for client in result.clients]


def main(seeds: int = 3, rounds: int = 60) -> None:
    print(f"{rounds} rounds, 5 training images a class; accuracy in %, mean over members, for seeds 0 to {seeds - 1}")
    rows: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        runs = {
            "alone": accuracies(MIX, "local", seed, rounds),
            "FedProto, both halves together": accuracies(MIX, "fedproto", seed, rounds),
            "FedProto, each half by itself": accuracies("mnist5k", "fedproto", seed, rounds, clients=10)
            + accuracies("digits", "fedproto", seed, rounds, clients=10),
        }
        for name, values in runs.items():
            rows.setdefault(name, []).append((statistics.fmean(values[:10]), statistics.fmean(values[10:])))
    for name, pairs in rows.items():
        for half, values in zip(("MNIST 28x28", "digits 8x8"), zip(*pairs, strict=True), strict=True):
            shown = " ".join(f"{value:5.1f}" for value in values)
            print(f"{name:32} {half:12} {shown}   mean {statistics.fmean(values):5.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
