"""What wrong uploads do to the honest clients of a federation, for each combiner.

Twenty clients with the paper's partition of MNIST; 10 to 40% of them upload something else than
they learned, in every round. Measured is the mean accuracy of the others. All federations of an
algorithm are trained in one stack: which of its clients attack, how, and how the server combines
their uploads is a part of each server's state. results/robustness.md was written by this script.

    python3 -m benchmarks.robustness                          # on a GPU; needs MNIST
    python3 -m benchmarks.robustness --small                  # on a CPU; needs MNIST
    python3 -m benchmarks.robustness --quick --out runs/quick # a minute on a CPU
    python3 -m benchmarks.robustness --draw                   # page and figure, from the .json
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedproto
from benchmarks.attacks import ATTACKS, with_attacks
from benchmarks.robustness_page import MEASURES, draw_figure, make_page
from fedproto.config import plugins
from fedproto.config.choices import complete, parse_choice
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core import rng
from fedproto.core.combination import Combiner
from fedproto.core.files import write_atomically
from fedproto.core.rounds import run_rounds
from fedproto.core.types import State
from fedproto.data import Source
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment
from fedproto.runs.from_settings import build_federation

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "robustness"
#: By what follows `--combiner`.
COMBINERS = (
    "sum",
    "median",
    "trimmed-mean(fraction=0.4)",
    "krum",
    "krum(chosen=10)",
    "geometric-median",
)

#: Clients that are trained at a time: all federations together would fill a GPU's memory, and the
#: weights of many are more than a CPU's cache holds (a round of 200 clients took 1.9 s of CPU time
#: in stacks of 1,000, and 1.2 s in stacks of 40).
STACK_ON_GPU = 1000
STACK_ON_CPU = 40


@dataclass(frozen=True)
class Study:
    """What is measured."""

    dataset: str = "mnist"
    clients: int = 20
    seeds: int = 3
    rounds: int = 30
    shots: int = 100  # training images per class and client (mean)
    test_shots: int = 100
    attackers: tuple[int, ...] = (2, 4, 6, 8)
    attacks: tuple[str, ...] = ("flipped", "scaled", "shuffled", "random", "colluding")
    combiners: tuple[str, ...] = COMBINERS
    model: str = "cnn"
    lr: float = 0.01


#: The study that two cores finish in some minutes.
SMALL = Study(
    seeds=1, rounds=15, shots=30, test_shots=20, attackers=(4, 8), model="mlp(hidden=64)", lr=0.03
)
#: The study as it is tested.
QUICK = Study("mnist5k", 8, 1, 2, 10, 10, (3,), ("flipped", "colluding"), ("sum", "median", "krum"))


class Cell(NamedTuple):
    """One federation: how many of its clients attack, and how the server combines uploads."""

    combiner: str
    attack: str  # "none" without attackers
    attackers: int
    seed: int


# --- runs


def list_cells(study: Study) -> list[Cell]:
    """Return the federations of one algorithm."""
    cells = []
    for seed, combiner in itertools.product(range(study.seeds), study.combiners):
        cells.append(Cell(combiner, "none", 0, seed))
        for attack, attackers in itertools.product(study.attacks, study.attackers):
            cells.append(Cell(combiner, attack, attackers, seed))
    return cells


def draw_attackers(cell: Cell, clients: int) -> list[int]:
    """Return who attacks: with more attackers, the same ones and others."""
    order = rng.permutation(rng.key(cell.seed, "attackers"), clients)
    return sorted(order[: cell.attackers].tolist())


def measure(study: Study, algorithm_name: str, loaded: dict[str, Source]) -> list[dict[str, Any]]:
    """Return, for each cell, the mean accuracies of its honest clients after the last round."""
    algorithm = plugins.build("algorithm", complete_choice("algorithm", algorithm_name))
    combiners = [build_combiner(text) for text in study.combiners]
    attacked = with_attacks(algorithm, combiners)
    cells = list_cells(study)
    configs = []
    federations = []
    for seed in range(study.seeds):
        (config,) = configure(_settings(study, algorithm_name, seed))
        federation, config = build_federation(config, algorithm, None, None, loaded)
        configs.append(config)
        federations.append(federation)
    experiments = Experiment.share_engine(
        [configs[cell.seed] for cell in cells],
        attacked,
        [federations[cell.seed] for cell in cells],
    )
    for cell, experiment in zip(cells, experiments, strict=True):
        _give_orders(experiment.progress.server, cell, study)
    engine = experiments[0].engine
    federation_runs = [experiment.federation_run() for experiment in experiments]
    last: Sequence[Any] = []
    with torch_settings(configs[0].threads, configs[0].precision), closing(engine):
        for results in run_rounds(attacked, engine, federation_runs):
            last = results
            done = last[0].round
            if done % 10 == 0 or done == study.rounds:
                print(f"{algorithm_name}: round {done} of {study.rounds}", flush=True)
    found = []
    for cell, result in zip(cells, last, strict=True):
        honest = torch.ones(study.clients, dtype=torch.bool)
        honest[draw_attackers(cell, study.clients)] = False
        accuracy = {}
        for name, values in result.clients.items():
            accuracy[name] = float(values.cpu()[honest].double().mean())
        found.append({"algorithm": algorithm_name, **cell._asdict(), "accuracy": accuracy})
    return found


def _settings(study: Study, algorithm: str, seed: int) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "dataset": study.dataset,
        "clients": study.clients,
        "seed": seed,
        "rounds": study.rounds,
        "eval_every": study.rounds,
        "checkpoint_every": 0,
        "engine": "vectorised",
        "stack": STACK_ON_GPU if torch.cuda.is_available() else STACK_ON_CPU,
        "model": study.model,
        "lr": study.lr,
        "clip_norm": 10,  # clients that receive something worthless train on without infinities
        "partition.ways": 3,
        "partition.shots": study.shots,
        "partition.test_shots": study.test_shots,
    }


def _give_orders(server: State, cell: Cell, study: Study) -> None:
    """Write into a server's state what its federation is to be."""
    server["combiner"].fill_(study.combiners.index(cell.combiner))
    if cell.attackers:
        server["attack"].fill_(list(ATTACKS).index(cell.attack))
        for number in draw_attackers(cell, study.clients):
            server["attackers"][number] = 1


