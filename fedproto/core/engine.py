"""What an engine is: it trains the clients of a round, of one federation or of several at once.

Every other engine is tested against the reference engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedproto.core.federation import EvaluatedPart
from fedproto.core.measurement import MeasuredClient
from fedproto.core.tensors import select_rows
from fedproto.core.types import State, Tree, Upload
from fedproto.errors import FedProtoError, TrainingError, locate, name_failure


class Cohort(NamedTuple):
    """Who takes part in a round, as sorted client numbers on the CPU."""

    sampled: Tensor
    lost: Tensor  # the sampled clients whose upload does not arrive
    slow: Tensor  # the sampled clients that do half their steps
    heard: Tensor | None = None  # (clients,) see `types.Recipient`; None: nobody was heard
    #: Whether the groups of `upload_once` are due from one of the sampled clients.
    once_due: bool = True


#: The cohort of a federation that is over.
_NO_CLIENTS = torch.zeros(0, dtype=torch.int64)
NOBODY = Cohort(_NO_CLIENTS, _NO_CLIENTS, _NO_CLIENTS, once_due=False)


class Chunk(NamedTuple):
    """The finished training of as many clients as an engine trains at a time."""

    federation: int  # its position in the list the engine was made for
    clients: Tensor  # who trained
    sizes: Tensor  # (clients, groups, 2): values and bytes of each group of an upload
    loss: Tree  # each term, one value per client
    sound: Tensor  # (clients,) whether loss, parameters and upload are finite
    speakers: Tensor  # the clients whose upload arrived
    #: With a leading axis over the speakers; of length 1, their sum, if the algorithm is additive.
    uploads: Upload


def make_chunk(
    federation: int,
    cohort: Cohort,
    clients: Tensor,
    uploads: Upload,
    sizes: Tensor,
    loss: Tree,
    sound: Tensor,
) -> Chunk:
    """Return the chunk of some clients; of their uploads, those that are lost are left out."""
    arrived = ~torch.isin(clients, cohort.lost)
    if not arrived.all():
        uploads = select_rows(uploads, arrived.nonzero().flatten())
    return Chunk(federation, clients, sizes, loss, sound, clients[arrived], uploads)


@contextmanager
def errors_named(where: str) -> Iterator[None]:
    """Turn any error within it, such as one in a model, into a TrainingError that says where.

    An error in code from outside the package, such as a plug-in, also gets its kind, file and line.
    """
    try:
        yield
    except FedProtoError:
        raise
    except torch.OutOfMemoryError as error:
        advice = "train fewer clients at a time, as with stack=100"
        raise TrainingError(f"{where}: the GPU's memory is full; {advice}") from error
    except Exception as error:
        place = locate(error)
        if place is not None:
            raise TrainingError(f"{where} ({place}): {name_failure(error)}") from error
        raise TrainingError(f"{where}: {str(error) or type(error).__name__}") from error


def even_size(count: int, most: int) -> int:
    """Return the size of the parts when `count` things are split evenly, at most `most` per part.

    >>> even_size(10, 4)  # three parts
    4
    >>> even_size(9, 8)  # two parts
    5
    """
    parts = math.ceil(count / most)
    return math.ceil(count / parts)


class Shard(NamedTuple):
    """The clients that one of several processes holds: every `of`-th, starting with `first`."""

    first: int = 0
    of: int = 1

    def holds(self, client: int | Tensor) -> bool | Tensor:
        """Return whether a client is in the shard; for a tensor of clients, one value for each."""
        return client % self.of == self.first


class Engine(Protocol):
    """Trains clients and keeps their states between rounds.

    `servers` and `cohorts` have an entry per federation; `federation` is a position in them.
    """

    def train(
        self,
        round: int,
        servers: Sequence[State],
        cohorts: Sequence[Cohort],
    ) -> Iterator[Chunk]:
        """Train the sampled clients, slow ones for half their steps; keep their new states."""
        ...

    def evaluate(self, servers: Sequence[State], part: EvaluatedPart = "test") -> list[Tree]:
        """Return every client's accuracies, with the server's state as it is, per federation.

        Each is a tree of name -> (clients,), float64, on the CPU. `part` says which rows of the
        clients are meant; a client without validation rows has accuracy 0.
        """
        ...

    def measure(
        self, servers: Sequence[State], part: EvaluatedPart = "test"
    ) -> list[dict[int, MeasuredClient]]:
        """Return all metrics of every client by its number, per federation.

        They cost more than accuracies, so they are for the end of a run. The clients are measured
        as many at a time as `evaluate` does it, so that their scores fit into memory.
        """
        ...

    def export(self, federation: int) -> Tree:
        """Return all clients' states as one flat tree, `CLIENT.NAME`, for a checkpoint."""
        ...

    def restore(self, federation: int, tree: Tree) -> None:
        """Continue from the states that `export` returned."""
        ...

    def close(self) -> None:
        """Release what must not outlive a run, such as processes."""
        ...
