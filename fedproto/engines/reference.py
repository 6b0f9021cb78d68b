"""One client after the other, in plain sight: the engine that all others must agree with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from fedproto import client
from fedproto.client import Training
from fedproto.engines import Chunk
from fedproto.errors import FedProtoError, TrainingError
from fedproto.federation import Federation
from fedproto.trees import stack
from fedproto.types import Algorithm, Tree


class ReferenceEngine:
    def __init__(self, federation: Federation, algorithm: Algorithm, training: Training) -> None:
        self.federation, self.algorithm, self.training = federation, algorithm, training
        self.states: list[Tree] = [member.initial for member in federation.members]

    def train(self, round: int, server: Tree, picked: Sequence[int], slow: Collection[int]) -> Iterator[Chunk]:
        """Train the picked clients, one chunk each, and keep their new states."""
        for number in picked:
            member = self.federation.members[number]
            received = self._received(server, number, own_only=True)
            with _errors_named(f"round {round}, client {number} ({member.model}), training"):
                outcome = client.train(
                    member, self.algorithm, self.states[number], received, self.training, round, number in slow
                )
            loss = {name: [float(value)] for name, value in outcome.loss.items()}
            self._refuse_divergence(round, number, loss, outcome.state | outcome.upload.sums)
            self.states[number] = outcome.state
            yield Chunk([number], stack([outcome.upload]), loss)

    def _refuse_divergence(self, round: int, number: int, loss: dict[str, list[float]], made: Tree) -> None:
        """The loss tells of every step but the last; what came of that one is in the parameters and the upload."""
        wrong = [f"the {name} loss is {value}" for name, (value,) in loss.items() if not math.isfinite(value)]
        wrong += [f"{name} is not finite" for name, value in made.items() if not torch.isfinite(value).all()]
        if wrong:
            lr = self.training.lr
            raise TrainingError(f"round {round}, client {number}, training: {wrong[0]}; lr {lr:g} may be too high")

    def evaluate(self, server: Tree) -> list[dict[str, float]]:
        """Every client's accuracies with the server's present state."""
        accuracies = []
        for member, state in zip(self.federation.members, self.states, strict=True):
            received = self._received(server, member.id, own_only=False)
            with _errors_named(f"client {member.id} ({member.model}), evaluation"):
                accuracies.append(client.evaluate(member, self.algorithm, state, received))
        return accuracies

    def _received(self, server: Tree, number: int, own_only: bool) -> Tree:
        own = self.federation.own_classes[number]
        return self.algorithm.send(server, own if own_only else torch.ones_like(own))

    def export(self) -> Tree:
        """All clients' states as one flat tree, for a checkpoint."""
        return {f"{number}.{name}": value for number, state in enumerate(self.states) for name, value in state.items()}

    def restore(self, tree: Tree) -> None:
        for number, state in enumerate(self.states):
            self.states[number] = {name: tree[f"{number}.{name}"].to(self.federation.device) for name in state}


@contextmanager
def _errors_named(where: str) -> Iterator[None]:
    """An error in a model or an algorithm says where it happened."""
    try:
        yield
    except FedProtoError:
        raise
    except Exception as error:
        raise TrainingError(f"{where}: {error}") from error
