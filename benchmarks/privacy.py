"""Accuracy against epsilon: what differential privacy costs each method.

`release` protects records: 20 clients with 3 classes and 100 rows of each. All methods see the same
64 fixed features (random-projection), are clipped to norm 1 and make one release. `client` protects
whole clients: 100 clients with 3 classes and 20 rows of each. results/privacy.* were written by it.

    python3 -m benchmarks.privacy                           # some 20 minutes on one core
    python3 -m benchmarks.privacy --quick --out runs/quick  # a minute: one seed, one data set
    python3 -m benchmarks.privacy --draw                    # page and figure again, from the .json

MNIST and Fashion-MNIST are read from $FEDPROTO_DATA. The .json is written after each method; called
again, the script measures only what it lacks.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import fedproto
from fedproto.core.files import write_atomically
from fedproto.data import DataFolders, Source
from fedproto.data.fashion_mnist import fashion_mnist
from fedproto.data.mnist import mnist
from fedproto.feature_maps import Inputs, compute_features
from fedproto.feature_maps.random_projection import random_projection
from fedproto.models import Classifier

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "privacy"
DATASETS: dict[str, Callable[[DataFolders], Source]] = {
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
}
EPSILONS = (math.inf, 8.0, 4.0, 2.0, 1.0, 0.5)
DELTA = 1e-5
SEEDS = (0, 1, 2, 3, 4)
#: Rows of the data sets that are used; every data set has ten classes.
TRAIN_ROWS = 14_000
TEST_ROWS = 2000
#: Features, which are handed over as images of this shape.
SIDE = 8

RELEASE = {"clients": 20, "ways": 3, "shots": 100, "stdev": 0, "test_shots": 40, "rounds": 1}
CLIENT = RELEASE | {"clients": 100, "shots": 20, "test_shots": 10}
SOLVED = {"algorithm": "closed-form", "feature_map": "flat"}
MEANS = {"algorithm": "fedproto", "freeze": "body", "absent": "drop", "batch": 100}
MIXED = {
    "algorithm": "fedre",
    "freeze": "body",
    "rounds": 5,
    "batch": 100,
    "server_epochs": 50,
    "server_lr": 0.1,
}
TRAINED = {"model": "mlp", "rounds": 5, "batch": 10, "lr": 0.1}


class Method(NamedTuple):
    """A line of the figure."""

    name: str
    privacy: str  # release or client
    place: str  # where the noise is added: client or server
    settings: dict[str, Any]
    way: str  # which accuracy is shown
    is_fixed: bool  # whether it sees fixed features instead of images


METHODS = (
    Method("closed form", "release", "server", SOLVED, "teacher", True),
    Method("closed form", "release", "client", SOLVED, "teacher", True),
    Method("class means", "release", "server", SOLVED | {"solve": "ncm"}, "teacher", True),
    Method("FedProto", "release", "server", MEANS, "prototype", True),
    Method("FedProto", "release", "client", MEANS, "prototype", True),
    Method("FedRE", "release", "client", MIXED, "head", True),
    Method("closed form", "client", "server", SOLVED, "teacher", True),
    Method("class means", "client", "server", SOLVED | {"solve": "ncm"}, "teacher", True),
    Method(
        "FedProto",
        "client",
        "server",
        TRAINED | {"algorithm": "fedproto", "absent": "drop"},
        "prototype",
        False,
    ),
    Method(
        "contrast",
        "client",
        "server",
        TRAINED | {"algorithm": "fedproto", "absent": "drop", "contrast": 1.0},
        "prototype",
        False,
    ),
    Method("FedAvg", "client", "server", TRAINED | {"algorithm": "fedavg"}, "head", False),
)


class Rows(NamedTuple):
    """What a data set gives: images, and fixed features in the shape of images."""

    images: tuple[Any, ...]  # x, y, x_test, y_test
    features: tuple[Any, ...]


def load_rows(dataset: str) -> Rows:
    """Return the rows of a data set that are used, the same for all seeds."""
    source = DATASETS[dataset](DataFolders())
    generator = np.random.default_rng(0)
    parts: list[Any] = []
    features: list[Any] = []
    shape = (1, 28, 28)
    compute = random_projection(values=SIDE * SIDE).build(Inputs(shape))
    for split, count in ((source.train, TRAIN_ROWS), (source.test, TEST_ROWS)):
        chosen = generator.permutation(len(split.y))[:count]
        x = torch.as_tensor(np.asarray(split.x[chosen])).float().reshape(-1, *shape)
        x = x / 255 if float(x.max()) > 1 else x
        y = np.asarray(split.y[chosen])
        fixed = compute_features(compute, x).reshape(-1, 1, SIDE, SIDE)
        parts += [x.numpy(), y]
        features += [fixed.numpy(), y]
    return Rows(tuple(parts), tuple(features))


def measure(method: Method, rows: Rows, epsilon: float, seed: int) -> dict[str, float]:
    """Return the accuracies of one run, as fractions, and what it spent."""
    settings: dict[str, Any] = dict(RELEASE if method.privacy == "release" else CLIENT)
    settings |= method.settings
    if math.isfinite(epsilon):
        settings |= {"privacy": method.privacy, "epsilon": epsilon, "delta": DELTA}
        if method.privacy == "release":
            settings["noise_at"] = method.place
    if method.is_fixed:
        settings["model"] = Classifier(nn.Flatten(), nn.Linear(SIDE * SIDE, 10))
    result = fedproto.run(
        dataset=rows.features if method.is_fixed else rows.images,
        partition="nway",
        seed=seed,
        engine="vectorised",
        eval_every=1000,
        **settings,
    )
    claim = result.data.get("privacy", {"epsilon": None, "holds": True})
    assert claim["holds"] and (claim["epsilon"] or 0) <= epsilon
    return {
        "all": result.accuracy[method.way]["mean"],
        "own": result.accuracy[f"{method.way}_own"]["mean"],
        "spent": claim["epsilon"] or 0.0,
    }


def measure_all(out: Path, datasets: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Measure what the .json lacks, write it after each method, and return it."""
    path = out / f"{NAME}.json"
    found: dict[str, Any] = {"delta": DELTA, "machine": platform.processor(), "runs": {}}
    if path.exists():
        found = json.loads(path.read_text())
    for dataset in datasets:
        rows = load_rows(dataset)
        for method in METHODS:
            started = time.perf_counter()
            for epsilon in EPSILONS:
                for seed in seeds:
                    key = name_run(dataset, method, epsilon, seed)
                    if key not in found["runs"]:
                        found["runs"][key] = measure(method, rows, epsilon, seed)
            write_atomically(path, json.dumps(found, indent=1).encode())
            seconds = time.perf_counter() - started
            print(f"{dataset} {label(method)}: {seconds:.0f} s", flush=True)
    return found


