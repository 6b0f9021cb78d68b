"""Our methods in a setting for which another library has published accuracies.

The setting is PFLlib's and GPFL's (Zhang et al., ICCV 2023, Table 1): Fashion-MNIST, 20 clients,
a CNN of four layers. Each of their two partitions is drawn as they describe it, and the method
runs with their batches, learning rate and accuracy, in fewer rounds. The federations of a method
are trained in one stack. results/published.md was written by this script.

    python3 -m benchmarks.published                           # on a GPU, minutes; Fashion-MNIST
    python3 -m benchmarks.published --methods FedProto,FedPer # these only
    python3 -m benchmarks.published --count                   # only say how many steps it takes
    python3 -m benchmarks.published --quick --out runs/quick  # seconds on a CPU, on mnist5k
    python3 -m benchmarks.published --draw                    # the page again, from the .json

Fashion-MNIST is read from $FEDPROTO_DATA/fashion-mnist. The .json is written after each method;
called again, the script measures only what it lacks.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fedproto
from fedproto.config.choices import PYTHON
from fedproto.config.settings import Config, configure
from fedproto.core import rng
from fedproto.core.federation import Federation
from fedproto.core.files import write_atomically
from fedproto.core.rounds import RoundResult, run_rounds
from fedproto.data import DataFolders
from fedproto.data.fashion_mnist import fashion_mnist
from fedproto.data.mnist5k import mnist5k
from fedproto.runs.composition import Method
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment
from fedproto.runs.from_settings import build_federation

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "published"
SOURCE = (
    "Zhang et al., GPFL, ICCV 2023, Table 1 (https://arxiv.org/abs/2308.10279); the same numbers, "
    "and FedDistill's, are on https://www.pfllib.com/benchmark.html"
)
DATASETS = {"fashion-mnist": fashion_mnist, "mnist5k": mnist5k}
SETTINGS = ("pathological", "practical")
#: The smallest client has a test batch; so does PFLlib's.
SMALLEST = 40
#: Clients that a CPU trains at a time: more have more weights than its cache holds.
STACK_ON_CPU = 8


class Compared(NamedTuple):
    """A method: ours, and what was published of it."""

    ours: str  # what follows `--algorithm`
    accuracy: str  # the name of the accuracy that corresponds to theirs
    is_global: bool  # one model for all clients, which needs more rounds
    passes: int  # over a client's images in a round
    published: Mapping[str, tuple[float, float]]  # mean and standard deviation, by setting


def _numbers(pathological: tuple[float, float], practical: tuple[float, float]) -> Any:
    return dict(zip(SETTINGS, (pathological, practical), strict=True))


METHODS = {
    "FedProto": Compared(
        "fedproto(lam=10,weighting=uniform,collect=during)",
        "prototype",
        False,
        1,
        _numbers((99.49, 0.04), (97.40, 0.02)),
    ),
    "FedPer": Compared("fedper", "head", False, 1, _numbers((99.47, 0.03), (97.44, 0.06))),
    "FedAvg": Compared("fedavg", "head", True, 1, _numbers((80.41, 0.08), (85.85, 0.19))),
    "FedDistill": Compared("feddistill", "head", False, 1, _numbers((99.51, 0.03), (97.43, 0.04))),
    "FedRep": Compared("fedrep", "head", False, 2, _numbers((99.56, 0.03), (97.56, 0.04))),
    "Ditto": Compared("ditto(lam=1)", "head", False, 2, _numbers((99.44, 0.06), (97.47, 0.04))),
    "FedProx": Compared(
        "fedprox(mu=0.001)", "head", True, 1, _numbers((78.08, 0.15), (85.63, 0.57))
    ),
}


@dataclass(frozen=True)
class Study:
    """What is measured. The published runs have 2000 rounds and three trials."""

    dataset: str = "fashion-mnist"
    images: int | None = None  # at random; None: all
    clients: int = 20
    classes_per_client: int = 2  # pathological
    beta: float = 0.1  # practical
    train_fraction: float = 0.75
    channels: tuple[int, int] = (32, 64)
    width: int = 512
    batch: int = 10
    lr: float = 0.005
    rounds: int = 100
    global_rounds: int = 200
    seeds: int = 1
    precision: str = "tf32"

    def rounds_of(self, method: Compared) -> int:
        """Return how many rounds a method gets."""
        return self.global_rounds if method.is_global else self.rounds


#: What may differ between the runs of one page; each says what it had.
PER_RUN = ("rounds", "global_rounds", "precision")
#: The study as it is tested.
QUICK = Study("mnist5k", 600, 10, 2, 0.5, 0.75, (4, 8), 16, 10, 0.05, 2, 2, 1, "float32")


# --- data


class ClientArrays(NamedTuple):
    """The images and labels of one client, as `fedproto.run` takes them."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def read_images(study: Study) -> tuple[np.ndarray, np.ndarray]:
    """Return all images and labels, training and test set merged."""
    source = DATASETS[study.dataset](DataFolders())
    x = np.concatenate([np.asarray(source.train.x), np.asarray(source.test.x)])
    y = np.concatenate([source.train.y, source.test.y])
    if study.images is None:
        return x, y
    rows = rng.generator(0, "images").permutation(len(y))[: study.images]
    return x[rows], y[rows]


