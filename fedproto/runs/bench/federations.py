"""The federations that `fedproto bench` trains: clients of three classes with a hundred images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core import rng
from fedproto.core.batches import Training
from fedproto.core.federation import Federation
from fedproto.data import DIGITS, DataFolders, Source, Split
from fedproto.errors import DataError
from fedproto.partitions import ClientRows
from fedproto.runs.assemble import assemble

WAYS = 3  # classes per client
SHOTS = 100  # training images per class and client
TEST_SHOTS = 10  # test images per class and client


@dataclass(frozen=True)
class Work:
    """What is measured: rounds of FedProto with so many clients."""

    model: str
    clients: int
    device: str
    precision: str = "float32"

    @property
    def batch(self) -> int:
        """Samples per batch."""
        return 32 if self.model == "resnet18" else 8

    def training(self, seed: int = 0) -> Training:
        """Return how the clients train."""
        return Training(
            batch=self.batch, lr=0.01, momentum=0.5, epochs=1, last_batch="auto", seed=seed
        )


def load_source(work: Work, folders: DataFolders) -> Source:
    """Return MNIST where it can be found, else noise of its shape.

    For ResNet18 it is noise of CIFAR-10's shape.
    """
    if work.model == "resnet18":
        return _draw_noise("noise like CIFAR-10", (3, 32, 32), 10000)
    try:
        return plugins.build("dataset", Part("mnist"), folders)
    except DataError:
        if folders.data_dir is not None:  # the user says that the data is there
            raise
        return _draw_noise("noise like MNIST", (28, 28), 60000)


def _draw_noise(name: str, shape: tuple[int, ...], count: int) -> Source:
    generator = np.random.default_rng(0)
    splits = []
    for rows in (count, 10000):
        x = generator.integers(0, 256, (rows, *shape), dtype=np.uint8)
        splits.append(Split(x, np.arange(rows) % 10))
    train, test = splits
    channels = shape[0] if len(shape) == 3 else 1
    return Source(name, DIGITS, train, test, mean=(0.1,) * channels, std=(0.3,) * channels)


def draw_rows(
    source: Source, clients: int, seed: int = 0, test_shots: int | None = TEST_SHOTS
) -> list[ClientRows]:
    """Draw each client's rows with replacement, so that any number can share one data set.

    Clients share training images here, which is for measuring only. `test_shots` are the test
    images per class; None: all.
    """
    generator = rng.generator(seed, "virtual")
    train_rows = []
    test_rows = []
    for label in range(len(source.classes)):
        train_rows.append(np.flatnonzero(source.train.y == label))
        test_rows.append(np.flatnonzero(source.test.y == label)[:test_shots])
    drawn = []
    for _ in range(clients):
        labels = generator.permutation(len(source.classes))[:WAYS]
        train = np.concatenate([generator.choice(train_rows[label], SHOTS) for label in labels])
        test = np.concatenate([test_rows[label] for label in labels])
        drawn.append(ClientRows(train, test))
    return drawn


def build_federation(
    work: Work,
    source: Source,
    clients: int,
    seed: int = 0,
    test_shots: int | None = TEST_SHOTS,
) -> Federation:
    """Return a federation of such clients, all with the same model."""
    return assemble(
        [source] * clients,
        draw_rows(source, clients, seed, test_shots),
        [Part(work.model)] * clients,
        dim=None,
        seed=seed,
        device=torch.device(work.device),
        dtype=torch.float32,
    )
