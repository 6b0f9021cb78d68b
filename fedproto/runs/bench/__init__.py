"""How fast: a round of each engine beside a plain loop over clients, the same work in the same run.

The contenders take turns, so that a noisy machine is noisy for all of them; medians are compared.
The first round of each, in which graphs are recorded and memory is allocated, is not counted but
shown as `start`.
"""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedproto.config import plugins
from fedproto.config.options import PositiveInt, convert
from fedproto.config.settings import configure
from fedproto.data import DataFolders
from fedproto.engines.distributed.torchrun import refuse_torchrun
from fedproto.errors import ConfigError
from fedproto.runs.bench.federations import Work, load_source
from fedproto.runs.bench.scale import measure_crowd, measure_seeds
from fedproto.runs.bench.timing import measure
from fedproto.runs.devices import device_of, torch_settings


def bench(
    clients: str,
    model: str,
    device: str,
    precision: str,
    rounds: int,
    seeds: int,
    huge: int,
    data_dir: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure everything that `fedproto bench` was asked for; return the content of its JSON file.

    `clients`, `model` and `precision` are lists with commas. `seeds` and `huge` are 0 where they
    are not wanted. `say` is called with a line before each measurement.
    """
    numbers = _read_numbers(clients)
    precisions = _read_precisions(precision, device)
    if not (numbers or seeds or huge):
        raise ConfigError("nothing to measure: name numbers of clients, --seeds or --huge")
    refuse_torchrun("bench")
    models = model.split(",")
    for name in models:
        plugins.find("model", name)
    device = device_of(device).type
    folders = DataFolders(None if data_dir is None else str(data_dir))
    rows = []
    for name in models:
        for number in numbers:
            for kind in precisions:
                say(f"measuring {name}, {number:,} clients, {kind}, on {device}")
                rows += measure(Work(name, number, device, kind), folders, rounds)
    cnn = Work("cnn", 20, device)
    with torch_settings(1, cnn.precision):
        if seeds:
            rows.append(measure_seeds(cnn, load_source(cnn, folders), seeds))
        if huge:
            rows.append(measure_crowd(replace(cnn, clients=huge), load_source(cnn, folders)))
    return {"machine": describe_machine(device), "rows": [asdict(row) for row in rows]}


def _read_numbers(clients: str) -> list[int]:
    """Read numbers of clients, with the checks of a run's setting; empty text names none."""
    words = [word for word in clients.split(",") if word]
    return [convert("clients", word, PositiveInt) for word in words]


def _read_precisions(precision: str, device: str) -> list[str]:
    """Read precisions, with the checks of a run's settings `precision` and `device`."""
    precisions: list[str] = []
    for word in precision.split(","):
        (config,) = configure({"precision": word, "device": device})
        precisions.append(config.precision)
    if "float64" in precisions:
        raise ConfigError(
            "fedproto bench measures float32, tf32 and bf16: the plain loop has no float64"
        )
    return precisions


def describe_machine(device: str) -> dict[str, Any]:
    """Return what the numbers depend on."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = platform.processor() or platform.machine()
    return {
        "device": name,
        "cores": multiprocessing.cpu_count(),
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