def label(method: Method) -> str:
    """Return what a method is called, with the setting and where the noise is added."""
    return f"{method.name}, {method.privacy}, noise at the {method.place}"


def name_run(dataset: str, method: Method, epsilon: float, seed: int) -> str:
    return f"{dataset} | {label(method)} | epsilon {epsilon:g} | seed {seed}"


def summarise(
    found: dict[str, Any], dataset: str, method: Method, epsilon: float, which: str
) -> tuple[float, float] | None:
    """Return mean and standard deviation over seeds, in %; None if nothing was measured."""
    values = []
    for seed in SEEDS:
        run = found["runs"].get(name_run(dataset, method, epsilon, seed))
        if run is not None:
            values.append(100 * run[which])
    return (fmean(values), pstdev(values)) if values else None


def write_page(found: dict[str, Any], out: Path) -> None:
    """Write the tables, one per data set and kind of accuracy."""
    lines = [
        "# Accuracy against epsilon",
        "",
        f"Test accuracy in %, mean ± standard deviation over seeds (of means over clients), delta "
        f"{DELTA:g}, by `python3 -m benchmarks.privacy`. An epsilon of ∞ is the same method "
        "without clipping and noise.",
        "",
        "`release` protects one record: 20 clients with 3 classes, 100 rows of each, 64 fixed "
        "random features, one release. Noise at the server is as good as noise on a secure sum. "
        "FedRE sends one mixture per client in 5 rounds. `client` protects a whole client: 100 "
        "clients with 3 classes, 20 rows of each; closed form: the same features, one release; "
        "the others train a perceptron in 5 rounds.",
        "",
    ]
    datasets = [name for name in DATASETS if any(key.startswith(name) for key in found["runs"])]
    for dataset in datasets:
        for which, heading in (("all", "all classes compete"), ("own", "own classes")):
            lines += [f"## {dataset}, {heading}", ""]
            names = ["∞" if math.isinf(each) else f"{each:g}" for each in EPSILONS]
            lines.append("| epsilon | " + " | ".join(names) + " |")
            lines.append("|---" * (len(EPSILONS) + 1) + "|")
            for method in METHODS:
                cells = [label(method)]
                for epsilon in EPSILONS:
                    summary = summarise(found, dataset, method, epsilon, which)
                    cells.append("–" if summary is None else f"{summary[0]:.1f} ± {summary[1]:.1f}")
                lines.append("| " + " | ".join(cells) + " |")
            lines.append("")
    write_atomically(out / f"{NAME}.md", "\n".join(lines).encode())


