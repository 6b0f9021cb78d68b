"""The engine that trains clients of one architecture together, in stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedproto.core.batches import Training
from fedproto.core.engine import Chunk, Cohort, Shard, errors_named, make_chunk
from fedproto.core.federation import EvaluatedPart, Federation
from fedproto.core.measurement import MeasuredClient
from fedproto.core.tensors import map_upload, move_index
from fedproto.core.types import Algorithm, State, Tree
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup, build_groups
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.receiving import send_all_classes, send_own_classes
from fedproto.engines.vectorised.stacks import Stack, TrainedClients


class VectorisedEngine:
    """Trains the clients of all federations, one stack per architecture."""

    def __init__(
        self,
        federations: Sequence[Federation],
        algorithm: Algorithm,
        trainings: Sequence[Training],
        plan: Plan,
        shard: Shard = Shard(),  # noqa: B008 (a constant)
    ) -> None:
        self.algorithm = algorithm
        self.federations = federations
        self.sizes = [len(federation.members) for federation in federations]
        groups = build_groups(federations, algorithm, trainings, plan.place, shard)
        self.stacks = [Stack(group, algorithm, trainings[0], plan) for group in groups]

    @property
    def groups(self) -> list[ArchitectureGroup]:
        """The architecture groups of the stacks."""
        return [stack.group for stack in self.stacks]

    def train(
        self, round: int, servers: Sequence[State], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        """Train the sampled clients, stack by stack, in chunks that fit; keep their new states."""
        is_sampled = _mark_clients(self.sizes, [cohort.sampled for cohort in cohorts])
        is_slow = _mark_clients(self.sizes, [cohort.slow for cohort in cohorts])
        heard = _tabulate_heard(self.sizes, cohorts)
        once_due = any(cohort.once_due for cohort in cohorts)
        for stack in self.stacks:
            group = stack.group
            sampled = is_sampled[group.federation, group.number].nonzero().flatten()
            slow = is_slow[group.federation, group.number]
            for positions in stack.split_into_chunks(sampled, slow):
                where = f"round {round}, {len(positions)} clients of {group.model}, training"
                with errors_named(where):
                    last_heard = heard[group.federation[positions], group.number[positions]]
                    received = send_own_classes(
                        self.algorithm, servers, group, positions, last_heard
                    )
                    trained = stack.train(round, positions, received, slow[positions], once_due)
                yield from _split_by_federation(group, positions, cohorts, trained)

    def evaluate(self, servers: Sequence[State], part: EvaluatedPart = "test") -> list[Tree]:
        """Return every client's accuracies with the server's present state, per federation."""
        tables: list[Tree] = [{} for _ in servers]
        for stack in self.stacks:
            group = stack.group
            for positions in torch.arange(len(group)).split(stack.capacity):
                with errors_named(f"{len(positions)} clients of {group.model}, evaluation"):
                    received = send_all_classes(self.algorithm, servers, group, positions)
                    accuracies = stack.evaluate(positions, received, part)
                self._enter(tables, group, positions, accuracies)
        return tables

    def _enter(
        self, tables: list[Tree], group: ArchitectureGroup, positions: Tensor, accuracies: Tree
    ) -> None:
        """Write some clients' accuracies into the tables of their federations."""
        for name, values in accuracies.items():
            for number, table in enumerate(tables):
                if name not in table:
                    table[name] = torch.zeros(self.sizes[number], dtype=torch.float64)
                belongs = group.federation[positions] == number
                clients = group.number[positions[belongs]]
                table[name][clients] = values[belongs]

    def measure(
        self, servers: Sequence[State], part: EvaluatedPart = "test"
    ) -> list[dict[int, MeasuredClient]]:
        """Return all metrics of every client of this shard by its number, per federation."""
        tables: list[dict[int, MeasuredClient]] = [{} for _ in servers]
        for stack in self.stacks:
            group = stack.group
            for positions in stack.split_to_measure(part):
                with errors_named(f"{len(positions)} clients of {group.model}, evaluation"):
                    received = send_all_classes(self.algorithm, servers, group, positions)
                    for position, scores, y in stack.score(positions, received, part):
                        number = int(group.federation[position])
                        client = int(group.number[position])
                        federation = self.federations[number]
                        measured = federation.measure_client(client, scores, y, part)
                        tables[number][client] = measured
        return [dict(sorted(table.items())) for table in tables]

    def export(self, federation: int) -> Tree:
        """Return all clients' states as one flat tree, `CLIENT.NAME`, for a checkpoint."""
        states = {}
        for group in self.groups:
            for position in _find_positions(group, federation):
                client = int(group.number[position])
                values = group.states.values
                states[client] = {name: value[position] for name, value in values.items()}
        tree = {}
        for client in sorted(states):
            for name, value in states[client].items():
                tree[f"{client}.{name}"] = value
        return tree

    def restore(self, federation: int, tree: Tree) -> None:
        """Continue from the states that `export` returned."""
        for group in self.groups:
            for position in _find_positions(group, federation):
                client = int(group.number[position])
                for name, value in group.states.values.items():
                    value[position] = tree[f"{client}.{name}"].to(value.device)

    def close(self) -> None:
        """Free what the stacks recorded."""
        for stack in self.stacks:
            stack.clear()


def _find_positions(group: ArchitectureGroup, federation: int) -> list[int]:
    """Return the positions of a federation's clients in a group."""
    return (group.federation == federation).nonzero().flatten().tolist()


def _mark_clients(sizes: Sequence[int], clients: Sequence[Tensor]) -> Tensor:
    """Return which clients are named: (federations, clients) booleans.

    sizes    each federation's number of clients
    clients  each federation's numbers of those to mark
    """
    marks = torch.zeros(len(sizes), max(sizes), dtype=torch.bool)
    for row, numbers in zip(marks, clients, strict=True):
        row[numbers] = True
    return marks


def _tabulate_heard(sizes: Sequence[int], cohorts: Sequence[Cohort]) -> Tensor:
    """Return when each client was last heard, (federations, clients); see `Recipient`."""
    table = torch.zeros(len(sizes), max(sizes), dtype=torch.int64)
    for row, cohort in zip(table, cohorts, strict=True):
        if cohort.heard is not None:
            row[: len(cohort.heard)] = cohort.heard
    return table


def _split_by_federation(
    group: ArchitectureGroup,
    positions: Tensor,
    cohorts: Sequence[Cohort],
    trained: TrainedClients,
) -> Iterator[Chunk]:
    """Yield the outcome of training, as one chunk per federation."""
    federations = group.federation[positions]
    for number in federations.unique().tolist():
        cohort = cohorts[number]
        rows = (federations == number).nonzero().flatten()
        clients = group.number[positions[rows]]
        part = trained
        if len(rows) < len(positions):
            part = _select_clients(trained, rows)
        yield make_chunk(number, cohort, clients, part.uploads, part.sizes, part.loss, part.sound)


def _select_clients(trained: TrainedClients, rows: Tensor) -> TrainedClients:
    """Return the outcome of training for some of the clients."""
    on_device = move_index(rows, trained.sound.device)

    def select(tree: Tree) -> Tree:
        return {name: value[on_device] for name, value in tree.items()}

    uploads = map_upload(trained.uploads, lambda value: value[on_device])
    sizes = trained.sizes[move_index(rows, trained.sizes.device)]
    return TrainedClients(uploads, sizes, select(trained.loss), trained.sound[on_device])
