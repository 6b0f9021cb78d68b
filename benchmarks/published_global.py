"""FedAvg, FedProx and SCAFFOLD in a setting of NIID-Bench, with its number of rounds.

The setting is the first of its leader board's: CIFAR-10, 10 clients, a small CNN, 50 rounds of 10
epochs (Li et al., ICDE 2022; https://github.com/Xtra-Computing/NIID-Bench). All federations of a
method are trained in one stack. results/published-global.md was written by this script.

    python3 -m benchmarks.published_global                     # on a GPU, minutes; CIFAR-10
    python3 -m benchmarks.published_global --methods SCAFFOLD  # these only
    python3 -m benchmarks.published_global --quick --out FOLDER  # seconds on a CPU, on noise
    python3 -m benchmarks.published_global --draw              # the page again, from the .json

CIFAR-10 is read from $FEDPROTO_DATA/cifar-10-batches-py. The .json is written after each method;
called again, the script measures only what it lacks.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fedproto
from benchmarks.published import ClientArrays, Planned, divide_by_dirichlet, train_together
from fedproto.config.choices import PYTHON
from fedproto.core import rng
from fedproto.core.files import write_atomically
from fedproto.data import DataFolders
from fedproto.data.cifar10 import cifar10

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "published-global"
SOURCE = "the leader board in the README of https://github.com/Xtra-Computing/NIID-Bench"
CLASSES = 10


class Compared(NamedTuple):
    """A method: ours, and the published accuracies in percent, by partition."""

    ours: str  # what follows `--algorithm`
    published: Mapping[str, float]


METHODS = {
    "FedAvg": Compared("fedavg", {"two classes": 49.8, "Dirichlet(0.5)": 68.2}),
    "SCAFFOLD": Compared("scaffold", {"two classes": 49.1, "Dirichlet(0.5)": 69.8}),
    "FedProx, μ = 0.01": Compared("fedprox(mu=0.01)", {"two classes": 50.7}),
    "FedProx, μ = 0.001": Compared("fedprox(mu=0.001)", {"Dirichlet(0.5)": 67.9}),
}


@dataclass(frozen=True)
class Study:
    """What is measured. The published accuracies are means of three seeds."""

    dataset: str = "cifar10"
    clients: int = 10
    batch: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    epochs: int = 10
    rounds: int = 50
    seeds: int = 1
    precision: str = "tf32"


#: The study as it is tested, on noise.
QUICK = Study(dataset="noise", epochs=1, rounds=1, precision="float32")


# --- data and model


class Images(NamedTuple):
    """A training and a test set."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def read_images(study: Study) -> Images:
    """Return CIFAR-10, or some noise of its shape."""
    if study.dataset == "noise":
        generator = rng.generator(0, "noise")
        x = generator.integers(0, 256, (400, 3, 32, 32), np.uint8)
        y = np.arange(400) % CLASSES
        return Images(x[:300], y[:300], x[300:], y[300:])
    source = cifar10(DataFolders())
    train_x = np.asarray(source.train.x)
    return Images(train_x, source.train.y, np.asarray(source.test.x), source.test.y)


def draw_clients(study: Study, partition: str, seed: int, images: Images) -> list[ClientArrays]:
    """Return each client's training images, and an equal part of all test images.

    All clients predict with the global model, so that together they measure it on the test set.
    """
    generator = rng.generator(seed, partition)
    if partition == "two classes":
        divided = divide_by_two_classes(images.y, study.clients, generator)
    else:
        divided = divide_by_dirichlet(images.y, study.clients, 0.5, 10, generator)
    tests = np.array_split(generator.permutation(len(images.y_test)), study.clients)
    clients = []
    for train, test in zip(divided, tests, strict=True):
        arrays = (images.x[train], images.y[train], images.x_test[test], images.y_test[test])
        clients.append(ClientArrays(*arrays))
    return clients


def divide_by_two_classes(
    y: np.ndarray, clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Return each client's rows: of the class of its own number, and of another at random.

    A class is dealt in equal parts to the clients that have it.
    """
    holders: list[list[int]] = [[] for _ in range(CLASSES)]
    for client in range(clients):
        own = client % CLASSES
        other = (own + generator.integers(1, CLASSES)) % CLASSES
        holders[own].append(client)
        holders[other].append(client)
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, clients_with_label in enumerate(holders):
        rows = generator.permutation(np.flatnonzero(y == label))
        parts = np.array_split(rows, len(clients_with_label))
        for client, part in zip(clients_with_label, parts, strict=True):
            hands[client].append(part)
    return [np.concatenate(hand) for hand in hands]


class SmallCnn(nn.Module):
    """Two convolutions of 5x5 with pooling, two hidden layers, and the head; 32x32 colours."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        self.head = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and the logits of a batch."""
        features = self.body(x)
        return features, self.head(features)


def draw_model(seed: int) -> SmallCnn:
    """Return the model that all clients start from."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SmallCnn()


# --- runs


def measure(study: Study, name: str, images: Images) -> list[dict[str, Any]]:
    """Return the accuracy after every round of a method, for each partition and seed."""
    started = time.perf_counter()
    compared = METHODS[name]
    kinds = [(partition, seed) for seed in range(study.seeds) for partition in compared.published]
    planned = []
    for partition, seed in kinds:
        clients = draw_clients(study, partition, seed, images)
        planned.append(Planned(_list_settings(study, compared, seed), clients, draw_model(seed)))
    curves = train_together(name, "head", planned)
    seconds = round(time.perf_counter() - started, 1)
    found = []
    for (partition, seed), curve in zip(kinds, curves, strict=True):
        run = {"method": name, "partition": partition, "seed": seed, "curve": curve}
        found.append(run | {"seconds_of_all": seconds})
    return found


def _list_settings(study: Study, compared: Compared, seed: int) -> dict[str, Any]:
    return {
        "algorithm": compared.ours,
        "dataset": PYTHON,
        "augment": True,
        "clients": study.clients,
        "seed": seed,
        "rounds": study.rounds,
        "eval_every": 1,
        "checkpoint_every": 0,
        "engine": "vectorised",
        "precision": study.precision,
        "batch": study.batch,
        "last_batch": "keep",
        "lr": study.lr,
        "momentum": study.momentum,
        "weight_decay": study.weight_decay,
        "epochs": study.epochs,
    }


def run_study(study: Study, names: Sequence[str], path: Path) -> dict[str, Any]:
    """Return everything that the .json holds; measure what it lacks, and write it."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    found: dict[str, Any] = {
        "study": asdict(study),
        "source": SOURCE,
        "version": fedproto.__version__,
        "torch": torch.__version__,
        "device": device,
        "measured": [],
    }
    if path.exists():
        found = json.loads(path.read_text())
        if found["study"] != asdict(study):
            raise SystemExit(f"{path} holds another study: move it away, or name another --out")
    images = read_images(study)
    done = {run["method"] for run in found["measured"]}
    for name in names:
        if name not in done:
            found["measured"] += measure(study, name, images)
            write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
    return found