def draw_clients(study: Study, setting: str, seed: int, x: np.ndarray, y: np.ndarray) -> list:
    """Return each client's images, divided into a training and a test set."""
    generator = rng.generator(seed, setting)
    if setting == "pathological":
        divided = divide_by_classes(y, study.clients, study.classes_per_client, generator)
    else:
        smallest = min(SMALLEST, len(y) // study.clients // 2)
        divided = divide_by_dirichlet(y, study.clients, study.beta, smallest, generator)
    clients = []
    for rows in divided:
        shuffled = generator.permutation(rows)
        train, test = np.split(shuffled, [int(study.train_fraction * len(rows))])
        clients.append(ClientArrays(x[train], y[train], x[test], y[test]))
    return clients


def divide_by_classes(
    y: np.ndarray, clients: int, classes_per_client: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Return each client's rows: a block of neighbours shares the same few classes, unequally.

    Of a class, all clients of the block but the last get between a tenth of an equal part and an
    equal part; the last one gets the rest. Classes and clients must divide into blocks evenly.
    """
    classes = int(y.max()) + 1
    block = clients * classes_per_client // classes
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(classes):
        rows = generator.permutation(np.flatnonzero(y == label))
        equal_part = len(rows) / block
        sizes = generator.integers(int(equal_part / 10), int(equal_part), block - 1)
        first = label // classes_per_client * block
        for place, piece in enumerate(np.split(rows, np.cumsum(sizes))):
            hands[first + place].append(piece)
    return [np.concatenate(hand) for hand in hands]


def divide_by_dirichlet(
    y: np.ndarray, clients: int, beta: float, smallest: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Return each client's rows: every class is divided by proportions from Dirichlet(β, ..., β).

    A client that has its equal part of all rows already gets none of the classes that follow. All
    is drawn again until the smallest client is large enough.
    """
    while True:
        hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients, int)
        for label in range(int(y.max()) + 1):
            rows = generator.permutation(np.flatnonzero(y == label))
            is_open = sizes < len(y) / clients
            proportions = generator.dirichlet(np.full(clients, beta)) * is_open
            ends = np.cumsum(proportions / proportions.sum())[:-1] * len(rows)
            for client, piece in enumerate(np.split(rows, ends.astype(int))):
                hands[client].append(piece)
                sizes[client] += len(piece)
        if sizes.min() >= smallest:
            return [np.concatenate(hand) for hand in hands]


# --- the model


class FourLayerCnn(nn.Module):
    """Two convolutions of 5x5 with pooling, a hidden layer, and the head; 28x28 grey images."""

    def __init__(self, channels: tuple[int, int], width: int, classes: int) -> None:
        super().__init__()
        first, second = channels
        self.body = nn.Sequential(
            nn.Conv2d(1, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * 4 * 4, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and the logits of a batch."""
        features = self.body(x)
        return features, self.head(features)


def draw_model(study: Study, seed: int) -> FourLayerCnn:
    """Return the model that all clients start from."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return FourLayerCnn(study.channels, study.width, classes=10)


# --- runs


def measure(study: Study, name: str, x: np.ndarray, y: np.ndarray) -> list[dict[str, Any]]:
    """Return the accuracy after every round of a method, for each setting and seed."""
    started = time.perf_counter()
    compared = METHODS[name]
    kinds = [(setting, seed) for seed in range(study.seeds) for setting in SETTINGS]
    planned = []
    for setting, seed in kinds:
        settings = _list_settings(study, compared, seed)
        clients = draw_clients(study, setting, seed, x, y)
        planned.append(Planned(settings, clients, draw_model(study, seed)))
    curves = train_together(name, compared.accuracy, planned)
    seconds = round(time.perf_counter() - started, 1)
    found = []
    for (setting, seed), curve in zip(kinds, curves, strict=True):
        run = {"method": name, "setting": setting, "seed": seed, "curve": curve}
        run |= {"seconds_of_all": seconds, "precision": study.precision}
        found.append(run | {"device": name_device(), "torch": torch.__version__})
    return found


def name_device() -> str:
    """Return the GPU, or the kind of processor, that trains here."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


class Planned(NamedTuple):
    """A federation that is to be trained."""

    settings: dict[str, Any]
    clients: Sequence[ClientArrays]
    model: nn.Module


def train_together(name: str, accuracy: str, planned: Sequence[Planned]) -> list[list[float]]:
    """Return an accuracy after every round of federations of one method, trained in one stack."""
    configs: list[Config] = []
    federations: list[Federation] = []
    for each in planned:
        (config,) = configure(each.settings)
        method = Method.build(config)
        federation, config = build_federation(
            config, method.algorithm, each.clients, each.model, {}
        )
        configs.append(config)
        federations.append(federation)
    method = Method.build(configs[0])
    experiments = Experiment.share_engine(
        configs, method.compose(federations, configs), federations
    )
    engine = experiments[0].engine
    federation_runs = [experiment.federation_run() for experiment in experiments]
    curves: list[list[float]] = [[] for _ in planned]
    with torch_settings(configs[0].threads, configs[0].precision), closing(engine):
        for results in run_rounds(experiments[0].algorithm, engine, federation_runs):
            for curve, federation, result in zip(curves, federations, results, strict=True):
                curve.append(pool_accuracy(federation, result, accuracy))
            latest = ", ".join(f"{curve[-1]:.2f}" for curve in curves)
            print(f"{name}: round {results[0].round} of {configs[0].rounds}: {latest}", flush=True)
    return curves


def _list_settings(study: Study, compared: Compared, seed: int) -> dict[str, Any]:
    settings = {} if torch.cuda.is_available() else {"stack": STACK_ON_CPU}
    return settings | {
        "algorithm": compared.ours,
        "dataset": PYTHON,
        "mean": [0.5],
        "std": [0.5],
        "clients": study.clients,
        "seed": seed,
        "rounds": study.rounds_of(compared),
        "eval_every": 1,
        "checkpoint_every": 0,
        "engine": "vectorised",
        "precision": study.precision,
        "batch": study.batch,
        "last_batch": "drop",
        "lr": study.lr,
        "momentum": 0,
        "epochs": 1,
    }


def pool_accuracy(federation: Federation, result: RoundResult, name: str) -> float:
    """Return the percentage of all clients' test images that are predicted correctly."""
    assert result.clients is not None
    images = torch.tensor([len(member.test) for member in federation.members]).double()
    correct = result.clients[name].cpu().double() * images
    return float(100 * correct.sum() / images.sum())


def count_steps(study: Study, x: np.ndarray, y: np.ndarray) -> dict[str, int]:
    """Return the steps of a pass, of the largest client, and of a study, one after the other."""
    most = []
    for seed in range(study.seeds):
        for setting in SETTINGS:
            clients = draw_clients(study, setting, seed, x, y)
            most.append(max(len(client.y) // study.batch for client in clients))
    passes = sum(method.passes * study.rounds_of(method) for method in METHODS.values())
    return {"per pass": max(most), "passes": passes, "all": max(most) * passes}


def describe(study: Study) -> dict[str, Any]:
    """Return what all runs of a page share."""
    described = json.loads(json.dumps(asdict(study)))
    return {key: value for key, value in described.items() if key not in PER_RUN}


def run_study(study: Study, names: Sequence[str], path: Path) -> dict[str, Any]:
    """Return everything that results/published.json holds; measure what it lacks, and write it.

    A method that was measured with fewer rounds is measured again.
    """
    described = describe(study)
    found: dict[str, Any] = {
        "study": described,
        "source": SOURCE,
        "version": fedproto.__version__,
        "measured": [],
    }
    if path.exists():
        found = json.loads(path.read_text())
        if found["study"] != described:
            raise SystemExit(f"{path} holds another study: move it away, or name another --out")
    x, y = read_images(study)
    for name in names:
        rounds = study.rounds_of(METHODS[name])
        own = [run for run in found["measured"] if run["method"] == name]
        if not own or any(len(run["curve"]) < rounds for run in own):
            others = [run for run in found["measured"] if run["method"] != name]
            found["measured"] = others + measure(study, name, x, y)
            write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
    return found


# --- the page


def summarise(found: Mapping[str, Any], setting: str, name: str) -> dict[str, Any]:
    """Return the means over seeds of the best and the last round, and how they were measured."""
    wanted = {"method": name, "setting": setting}
    runs = [run for run in found["measured"] if wanted.items() <= run.items()]
    curves = [run["curve"] for run in runs]
    return {
        "best": fmean(max(curve) for curve in curves),
        "last": fmean(curve[-1] for curve in curves),
        "rounds": len(curves[0]),
        "machine": f"{runs[0]['device']}, {runs[0]['precision']}",
    }


def make_page(found: Mapping[str, Any]) -> str:
    """Return the page: a table per setting, and what differs from the published setting."""
    study = found["study"]
    lines = [
        "# Published accuracies, and ours",
        "",
        "Made by `python3 -m benchmarks.published`. Published: " + found["source"] + ".",
        f"Ours: {study['dataset']}, {study['seeds']} seed(s).",
        "Accuracies are percentages of all clients' test images. As in the publication, `best` is",
        "the best round on the test images, which flatters every method; differences are of it.",
    ]
    measured = {run["method"] for run in found["measured"]}
    for setting in SETTINGS:
        lines += ["", f"## {setting.capitalize()}", ""]
        lines += [
            "| | published (2000 rounds) | ours, best | difference | ours, last round | rounds "
            "| machine, precision |"
        ]
        lines += ["|---" * 7 + "|"]
        for name in (name for name in METHODS if name in measured):
            mean, spread = METHODS[name].published[setting]
            ours = summarise(found, setting, name)
            cells = [name, f"{mean:.2f} ± {spread:.2f}", f"{ours['best']:.2f}"]
            cells += [f"{ours['best'] - mean:+.2f}", f"{ours['last']:.2f}", f"{ours['rounds']}"]
            cells.append(ours["machine"])
            lines.append(f"| {' | '.join(cells)} |")
    if study != describe(Study()):
        lines += ["", f"This was not the default study, but: {json.dumps(study)}."]
    lines += ["", "## What is the same, and what is not", "", *_list_differences()]
    if any(run["precision"] == "tf32" for run in found["measured"]):
        lines.append("- Where the precision is tf32, ours multiplies matrices in TF32.")
    return "\n".join(lines) + "\n"


def _list_differences() -> list[str]:
    """Return what is true of the default study."""
    return [
        "The same: training and test set merged, 20 clients, 75% of a client's images for",
        "training, two classes per client (pathological) or Dirichlet(0.1) (practical), the CNN",
        "(5x5 convolutions of 32 and 64 channels, 512 hidden units), pixels between -1 and 1, SGD",
        "without momentum, learning rate 0.005, batches of 10, a smaller last batch dropped, one",
        "epoch per round, all clients in every round, equal initial weights.",
        "",
        "Not the same:",
        "",
        "- The published runs have 2000 rounds, ours those that the tables name. Where best and",
        "  last round are the same or near, a method may still be improving.",
        "- The partitions are drawn in the same way, but not with the same random numbers. PFLlib",
        "  draws one partition and repeats the training on it three times; the published standard",
        "  deviation is over these, so another partition may well be further off.",
        "- Neither the paper's text nor the page names the hyperparameters of single methods (the",
        "  paper's supplement was not at hand). Ours are:",
        *[f"    - {name}: `{method.ours}`" for name, method in METHODS.items()],
        "- FedProto's λ of 10 is what the authors name for a later library (HtFLlib, issue 2).",
        "- FedDistill: ours has the mean squared difference of logits; PFLlib's code of today has",
        "  a cross-entropy with logits as targets.",
    ]


def main() -> None:
    """Measure, and write the numbers and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small study, on mnist5k")
    parser.add_argument("--draw", action="store_true", help="only write the page")
    parser.add_argument("--count", action="store_true", help="only print the number of steps")
    parser.add_argument("--methods", default=",".join(METHODS), help="which, with commas [all]")
    parser.add_argument("--rounds", type=int, help="rounds of methods with personal models")
    parser.add_argument("--global-rounds", type=int, help="rounds of FedAvg and FedProx")
    parser.add_argument("--seeds", type=int, help="seeds, from 0 on")
    parser.add_argument("--precision", help="float32 or tf32")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder [results]")
    arguments = parser.parse_args()
    names = arguments.methods.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise SystemExit(f"--methods: {unknown[0]!r} is not one of {', '.join(METHODS)}")
    given = {}
    for key in ("rounds", "global_rounds", "seeds", "precision"):
        if getattr(arguments, key) is not None:
            given[key] = getattr(arguments, key)
    study = replace(QUICK if arguments.quick else Study(), **given)
    path = arguments.out / f"{NAME}.json"
    if arguments.count:
        print(json.dumps(count_steps(study, *read_images(study))))
        return
    if arguments.draw:
        found = json.loads(path.read_text())
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        found = run_study(study, names, path)
    write_atomically(path.with_suffix(".md"), make_page(found).encode())


if __name__ == "__main__":
    main()