def complete_choice(kind: str, text: str) -> Part:
    """Return a choice with the values of all its options."""
    return complete(kind, parse_choice(kind, text), {}, {})


def build_combiner(text: str) -> Combiner:
    """Return a combiner by what follows `--combiner`."""
    return plugins.build("combiner", complete_choice("combiner", text))


def measure_alone(study: Study, loaded: dict[str, Source]) -> list[float]:
    """Return, for each seed, the mean accuracy of clients that train alone."""
    cells = measure(replace(study, combiners=("sum",), attacks=()), "local", loaded)
    return [cell["accuracy"]["head"] for cell in cells]


def run_study(study: Study) -> dict[str, Any]:
    """Return everything that results/robustness.json holds."""
    started = time.perf_counter()
    loaded: dict[str, Source] = {}
    cells = []
    for algorithm in dict.fromkeys(algorithm for algorithm, _, _ in MEASURES):
        cells += measure(study, algorithm, loaded)
    alone = measure_alone(study, loaded)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "study": asdict(study),
        "version": fedproto.__version__,
        "torch": torch.__version__,
        "device": device,
        "seconds": round(time.perf_counter() - started, 1),
        "alone": alone,
        "measured": cells,
    }


# --- the command


def main() -> None:
    """Measure, and write the numbers, the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a perceptron, less data, one seed")
    parser.add_argument("--quick", action="store_true", help="a small study, on mnist5k")
    parser.add_argument("--draw", action="store_true", help="only write the page and the figure")
    parser.add_argument("--rounds", type=int, help="communication rounds")
    parser.add_argument("--seeds", type=int, help="seeds, from 0 on")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder [results]")
    arguments = parser.parse_args()
    numbers = arguments.out / f"{NAME}.json"
    if arguments.draw:
        found = json.loads(numbers.read_text())
    else:
        study = SMALL if arguments.small else Study()
        study = QUICK if arguments.quick else study
        chosen = {"rounds": arguments.rounds, "seeds": arguments.seeds}
        given = {key: value for key, value in chosen.items() if value is not None}
        found = run_study(replace(study, **given))
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_atomically(numbers, (json.dumps(found, indent=1) + "\n").encode())
    write_atomically(numbers.with_suffix(".md"), make_page(found).encode())
    write_atomically(numbers.with_suffix(".png"), draw_figure(found))


if __name__ == "__main__":
    main()
