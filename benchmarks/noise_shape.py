"""Shaped against equal noise: what noise that follows each coordinate's size gains at one epsilon.

FedProto's class means with a fixed encoder, `privacy=release`, noise at the clients, one release:
20 clients of MNIST with 3 classes and 100 rows of each. Three encoders: pixels (14 x 14, of which
many are always black), a random convolutional network (the body of `cnn`, frozen) and 64 random
projections (whose coordinates are nearly alike). results/noise-shape.* were written by it.

    nice -n 10 python3 -m benchmarks.noise_shape    # a minute on one core

MNIST is read from $FEDPROTO_DATA.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedproto
from fedproto.core.files import write_atomically
from fedproto.data import DataFolders
from fedproto.data.mnist import mnist
from fedproto.feature_maps import Inputs, compute_features
from fedproto.feature_maps.random_projection import random_projection
from fedproto.models import Classifier

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "noise-shape"
EPSILONS = (math.inf, 1.0, 0.5, 0.25)
DELTA = 1e-5
SHAPES = ("equal", "variance")
SEEDS = (0, 1, 2)
TRAIN_ROWS = 14_000
TEST_ROWS = 2000
SHAPE = (1, 28, 28)
SETTINGS = {
    "clients": 20,
    "ways": 3,
    "shots": 100,
    "stdev": 0,
    "test_shots": 40,
    "rounds": 1,
    "batch": 100,
    "freeze": "body",
    "absent": "drop",
}
#: What is handed over as images, by encoder.
ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels": lambda x: F.avg_pool2d(x, 2),
    "random network": lambda x: x,
    "random projections": lambda x: compute_features(
        random_projection(values=64).build(Inputs(SHAPE)), x
    ).reshape(-1, 1, 8, 8),
}

Rows = tuple[Any, ...]  # x, y, x_test, y_test


def load_rows(encode: Callable[[Tensor], Tensor]) -> Rows:
    """Return the rows of MNIST that are used, encoded; the same for all seeds."""
    source = mnist(DataFolders())
    generator = np.random.default_rng(0)
    parts: list[Any] = []
    for split, count in ((source.train, TRAIN_ROWS), (source.test, TEST_ROWS)):
        chosen = generator.permutation(len(split.y))[:count]
        x = torch.as_tensor(np.asarray(split.x[chosen])).float().reshape(-1, *SHAPE)
        x = x / 255 if float(x.max()) > 1 else x
        parts += [encode(x).numpy(), np.asarray(split.y[chosen])]
    return tuple(parts)


def choose_model(encoder: str, rows: Rows) -> Any:
    """Return the model: one whose body changes nothing, or a random one."""
    if encoder == "random network":
        return "cnn"
    return Classifier(nn.Flatten(), nn.Linear(math.prod(rows[0].shape[1:]), 10))


def measure(encoder: str, rows: Rows, shape: str, epsilon: float, seed: int) -> dict[str, float]:
    """Return the accuracies of one run by the nearest prototype, as fractions."""
    private: dict[str, Any] = {}
    if math.isfinite(epsilon):
        private = {
            "privacy": "release",
            "epsilon": epsilon,
            "delta": DELTA,
            "noise_shape": shape,
        }
    result = fedproto.run(
        algorithm="fedproto",
        dataset=rows,
        model=choose_model(encoder, rows),
        partition="nway",
        seed=seed,
        engine="vectorised",
        **SETTINGS,
        **private,
    )
    claim = result.data.get("privacy", {"epsilon": 0.0, "holds": True})
    assert claim["holds"] and claim["epsilon"] <= epsilon
    return {
        "all": result.accuracy["prototype"]["mean"],
        "own": result.accuracy["prototype_own"]["mean"],
    }


def measure_all(seeds: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Return the accuracies of all runs, by their names."""
    runs = {}
    for encoder, encode in ENCODERS.items():
        rows = load_rows(encode)
        started = time.perf_counter()
        for shape in SHAPES:
            for epsilon in EPSILONS:
                if math.isinf(epsilon) and shape != SHAPES[0]:
                    continue  # without noise there is nothing to shape
                for seed in seeds:
                    key = name_run(encoder, shape, epsilon, seed)
                    runs[key] = measure(encoder, rows, shape, epsilon, seed)
        print(f"{encoder}: {time.perf_counter() - started:.0f} s", flush=True)
    return runs


def name_run(encoder: str, shape: str, epsilon: float, seed: int) -> str:
    """Return the key of a run in the .json."""
    return f"{encoder} | {shape} | epsilon {epsilon:g} | seed {seed}"


def write_page(runs: dict[str, dict[str, float]], out: Path, seeds: tuple[int, ...]) -> None:
    """Write the table: mean and standard deviation over seeds, and who wins in how many."""
    lines = [
        "# Shaped against equal noise",
        "",
        "FedProto's class means with a fixed encoder on MNIST, `privacy=release`, noise at the "
        "clients, one release, 20 clients with 3 classes and 100 rows of each, delta "
        f"{DELTA:g}; by `python3 -m benchmarks.noise_shape`. Test accuracy in % by the nearest "
        f"prototype over all classes, mean ± standard deviation over {len(seeds)} seeds; `wins` is "
        "how many of them are better with shaped noise. An epsilon of ∞ has no clipping and no "
        "noise.",
        "",
        "| encoder | noise | " + " | ".join(_name_epsilon(each) for each in EPSILONS) + " |",
        "|---" * (len(EPSILONS) + 2) + "|",
    ]
    for encoder in ENCODERS:
        for shape in SHAPES:
            cells = [_summarise(runs, encoder, shape, each, seeds) for each in EPSILONS]
            lines.append(f"| {encoder} | {shape} | " + " | ".join(cells) + " |")
        wins = [_count_wins(runs, encoder, each, seeds) for each in EPSILONS]
        lines.append(f"| {encoder} | wins | " + " | ".join(wins) + " |")
    write_atomically(out / f"{NAME}.md", ("\n".join(lines) + "\n").encode())


def _name_epsilon(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def _summarise(
    runs: dict[str, dict[str, float]],
    encoder: str,
    shape: str,
    epsilon: float,
    seeds: tuple[int, ...],
) -> str:
    if math.isinf(epsilon):
        shape = SHAPES[0]
    values = [100 * runs[name_run(encoder, shape, epsilon, seed)]["all"] for seed in seeds]
    return f"{fmean(values):.1f} ± {pstdev(values):.1f}"


def _count_wins(
    runs: dict[str, dict[str, float]], encoder: str, epsilon: float, seeds: tuple[int, ...]
) -> str:
    if math.isinf(epsilon):
        return ""
    wins = 0
    for seed in seeds:
        equal, shaped = (runs[name_run(encoder, shape, epsilon, seed)]["all"] for shape in SHAPES)
        wins += shaped > equal
    return f"{wins} of {len(seeds)}"


def main() -> None:
    """Measure, and write the numbers and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="one seed")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = SEEDS[:1] if options.quick else SEEDS
    runs = measure_all(seeds)
    content = {"delta": DELTA, "seeds": list(seeds), "runs": runs}
    write_atomically(options.out / f"{NAME}.json", json.dumps(content, indent=1).encode())
    write_page(runs, options.out, seeds)


if __name__ == "__main__":
    main()