def draw(found: dict[str, Any], out: Path) -> None:
    """Draw accuracy over all classes against epsilon, a panel per data set and setting."""
    from fedproto.plots.marks import show_percent
    from fedproto.plots.style import figure_style, make_panels, marker_at, save_png

    datasets = [name for name in DATASETS if any(key.startswith(name) for key in found["runs"])]
    with figure_style():
        canvas, panels = make_panels(11, 3.8 * len(datasets), columns=2, rows=len(datasets))
        for row, dataset in enumerate(datasets):
            for column, privacy in enumerate(("release", "client")):
                axes = panels[2 * row + column]
                shown = [method for method in METHODS if method.privacy == privacy]
                for position, method in enumerate(shown):
                    _draw_line(axes, found, dataset, method, position, marker_at(position))
                axes.set_title(f"{dataset}: one {'record' if privacy == 'release' else 'client'}")
                axes.set_xticks(range(len(EPSILONS)))
                ticks = ["∞" if math.isinf(each) else f"{each:g}" for each in EPSILONS]
                axes.set_xticklabels(ticks)
                axes.set_xlabel(f"epsilon (delta {DELTA:g})")
                axes.set_ylabel("accuracy, all classes")
                axes.set_ylim(0, 1)
                show_percent(axes)
                place = "center right" if privacy == "release" else "upper right"  # free of lines
                axes.legend(fontsize=8, loc=place)
        write_atomically(out / f"{NAME}.png", save_png(canvas))


def _draw_line(
    axes: Any, found: dict[str, Any], dataset: str, method: Method, position: int, marker: str
) -> None:
    """Draw one method's means over the epsilons, with their standard deviations."""
    places = []
    means = []
    spreads = []
    for place, epsilon in enumerate(EPSILONS):
        summary = summarise(found, dataset, method, epsilon, "all")
        if summary is not None:
            places.append(place)
            means.append(summary[0] / 100)
            spreads.append(summary[1] / 100)
    if not places:
        return
    name = f"{method.name}, noise at {method.place}"
    axes.errorbar(places, means, yerr=spreads, marker=marker, label=name, color=f"C{position}")


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="one seed and one data set")
    parser.add_argument("--draw", action="store_true", help="only page and figure")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    datasets = ["mnist"] if options.quick else list(DATASETS)
    seeds = SEEDS[:1] if options.quick else SEEDS
    if options.draw:
        found = json.loads((options.out / f"{NAME}.json").read_text())
    else:
        found = measure_all(options.out, datasets, seeds)
    write_page(found, options.out)
    draw(found, options.out)


if __name__ == "__main__":
    main()
