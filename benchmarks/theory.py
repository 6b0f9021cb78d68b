"""Lemma 1, Lemma 2, Theorem 1, Corollary 1 and Theorem 2 along FedProto on MNIST.

20 clients, n = 3, stdev 2, k = 100, batch 8, lr 0.01, lambda 1, rounds among the first 20, 3 seeds;
in the proof's own setting (no momentum, no dropout, the norm), in the same with dropout, and in
that of the paper's tables (momentum 0.5, dropout, the mean squared distance).

    python3 -m benchmarks.theory measure RAW    # measures what RAW lacks: 20 s per round
    python3 -m benchmarks.theory tune RAW       # `fedproto tune --by theory` on two data sets
    python3 -m benchmarks.theory page RAW       # writes results/theory.{json,md,png}
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedproto
from benchmarks.theory_page import NORM, RESULTS, write_page
from fedproto.config.settings import Config, configure
from fedproto.runs.experiment import Experiment
from fedproto.theory.along_run import PROOF, RUN, TheoryOptions, measure_experiment
from fedproto.theory.conditions import make_proof_config

SETTINGS: dict[str, Any] = {
    "dataset": "mnist",
    "algorithm": "fedproto",
    "model": "cnn",
    "clients": 20,
    "ways": 3,
    "stdev": 2,
    "shots": 100,
    "batch": 8,
    "lr": 0.01,
    "momentum": 0.5,
    "rounds": 100,
    "eval_every": 100,
    "checkpoint_every": 0,
    "device": "cpu",
    "engine": "vectorised",
    "compile": "off",
}
ROUNDS = 20
SEEDS = (0, 1, 2)
#: Every fourth round is measured in each of four passes; they begin with these rounds.
PASSES = (2, 4, 1, 3)


#: The flags of `fedproto tune` by data set; everything else is its default.
TUNED = {
    "digits": ["--dataset", "digits", "--set", "clients=10", "--set", "shots=20"],
    "mnist5k": ["--dataset", "mnist5k", "--model", "mlp", "--rounds", "10"],
}


def make_config(setting: str, seed: int) -> Config:
    """Return the settings of one run."""
    config = configure(SETTINGS | {"seed": seed})[0]
    if setting == RUN:
        return config
    proof = make_proof_config(config)
    return proof if setting == PROOF else replace(proof, model=config.model)


def measure(raw: Path) -> None:
    """Measure every setting and seed whose file is missing."""
    raw.mkdir(parents=True, exist_ok=True)
    for first in PASSES:
        for setting in (PROOF, RUN, NORM):
            for seed in SEEDS:
                path = raw / f"{setting}-{seed}-{first}.json"
                if path.exists():
                    continue
                experiment = Experiment.prepare(make_config(setting, seed))
                options = TheoryOptions(rounds=ROUNDS, first=first, every=len(PASSES))
                content = measure_experiment(experiment, options, _announce(path.stem))
                path.write_text(json.dumps(content) + "\n")


def _announce(name: str) -> Callable[[dict[str, Any]], None]:
    def announce(record: dict[str, Any]) -> None:
        seconds = sum(record["seconds"].values())
        print(name, record["round"], f"{seconds:.0f} s", record["constants"], flush=True)

    return announce


def tune(raw: Path) -> None:
    """Search on validation rows, and judge what the theory proposes, on two data sets."""
    for name, flags in TUNED.items():
        command = [sys.executable, "-m", "fedproto", "tune", "--by", "theory", *flags]
        subprocess.run([*command, "--out", str(raw / f"tune-{name}")], check=True)


def page(raw: Path, results: Path = RESULTS) -> None:
    """Write the results of everything that has been measured."""
    machine = {
        "device": platform.machine(),
        "torch": torch.__version__,
        "fedproto": fedproto.__version__,
    }
    write_page(raw, results, SETTINGS, machine)


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    commands = {"measure": measure, "tune": tune, "page": page}
    commands[command](Path(folder))
