"""Accuracy against epsilon: what differential privacy costs each method.

`release` and `training` protect records: 20 clients with 3 classes and 100 rows of each. `client`
protects whole clients: 100 clients with 3 classes and 20 rows of each. Methods that train nothing
see 64 fixed features (random-projection) and make one release; the others train a perceptron, or a
linear model of the same features. results/privacy.* were written by it.

    python3 -m benchmarks.privacy                           # about an hour on one core
    python3 -m benchmarks.privacy --quick --out runs/quick  # one seed, one data set
    python3 -m benchmarks.privacy --draw                    # page and figure again, from the .json

Rounds and learning rates of the methods that train are chosen on rows that are used for nothing
else: training rows that no measured client has. Everything else is fixed beforehand, so that no
accuracy that is shown was used to choose anything.

MNIST and Fashion-MNIST are read from $FEDPROTO_DATA. The .json is written after each run; called
again, the script measures only what it lacks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import fedproto
from benchmarks.privacy_lines import (
    CLIENT,
    DATASETS,
    DELTA,
    GRID,
    METHODS,
    RECORD,
    SEEDS,
    Method,
    name_choice,
    name_run,
)
from benchmarks.privacy_page import NAME, draw, write_page
from fedproto.core.files import write_atomically
from fedproto.data import DataFolders, Source
from fedproto.data.fashion_mnist import fashion_mnist
from fedproto.data.mnist import mnist
from fedproto.feature_maps import Inputs, compute_features
from fedproto.feature_maps.random_projection import random_projection
from fedproto.models import Classifier

RESULTS = Path(__file__).resolve().parent.parent / "results"
LOADERS: dict[str, Callable[[DataFolders], Source]] = {
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
}
#: Rows of the data sets that are used; every data set has ten classes.
TRAIN_ROWS = 14_000
TEST_ROWS = 2000
#: Features, which are handed over as images of this shape.
SIDE = 8
IMAGE_SHAPE = (1, 28, 28)
#: The settings that are found on it are used for all data sets.
TUNING_DATASET = "mnist"
TUNING_SEED = 100
EPSILON_ERROR = 1e-6  # of the search for the least noise


class Rows(NamedTuple):
    """Rows of a data set: to train on, and to test on."""

    x: Any
    y: Any
    x_test: Any
    y_test: Any


@cache
def load_images(dataset: str, is_tuning: bool = False) -> Rows:
    """Return the images of a data set that are used, the same for all seeds.

    is_tuning  whether to return those that settings are chosen on: further rows of the training
               set, for training and for testing
    """
    source = LOADERS[dataset](DataFolders())
    generator = np.random.default_rng(0)
    train_order = generator.permutation(len(source.train.y))
    test_order = generator.permutation(len(source.test.y))
    parts = [(source.train, train_order[:TRAIN_ROWS]), (source.test, test_order[:TEST_ROWS])]
    if is_tuning:
        rest = train_order[TRAIN_ROWS:]
        parts = [
            (source.train, rest[:TRAIN_ROWS]),
            (source.train, rest[TRAIN_ROWS : TRAIN_ROWS + TEST_ROWS]),
        ]
    found: list[Any] = []
    for split, chosen in parts:
        x = torch.as_tensor(np.asarray(split.x[chosen])).float().reshape(-1, *IMAGE_SHAPE)
        x = x / 255 if float(x.max()) > 1 else x
        found += [x.numpy(), np.asarray(split.y[chosen])]
    return Rows(*found)


@cache
def load_features(dataset: str, is_tuning: bool = False) -> Rows:
    """Return fixed features of the same rows, in the shape of images."""
    images = load_images(dataset, is_tuning)
    compute = random_projection(values=SIDE * SIDE).build(Inputs(IMAGE_SHAPE))
    features = []
    for x in (images.x, images.x_test):
        fixed = compute_features(compute, torch.from_numpy(x))
        features.append(fixed.reshape(-1, 1, SIDE, SIDE).numpy())
    return Rows(features[0], images.y, features[1], images.y_test)


def load_rows(method: Method, dataset: str, is_tuning: bool = False) -> Rows:
    """Return what a method sees of a data set."""
    load = load_features if method.is_fixed else load_images
    return load(dataset, is_tuning)


def measure(
    method: Method, rows: Rows, epsilon: float, seed: int, tuned: dict[str, Any] | None = None
) -> dict[str, float]:
    """Return the accuracies of one run, as fractions, and what it spent.

    tuned  the settings that were chosen for it
    """
    settings: dict[str, Any] = dict(CLIENT if method.unit == "client" else RECORD)
    settings |= method.settings | (tuned or {})
    if math.isfinite(epsilon):
        settings |= {"privacy": method.privacy, "epsilon": epsilon, "delta": DELTA}
        if method.privacy != "client":
            settings["noise_at"] = method.place
    if method.is_fixed:
        settings["model"] = Classifier(nn.Flatten(), nn.Linear(SIDE * SIDE, 10))
    result = fedproto.run(
        dataset=tuple(rows),
        partition="nway",
        seed=seed,
        engine="vectorised",
        eval_every=1000,
        **settings,
    )
    claim = result.data.get("privacy", {"epsilon": None, "holds": True})
    assert claim["holds"] and (claim["epsilon"] or 0) <= epsilon + EPSILON_ERROR
    found = {
        "all": result.accuracy[method.way]["mean"],
        "own": result.accuracy[f"{method.way}_own"]["mean"],
        "spent": claim["epsilon"] or 0.0,
    }
    if method.is_tuned and method.way == "prototype":
        found["head all"] = result.accuracy["head"]["mean"]
        found["head own"] = result.accuracy["head_own"]["mean"]
    return found


def tune(method: Method, epsilon: float) -> dict[str, Any]:
    """Return the settings of GRID with the best accuracy on rows that nothing else uses.

    All tries and their accuracies over all classes are returned with them. Of equal ones the first
    is taken, which has the fewest rounds.
    """
    rows = load_rows(method, TUNING_DATASET, is_tuning=True)
    tries = []
    for values in itertools.product(*GRID.values()):
        chosen = dict(zip(GRID, values, strict=True))
        found = measure(method, rows, epsilon, TUNING_SEED, chosen)
        tries.append({"settings": chosen, "all": found["all"]})
    best = max(tries, key=lambda each: each["all"])
    return {"settings": best["settings"], "tries": tries}


def measure_all(out: Path, datasets: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Measure what the .json lacks, write it after each run, and return it.

    Private training is slow and comes last; apart from that, it goes seed by seed.
    """
    path = out / f"{NAME}.json"
    found: dict[str, Any] = {"delta": DELTA, "tuned": {}, "runs": {}}
    if path.exists():
        found |= json.loads(path.read_text())
    turns = list(itertools.product(seeds, datasets, METHODS))
    turns.sort(key=lambda turn: turn[2].privacy == "training")
    for seed, dataset, method in turns:
        for epsilon in method.epsilons:
            choice = name_choice(method, epsilon)
            key = name_run(dataset, method, epsilon, seed)
            if key in found["runs"]:
                continue
            started = time.perf_counter()
            if method.is_tuned and choice not in found["tuned"]:
                found["tuned"][choice] = tune(method, epsilon)
                write(path, found)
            chosen = found["tuned"][choice]["settings"] if method.is_tuned else None
            rows = load_rows(method, dataset)
            found["runs"][key] = measure(method, rows, epsilon, seed, chosen)
            write(path, found)
            accuracy = found["runs"][key]["all"]
            seconds = time.perf_counter() - started
            print(f"{key}: {accuracy:.1%}, {seconds:.0f} s {chosen or ''}", flush=True)
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(found, indent=1).encode())


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="one seed and one data set")
    parser.add_argument("--draw", action="store_true", help="only page and figure")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    datasets = DATASETS[:1] if options.quick else DATASETS
    seeds = SEEDS[:1] if options.quick else SEEDS
    if options.draw:
        found = json.loads((options.out / f"{NAME}.json").read_text())
    else:
        found = measure_all(options.out, datasets, seeds)
    write_page(found, options.out)
    draw(found, options.out)


if __name__ == "__main__":
    main()
