"""The same rounds of FedProto in other people's code and in ours: what each costs, in one table.

    python3 -m benchmarks.rivals --released DIR --pfllib DIR --htfllib DIR --fl-bench DIR \\
        --python PYTHON

DIR is a checkout, of which a working copy is made in a temporary folder; name one or several.
PYTHON is an interpreter that has what they need (torchvision, h5py, scikit-learn, calmsize, cvxpy,
higher, ray, hydra-core, pynvml, tensorboardX), by default this one. MNIST is read from
$FEDPROTO_DATA; nothing is downloaded. Linux only.

Two works: W20 (20 clients of 3 classes x 100 MNIST images, the paper's CNN, batch 8, one local
epoch per round), and the same with the paper's mix of three CNNs. Each contender is a process with
its own command line. They take turns: while one trains a round, all others are stopped. CPU seconds
are those of a process and its workers, and depend less than wall seconds on what else the machine
does. Nobody evaluates in the rounds that are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.rivals_data import (
    DividedData,
    divide,
    find_released_seed,
    write_fl_bench,
    write_idx,
    write_npz,
)
from benchmarks.rivals_page import make_table
from benchmarks.rivals_turns import Contender, take_turns
from fedproto.errors import ConfigError, FedProtoError

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = ROOT / "benchmarks" / "rival_processes"
CLIENTS = 20
BATCH = 8
FULL_BATCHES = 300 // BATCH  # per client and round
#: More rounds than are measured, so that nobody comes to the end of its run and evaluates.
SPARE_ROUNDS = 20
#: What our runs are trained with, whatever the work.
SETTINGS = {
    "dataset": "mnist",
    "clients": CLIENTS,
    "ways": 3,
    "shots": 100,
    "stdev": 0,
    "test_shots": 10,
    "batch": BATCH,
    "lr": 0.01,
    "momentum": 0.5,
    "epochs": 1,
    "seed": 0,
}
BASE = "fedproto, one process"


class Work(NamedTuple):
    """What is measured, and the channels of the clients' second convolutions."""

    title: str
    channels: Sequence[int]

    @property
    def is_mixed(self) -> bool:
        """Whether the clients' models differ."""
        return len(set(self.channels)) > 1


WORKS = {
    "w20": Work("W20: the paper's CNN for all 20 clients", [20] * CLIENTS),
    "mixed": Work(
        "Mixed models: CNNs with 18, 20 and 22 channels",
        [(18, 20, 22)[number % 3] for number in range(CLIENTS)],
    ),
}


class Workshop(NamedTuple):
    """What the contenders of one work are made from."""

    work: Work
    folder: Path  # a new one
    data: DividedData
    rounds: int
    threads: int
    device: str = "cpu"

    @property
    def environment(self) -> dict[str, str]:
        """What every process is told: its number of threads, and on a CPU to see no GPU."""
        variables = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if self.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables


@dataclass(frozen=True)
class Rival:
    """Other people's code: what a checkout of it has, and how it is told to do the work."""

    title: str
    copied: Sequence[str]  # files and folders of a checkout; the first is its main script
    started_in: str  # a folder of the working copy
    mark: str  # what it prints once per round
    #: Prepares the data in the working copy, and returns the arguments of the main script.
    prepare: Callable[[Path, Workshop], list[str]]
    environment: tuple[tuple[str, str], ...] = ()
    has_mixed_models: bool = True


def prepare_released(copy: Path, workshop: Workshop) -> list[str]:
    """Write MNIST; the released code divides it by its own seed."""
    write_idx(copy / "prepared" / "mnist", workshop.data.source)
    seed = find_released_seed(CLIENTS, BATCH, CLIENTS * FULL_BATCHES)
    mode = "model_heter" if workshop.work.is_mixed else "task_heter"
    options = {"mode": mode, "dataset": "mnist", "data_dir": f"{copy / 'prepared'}/"}
    options |= {"num_users": CLIENTS, "ways": 3, "shots": 100, "stdev": 2, "train_ep": 1}
    options |= {"local_bs": BATCH, "lr": 0.01, "ld": 1, "seed": seed, "verbose": 0}
    options |= {"rounds": workshop.rounds}
    return _write_options(options)


def prepare_pfllib(copy: Path, workshop: Workshop) -> list[str]:
    """Write one file per client, which PFLlib reads in every round."""
    write_npz(copy / "dataset" / "MNIST", workshop.data)
    return [*_list_common_options(workshop), "--model", "CNN"]


