"""Engines train the clients of a round, of one federation or of several at once. The reference engine is the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedproto.core import codec
from fedproto.core.tensors import rows_of
from fedproto.core.types import Tree, Upload
from fedproto.errors import FedProtoError, TrainingError


class Cohort(NamedTuple):
    """Who was drawn for a round, as sorted client numbers on the CPU."""

    picked: Tensor
    lost: Tensor  # of them, those whose upload does not arrive
    slow: Tensor  # of them, those who do half their steps


class Chunk(NamedTuple):
    """Some clients' training, finished: an engine gives as many at a time as it trains at a time."""

    federation: int  # its position in the list the engine was made for
    clients: Tensor  # who trained
    sizes: Tensor  # (clients, 2): values and bytes of what each sent
    loss: Tree  # each term, a value a client
    sound: Tensor  # (clients,) whether loss, parameters and upload are finite
    speakers: Tensor  # those of the clients whose upload arrived
    uploads: Upload  # with a leading axis over the speakers, or of length 1: their sum, if the algorithm is additive


def chunk(federation: int, lot: Cohort, clients: Tensor, uploads: Upload, loss: Tree, sound: Tensor) -> Chunk:
    """The chunk of clients whose uploads, with a leading axis over them, are all at hand."""
    sizes = codec.upload_sizes(uploads, len(clients))
    heard = ~torch.isin(clients, lot.lost)
    if not heard.all():
        uploads = rows_of(uploads, heard.nonzero().flatten())
    return Chunk(federation, clients, sizes, loss, sound, clients[heard], uploads)


@contextmanager
def errors_named(where: str) -> Iterator[None]:
    """An error in a model or an algorithm says where it happened."""
    try:
        yield
    except FedProtoError:
        raise
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{where}: the GPU's memory is full; train fewer clients at a time, as with stack=100"
        ) from error
    except Exception as error:
        raise TrainingError(f"{where}: {error}") from error


def evenly(count: int, most: int) -> int:
    """The size of a part, when as few as possible of at most `most` are made as equal as possible."""
    return math.ceil(count / math.ceil(count / most))


class Shard(NamedTuple):
    """The clients one of several processes holds: every `of`-th, from the `first` on."""

    first: int = 0
    of: int = 1

    def holds(self, client: int | Tensor) -> bool | Tensor:
        return client % self.of == self.first


class Engine(Protocol):
    """Keeps the clients' states between rounds. Its arguments are lists with an entry a federation."""

    def train(self, round: int, servers: Sequence[Tree], lots: Sequence[Cohort]) -> Iterator[Chunk]:
        """Train the clients that were picked, the slow ones for half their steps, and keep their new states."""
        ...

    def evaluate(self, servers: Sequence[Tree]) -> list[Tree]:
        """Every client's accuracies with the server's present state: name -> (clients,), float64, on the CPU."""
        ...

    def export(self, federation: int) -> Tree:
        """All clients' states as one flat tree, `CLIENT.NAME`, for a checkpoint."""
        ...

    def restore(self, federation: int, tree: Tree) -> None:
        """Take up what `export` gave."""
        ...

    def close(self) -> None:
        """Let go of what must not outlive a run, such as processes."""
        ...
