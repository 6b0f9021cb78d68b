"""The reference engine: one client after the other. All other engines must agree with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedproto.core import local_training
from fedproto.core.batches import Training
from fedproto.core.engine import Chunk, Cohort, Shard, errors_named, make_chunk
from fedproto.core.federation import EvaluatedPart, Federation
from fedproto.core.measurement import MeasuredClient
from fedproto.core.tensors import flatten_upload, stack_uploads
from fedproto.core.types import Algorithm, State, Tree


class ReferenceEngine:
    """Trains the clients of all federations one after the other."""

    def __init__(
        self,
        federations: Sequence[Federation],
        algorithm: Algorithm,
        trainings: Sequence[Training],
        shard: Shard = Shard(),  # noqa: B008 (a constant)
    ) -> None:
        self.federations = federations
        self.algorithm = algorithm
        self.trainings = trainings
        self.shard = shard
        self.states: list[list[Tree]] = []  # by federation and client
        for federation in federations:
            self.states.append(self._start_clients(federation))

    def _start_clients(self, federation: Federation) -> list[Tree]:
        """Return the whole states of a federation's clients before round 1."""
        with errors_named(f"algorithm {self.algorithm.name}, before round 1"):
            return [
                local_training.start_client(self.algorithm, member.initial, federation.task)
                for member in federation.members
            ]

    def train(
        self, round: int, servers: Sequence[State], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        """Train the sampled clients, one chunk each, and keep their new states."""
        for number, server in enumerate(servers):
            cohort = cohorts[number]
            slow = set(cohort.slow.tolist())
            for client in cohort.sampled.tolist():
                if self.shard.holds(client):
                    yield self._train_one(round, number, server, cohort, client, client in slow)

    def _train_one(
        self, round: int, number: int, server: State, cohort: Cohort, client: int, slow: bool
    ) -> Chunk:
        """Train one client of the federation with this number; return its chunk."""
        federation = self.federations[number]
        member = federation.members[client]
        with errors_named(f"round {round}, client {member.name} ({member.model}), training"):
            heard = 0 if cohort.heard is None else cohort.heard[client]
            recipient = federation.recipient(client, heard=heard)
            received = self.algorithm.send(server, recipient)
            outcome = local_training.train(
                member,
                self.algorithm,
                self.states[number][client],
                received,
                self.trainings[number],
                round,
                slow,
                once_due=cohort.once_due,
            )
        self.states[number][client] = outcome.state
        uploads = stack_uploads([outcome.upload])
        loss = {name: value[None] for name, value in outcome.loss.items()}
        sound = _is_finite(outcome.loss | outcome.state | flatten_upload(outcome.upload))
        sizes = outcome.sizes[None]
        return make_chunk(number, cohort, torch.tensor([client]), uploads, sizes, loss, sound[None])

    def evaluate(self, servers: Sequence[State], part: EvaluatedPart = "test") -> list[Tree]:
        """Return every client's accuracies with the server's present state, per federation."""
        tables = []
        for number, server in enumerate(servers):
            tables.append(self._evaluate_federation(number, server, part))
        return tables

    def _evaluate_federation(self, number: int, server: State, part: EvaluatedPart) -> Tree:
        """Return the accuracies of one federation's clients.

        They are 0 for clients of other shards, and for clients without rows of this part.
        """
        federation = self.federations[number]
        states = self.states[number]
        table: Tree = {}
        for member in federation.members:
            if not self.shard.holds(member.id) or not len(member.examples_of(part)):
                continue
            with errors_named(f"client {member.name} ({member.model}), evaluation"):
                received = self.algorithm.send(server, federation.recipient(member.id, True))
                accuracies = local_training.evaluate(
                    member, self.algorithm, states[member.id], received, part
                )
            for name, value in accuracies.items():
                if name not in table:
                    table[name] = torch.zeros(len(states), dtype=torch.float64)
                table[name][member.id] = value
        return table

    def measure(
        self, servers: Sequence[State], part: EvaluatedPart = "test"
    ) -> list[dict[int, MeasuredClient]]:
        """Return all metrics of every client of this shard by its number, per federation."""
        tables = []
        for number, server in enumerate(servers):
            tables.append(self._measure_federation(number, server, part))
        return tables

    def _measure_federation(
        self, number: int, server: State, part: EvaluatedPart
    ) -> dict[int, MeasuredClient]:
        """Return the metrics of one federation's clients that are in this shard."""
        federation = self.federations[number]
        measured = {}
        for member in federation.members:
            if not self.shard.holds(member.id):
                continue
            if not len(member.examples_of(part)):
                measured[member.id] = MeasuredClient({}, None, None)
                continue
            with errors_named(f"client {member.name} ({member.model}), evaluation"):
                received = self.algorithm.send(server, federation.recipient(member.id, True))
                own = self.states[number][member.id]
                scores, y = local_training.score(member, self.algorithm, own, received, part)
                measured[member.id] = federation.measure_client(member.id, scores, y, part)
        return measured

    def export(self, federation: int) -> Tree:
        """Return all clients' states as one flat tree, `CLIENT.NAME`, for a checkpoint."""
        tree = {}
        for client, state in enumerate(self.states[federation]):
            if self.shard.holds(client):
                for name, value in state.items():
                    tree[f"{client}.{name}"] = value
        return tree

    def restore(self, federation: int, tree: Tree) -> None:
        """Continue from the states that `export` returned."""
        states = self.states[federation]
        device = self.federations[federation].device
        for client, state in enumerate(states):
            if self.shard.holds(client):
                states[client] = {name: tree[f"{client}.{name}"].to(device) for name in state}

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _is_finite(tree: Tree) -> Tensor:
    """Return whether all values of a tree are finite, as a boolean tensor ()."""
    return torch.stack([torch.isfinite(value).all() for value in tree.values()]).all()