def prepare_htfllib(copy: Path, workshop: Workshop) -> list[str]:
    """Write one file per client; the models are files, too."""
    write_npz(copy / "dataset" / "MNIST", workshop.data)
    # A family must be named, but the models in the folder are used in its place.
    models = ["--model_family", "HtFE-img-2", "--models_folder_name", "paper_models"]
    return [*_list_common_options(workshop), "--feature_dim", "50", *models]


def _list_common_options(workshop: Workshop) -> list[str]:
    """Return the options that PFLlib and HtFLlib share; only the first round evaluates."""
    options = {"algorithm": "FedProto", "dataset": "MNIST", "num_classes": 10}
    options |= {
        "device": workshop.device,
        "num_clients": CLIENTS,
        "batch_size": BATCH,
        "local_epochs": 1,
        "lamda": 1,
    }
    options |= {"local_learning_rate": 0.01, "global_rounds": workshop.rounds}
    options |= {"eval_gap": 100_000}
    return _write_options(options)


def _write_options(options: dict[str, object]) -> list[str]:
    words = []
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return words


def prepare_fl_bench(copy: Path, workshop: Workshop) -> list[str]:
    """Write MNIST and the rows of each client; switch all evaluation off."""
    write_fl_bench(copy / "data" / "mnist", workshop.data)
    return [
        "method=fedproto",
        "dataset.name=mnist",
        "model.name=custom",
        "mode=serial",
        "optimizer.lr=0.01",
        "optimizer.momentum=0.5",
        "common.join_ratio=1",
        f"common.global_epoch={workshop.rounds}",
        "common.local_epoch=1",
        f"common.batch_size={BATCH}",
        "common.client_side_evaluation=false",
        "common.test.client.interval=-1",
        "common.test.client.test=false",
        "common.verbose_gap=1",
        f"common.use_cuda={str(workshop.device == 'cuda').lower()}",
    ]


