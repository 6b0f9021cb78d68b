"""What attackers learn from federations on MNIST, without protection and with each kind of it.

Ten clients with 1 to 5 images of each of their classes: few images are the worst case. The same
federation is trained with every protection, and each run is attacked as it is by `fedproto audit`.
results/audit.* and results/audit-figures were written by it, in one go.

    python3 -m benchmarks.audit                        # some 10 minutes on one CPU core
    python3 -m benchmarks.audit --out runs/audit       # somewhere else than results/
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fedproto
from fedproto.audit import write
from fedproto.audit.attacks import Effort

RESULTS = Path(__file__).resolve().parent.parent / "results"
COMMON: dict[str, Any] = {
    "dataset": "mnist5k",
    "clients": 10,
    "shots": 3,
    "shots_stdev": 2,
    "rounds": 10,
}
EPSILON = 8.0
FEDAVG = {"algorithm": "fedavg", "model": "cnn(dropout=0)"}
#: The settings of each run beside COMMON, by its name.
RUNS: dict[str, dict[str, Any]] = {
    "few": {},
    "secure": {"combiner": "secure-sum", "absent": "drop"},
    "client": {"privacy": "client", "epsilon": EPSILON, "absent": "drop"},
    "training": {"privacy": "training", "epsilon": EPSILON, "absent": "drop"},
    "frozen": {"freeze": "body"},
    "release": {"privacy": "release", "epsilon": EPSILON, "freeze": "body"},
    "fedavg-no-dropout": FEDAVG,
    "fedavg-training": FEDAVG | {"privacy": "training", "epsilon": EPSILON},
}
EFFORT = Effort(federations=30, targets=8, victims=2, steps=300)


def train_runs(folder: Path) -> list[Path]:
    """Return the run folders of all protections, and train those that are not there."""
    paths = []
    for name, settings in RUNS.items():
        path = folder / name
        if not (path / "result.json").exists():
            print(f"training {name}", flush=True)
            fedproto.run(**(COMMON | settings), out=path)
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs") / "audit-runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    page = write(train_runs(arguments.runs), arguments.out / "audit.html", effort=EFFORT)
    print(f"written to {page}")


if __name__ == "__main__":
    main()
