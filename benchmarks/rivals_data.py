"""The federation of `benchmarks/rivals.py`, written in the formats of the other libraries."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.data import DataFolders, Source
from fedproto.runs.experiment import Experiment


class Rows(NamedTuple):
    """One client's rows of the data set."""

    train: np.ndarray
    test: np.ndarray


class DividedData(NamedTuple):
    """A data set and the clients' rows of it."""

    source: Source
    clients: Sequence[Rows]


def divide(settings: Mapping[str, Any]) -> DividedData:
    """Return the data of a run with these settings, divided as that run divides it."""
    (config,) = configure(dict(settings))
    experiment = Experiment.prepare(config)
    source = plugins.build("dataset", Part(settings["dataset"]), DataFolders(None))
    stored = experiment.federation.partition["clients"]
    clients = [Rows(np.array(client["train"]), np.array(client["test"])) for client in stored]
    return DividedData(source, clients)


def write_idx(folder: Path, source: Source) -> None:
    """Write the four files of MNIST where torchvision looks for them: `folder`/MNIST/raw."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, split in (("train", source.train), ("t10k", source.test)):
        for kind, values in (("images-idx3", split.x), ("labels-idx1", split.y)):
            numbers = np.asarray(values).astype(np.uint8)
            # Two zero bytes, the type (8: unsigned bytes), the number of axes, each axis's length.
            header = struct.pack(f">BBBB{numbers.ndim}I", 0, 0, 8, numbers.ndim, *numbers.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + numbers.tobytes())


def write_npz(folder: Path, data: DividedData) -> None:
    """Write one file per client and split, as PFLlib and HtFLlib read them: {"x": ..., "y": ...}.

    The pixels are normalised here, since these libraries store what they train on.
    """
    source = data.source
    for name, split in (("train", source.train), ("test", source.test)):
        (folder / name).mkdir(parents=True)
        for number, client in enumerate(data.clients):
            rows = getattr(client, name)
            x = source.tensor(split, rows).numpy()
            content = {"x": x, "y": np.asarray(split.y)[rows]}
            np.savez_compressed(folder / name / f"{number}.npz", data=np.array(content))


def write_fl_bench(folder: Path, data: DividedData) -> None:
    """Write MNIST, the rows of each client, and the arguments they were made by, for FL-bench.

    It numbers the test rows after the training rows.
    """
    write_idx(folder, data.source)
    shift = len(data.source.train.y)
    everybody = list(range(len(data.clients)))
    indices = []
    for client in data.clients:
        none = np.zeros(0, dtype=np.int64)
        indices.append({"train": client.train, "val": none, "test": client.test + shift})
    separation = {"train": everybody, "val": [], "test": everybody, "total": len(everybody)}
    partition = {"separation": separation, "data_indices": indices}
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    arguments = {"dataset": "mnist", "split": "sample", "client_num": len(everybody)}
    (folder / "args.json").write_text(json.dumps(arguments))


def find_released_seed(clients: int, batch: int, steps: int) -> int:
    """Return the first seed with which the released code trains as many steps in a round.

    With `--ways 3 --shots 100 --stdev 2` it draws 2 to 5 classes per client and 99 or 100 images of
    each; it has no option for equal clients. It leaves out a last batch that is not full.
    """
    for seed in range(100_000):
        generator = np.random.RandomState(seed)
        ways = generator.randint(2, 6, clients)
        shots = generator.randint(99, 101, clients)
        if int((ways * shots // batch).sum()) == steps:
            return seed
    raise ValueError(f"no seed gives {steps} steps")