# --- the page


def make_page(found: Mapping[str, Any]) -> str:
    """Return the page: one table, and what differs from the published setting."""
    study = found["study"]
    lines = [
        "# Published accuracies of global models, and ours",
        "",
        "Made by `python3 -m benchmarks.published_global`. Published: " + found["source"] + ".",
        f"Ours: {study['dataset']}, seeds 0 to {study['seeds'] - 1}, measured with torch "
        f"{found['torch']} on {found['device']}.",
        "Accuracies are percentages of the test set, of the global model after the last round.",
        "",
        "| clients' classes | | published (50 rounds) | ours | difference | ours, best | rounds |",
        "|---" * 7 + "|",
    ]
    for name in dict.fromkeys(run["method"] for run in found["measured"]):
        for partition, accuracy in METHODS[name].published.items():
            wanted = {"method": name, "partition": partition}
            runs = [run for run in found["measured"] if wanted.items() <= run.items()]
            curves = [run["curve"] for run in runs]
            last = fmean(curve[-1] for curve in curves)
            best = fmean(max(curve) for curve in curves)
            cells = [partition, name, f"{accuracy:.1f}", f"{last:.1f}", f"{last - accuracy:+.1f}"]
            lines.append(f"| {' | '.join(cells)} | {best:.1f} | {len(curves[0])} |")
    if study != asdict(Study()):
        lines += ["", f"This was not the default study, but: {json.dumps(study)}."]
    return "\n".join([*lines, "", *DIFFERENCES, ""])


#: What is true of the default study.
DIFFERENCES = (
    "The same: 10 clients in every round, two classes per client or Dirichlet(0.5), the CNN (5x5",
    "convolutions of 6 and 16 channels, hidden layers of 120 and 84), pixels between 0 and 1,",
    "random crops and flips, SGD with learning rate 0.01, momentum 0.9 and weight decay 0.00001,",
    "batches of 64, 10 epochs per round, 50 rounds, equal initial weights.",
    "",
    "Not the same:",
    "",
    "- The partitions are drawn in the same way, but not with the same random numbers. The",
    "  published accuracies are means of three seeds, without a standard deviation; with two",
    "  classes per client, they depend on the partition.",
    "- The leader board does not say whether it takes the last round or the best: both are here.",
    "- Crops have a black border; the published ones mirror the image there.",
    "- SCAFFOLD: NIID-Bench corrects the weights after each step of momentum, by a variate that",
    "  is the client's whole path divided by K times the learning rate. Ours corrects the gradient",
    "  before momentum, by the path divided by what K steps with momentum amount to. Once momentum",
    "  has built up, both corrections are of the same size.",
    "- Ours multiplies matrices in TF32.",
)


def main() -> None:
    """Measure, and write the numbers and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round on noise, for a test")
    parser.add_argument("--draw", action="store_true", help="only write the page")
    parser.add_argument("--methods", help="which, by the start of their names, with commas [all]")
    parser.add_argument("--rounds", type=int, help="communication rounds [50]")
    parser.add_argument("--seeds", type=int, help="seeds, from 0 on [1]")
    parser.add_argument("--precision", help="float32 or tf32")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder [results]")
    arguments = parser.parse_args()
    starts = tuple((arguments.methods or "").split(","))
    names = [name for name in METHODS if name.startswith(starts)]
    if not names:
        raise SystemExit(f"--methods: {arguments.methods!r} is none of {', '.join(METHODS)}")
    given = {}
    for key in ("rounds", "seeds", "precision"):
        if getattr(arguments, key) is not None:
            given[key] = getattr(arguments, key)
    path = arguments.out / f"{NAME}.json"
    if arguments.draw:
        found = json.loads(path.read_text())
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        found = run_study(replace(QUICK if arguments.quick else Study(), **given), names, path)
    write_atomically(path.with_suffix(".md"), make_page(found).encode())


if __name__ == "__main__":
    main()