RIVALS = {
    "released": Rival(
        "the released code",
        ("exps/federated_main.py", "lib"),
        "exps",
        r"\| Global Training Round : \d+ \|",
        prepare_released,
    ),
    "pfllib": Rival(
        "PFLlib",
        ("system/main.py", "system"),
        "system",
        r"^-{50} \d",
        prepare_pfllib,
        has_mixed_models=False,
    ),
    "htfllib": Rival(
        "HtFLlib",
        ("system/main.py", "system"),
        "system",
        r"^-{50} \d",
        prepare_htfllib,
        # It loads whole models from its own files, which newer versions of torch refuse.
        environment=(("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),),
    ),
    "fl-bench": Rival(
        "FL-bench",
        ("main.py", "src", "config", "data/utils"),
        ".",
        r"TRAINING EPOCH: \d+",
        prepare_fl_bench,
        has_mixed_models=False,
    ),
}


def check_checkout(name: str, checkout: Path) -> None:
    """Refuse a folder that is not a checkout of the rival."""
    rival = RIVALS[name]
    for part in rival.copied:
        if not (checkout / part).exists():
            raise ConfigError(f"{checkout} is not a checkout of {rival.title}: it has no {part}")


def copy_checkout(rival: Rival, checkout: Path, copy: Path) -> None:
    """Copy what the rival needs, so that its checkout stays as it is."""
    for part in rival.copied:
        target = copy / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (checkout / part).is_dir():
            shutil.copytree(checkout / part, target, dirs_exist_ok=True)
        else:
            shutil.copy(checkout / part, target)


def list_rivals(
    checkouts: dict[str, Path], python: str, workshop: Workshop
) -> tuple[list[Contender], dict[str, str]]:
    """Return the rivals that can do the work, ready to start, and why the others cannot."""
    contenders = []
    refused = {}
    for name, checkout in checkouts.items():
        rival = RIVALS[name]
        if workshop.work.is_mixed and not rival.has_mixed_models:
            refused[rival.title] = "it gives all clients the same model"
            continue
        copy = workshop.folder / name
        copy_checkout(rival, checkout, copy)
        channels = ",".join(str(number) for number in workshop.work.channels)
        script = str(copy / rival.copied[0])
        arguments = rival.prepare(copy, workshop)
        command = [python, str(PROCESSES / "launch.py"), name, channels, script, *arguments]
        environment = workshop.environment | dict(rival.environment)
        folder = copy / rival.started_in
        contenders.append(Contender(rival.title, command, folder, rival.mark, environment))
    return contenders, refused


def list_ours(workshop: Workshop) -> list[Contender]:
    """Return our contenders: with the paper's prototypes and with the others', and a plain loop."""
    algorithm = "fedproto-mh" if workshop.work.is_mixed else "fedproto"
    settings = SETTINGS | {"algorithm": algorithm, "rounds": workshop.rounds}
    settings |= {"eval_every": workshop.rounds, "threads": workshop.threads}
    settings |= {"device": workshop.device}
    one = settings | {"engine": "vectorised"}
    runs = {
        BASE: one,
        "fedproto, one process, `profile=released`": one | {"profile": "released"},
        "fedproto, `engine=auto`": settings,
    }
    contenders = []
    for number, (name, keywords) in enumerate(runs.items()):
        out = str(workshop.folder / f"ours-{number}")
        contenders.append(_make_own(name, json.dumps(keywords | {"out": out}), workshop))
    if not workshop.work.is_mixed:
        contenders.append(_make_own("plain loop", f"plain:{workshop.device}", workshop))
    return contenders


def _make_own(name: str, asked: str, workshop: Workshop) -> Contender:
    command = [sys.executable, str(PROCESSES / "ours.py"), asked]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = workshop.environment | {"PYTHONPATH": path}
    return Contender(name, command, workshop.folder, r"^round \d+ is done", environment)


def describe_versions(checkouts: dict[str, Path], python: str) -> str:
    """Return a line with the commits of the checkouts and the versions that matter."""
    found = []
    for name, checkout in checkouts.items():
        asked = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
        commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        found.append(f"{RIVALS[name].title} {commit or 'without git'}")
    code = (
        "from importlib.metadata import version; "
        "print('torch', version('torch') + ', torchvision', version('torchvision'))"
    )
    asked = [python, "-W", "ignore", "-c", code]
    versions = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    found.append(versions or f"{python} has no torch or no torchvision")
    return ", ".join([*found, f"Python {platform.python_version()}"])


def measure(work: Work, checkouts: dict[str, Path], asked: argparse.Namespace, logs: Path) -> str:
    """Let all contenders do the work in turns; return a table with its title."""
    data = divide(SETTINGS)
    with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
        rounds = asked.turns + SPARE_ROUNDS
        workshop = Workshop(work, Path(folder), data, rounds, asked.threads, asked.device)
        rivals, refused = list_rivals(checkouts, asked.python, workshop)
        found = take_turns([*list_ours(workshop), *rivals], asked.turns, logs, _say)
    return f"{work.title}\n\n{make_table(found, refused, BASE)}\n"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, rival in RIVALS.items():
        parser.add_argument(
            f"--{name}", type=Path, metavar="DIR", help=f"{rival.title}, a checkout"
        )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the checkouts")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--turns", type=int, default=5, help="rounds of each that are counted")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--logs", type=Path, help="keep what the processes print in this folder")
    return parser.parse_args(arguments)


def _check_arguments(asked: argparse.Namespace) -> dict[str, Path]:
    """Return the checkouts that were named, by rival; `asked.python` becomes an absolute path."""
    if min(asked.turns, asked.threads) < 1:
        raise ConfigError("--turns and --threads are whole numbers of at least 1")
    python = shutil.which(asked.python)
    if python is None:
        raise ConfigError(f"--python is {asked.python}, which is not a program that can be run")
    asked.python = str(Path(python).absolute())
    checkouts = {}
    for name in RIVALS:
        checkout = getattr(asked, name.replace("-", "_"))
        if checkout is not None:
            check_checkout(name, checkout)
            checkouts[name] = checkout.absolute()
    if not checkouts:
        raise ConfigError("name at least one checkout: --" + ", --".join(RIVALS))
    return checkouts


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; a wrong checkout ends the program with exit code 2."""
    asked = _read_arguments(arguments)
    try:
        checkouts = _check_arguments(asked)
        with tempfile.TemporaryDirectory(prefix="rivals-logs-") as folder:
            logs = asked.logs or Path(folder)
            for name in asked.works:
                (logs / name).mkdir(parents=True, exist_ok=True)
                print(measure(WORKS[name], checkouts, asked, logs / name), flush=True)
    except FedProtoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(describe_versions(checkouts, asked.python))


if __name__ == "__main__":
    main()
