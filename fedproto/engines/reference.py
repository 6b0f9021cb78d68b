"""One client after the other, in plain sight: the engine that all others must agree with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedproto.core import local_training
from fedproto.core.engine import Chunk, Cohort, Shard, errors_named, make_chunk
from fedproto.core.federation import Federation
from fedproto.core.local_training import Training
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Algorithm, Tree


class ReferenceEngine:
    def __init__(
        self,
        federations: Sequence[Federation],
        algorithm: Algorithm,
        trainings: Sequence[Training],
        shard: Shard = Shard(),  # noqa: B008 (a constant)
    ) -> None:
        self.federations, self.algorithm, self.trainings, self.shard = (
            federations,
            algorithm,
            trainings,
            shard,
        )
        self.states: list[list[Tree]] = [
            [member.initial for member in each.members] for each in federations
        ]

    def train(
        self, round: int, servers: Sequence[Tree], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        """Train the sampled clients, one chunk each, and keep their new states."""
        for number, (server, cohort) in enumerate(zip(servers, cohorts, strict=True)):
            slow = set(cohort.slow.tolist())
            for client in filter(self.shard.holds, cohort.sampled.tolist()):
                yield self._train(round, number, server, cohort, client, client in slow)

    def _train(
        self, round: int, number: int, server: Tree, cohort: Cohort, client: int, slow: bool
    ) -> Chunk:
        federation, training = self.federations[number], self.trainings[number]
        member, own = federation.members[client], self.states[number][client]
        with errors_named(f"round {round}, client {client} ({member.model}), training"):
            received = self.algorithm.send(server, federation.own_classes[client])
            outcome = local_training.train(
                member, self.algorithm, own, received, training, round, slow
            )
        self.states[number][client] = outcome.state
        loss = {name: value[None] for name, value in outcome.loss.items()}
        sound = _finite(outcome.loss | outcome.state | outcome.upload.sums)
        return make_chunk(
            number,
            cohort,
            torch.tensor([client]),
            stack_uploads([outcome.upload]),
            loss,
            sound[None],
        )

    def evaluate(self, servers: Sequence[Tree]) -> list[Tree]:
        """Every client's accuracies with the server's present state."""
        tables = []
        for federation, states, server in zip(self.federations, self.states, servers, strict=True):
            everything = torch.ones_like(federation.own_classes[0])
            table: Tree = {}
            for member in filter(lambda member: self.shard.holds(member.id), federation.members):
                with errors_named(f"client {member.id} ({member.model}), evaluation"):
                    received = self.algorithm.send(server, everything)
                    accuracies = local_training.evaluate(
                        member, self.algorithm, states[member.id], received
                    )
                for key, value in accuracies.items():
                    table.setdefault(key, torch.zeros(len(states), dtype=torch.float64))[
                        member.id
                    ] = value
            tables.append(table)
        return tables

    def export(self, federation: int) -> Tree:
        """All clients' states as one flat tree, for a checkpoint."""
        mine = [
            (number, state)
            for number, state in enumerate(self.states[federation])
            if self.shard.holds(number)
        ]
        return {
            f"{number}.{name}": value for number, state in mine for name, value in state.items()
        }

    def restore(self, federation: int, tree: Tree) -> None:
        states, device = self.states[federation], self.federations[federation].device
        for number, state in enumerate(states):
            if self.shard.holds(number):
                states[number] = {name: tree[f"{number}.{name}"].to(device) for name in state}

    def close(self) -> None:
        pass


def _finite(tree: Tree) -> Tensor:
    return torch.stack([torch.isfinite(value).all() for value in tree.values()]).all()
