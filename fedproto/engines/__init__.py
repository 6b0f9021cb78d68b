"""Engines train the clients of a round. The reference engine is the oracle of every other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from fedproto.types import Tree, Upload


class Chunk(NamedTuple):
    """Some clients' training, finished: an engine gives as many at a time as it trains at a time."""

    clients: list[int]
    uploads: Upload  # with a leading axis over these clients
    loss: dict[str, list[float]]  # a value a client


class Engine(Protocol):
    """Keeps the clients' states between rounds."""

    def train(self, round: int, server: Tree, picked: Sequence[int], slow: Collection[int]) -> Iterator[Chunk]:
        """Train the picked clients, the slow ones for half their steps, and keep their new states."""
        ...

    def evaluate(self, server: Tree) -> list[dict[str, float]]:
        """Every client's accuracies with the server's present state."""
        ...

    def export(self) -> Tree:
        """All clients' states as one flat tree, `CLIENT.NAME`, for a checkpoint."""
        ...

    def restore(self, tree: Tree) -> None:
        """Take up what `export` gave."""
        ...
