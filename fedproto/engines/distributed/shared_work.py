"""What all ranks do together: each trains and evaluates the clients it holds.

All ranks, rank 0 included, enter the same collectives in the same order. Whatever can fail comes
before: each rank reports how its part went, and tensors are exchanged only if all went well. An
error anywhere is therefore an error of rank 0, and nobody waits for what will not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fedproto.core.additivity import AdditivityCheck
from fedproto.core.engine import Chunk, Cohort, Engine, Shard
from fedproto.core.federation import EvaluatedPart
from fedproto.core.measurement import MeasuredClient
from fedproto.core.tensors import (
    concatenate_rows,
    flatten_upload,
    join_uploads,
    sum_uploads,
    unflatten_state,
    unflatten_upload,
)
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.engines.distributed.exchange import (
    Layout,
    broadcast_order,
    broadcast_tree,
    describe_tree,
    do_together,
    gather_rows,
    gather_trees,
    sum_trees,
)
from fedproto.errors import KnownToAllError

#: Builds the inner engine for the clients that a rank holds.
Build = Callable[[Shard], Engine]


def serve(build: Build, algorithm: Algorithm) -> None:
    """Do, on a rank other than 0, its part of what rank 0 orders, until rank 0 ends."""
    with suppress(KnownToAllError):
        inner = build_inner(build)
        while (order := broadcast_order(None)) is not None:
            trees = [broadcast_tree(layout, {}) for layout in order.layouts]
            with suppress(KnownToAllError):
                METHODS[order.method](inner, algorithm, trees, *order.arguments)


def build_inner(build: Build) -> Engine:
    """Return this rank's inner engine, once every rank has built its own."""

    def work() -> Engine:
        return build(Shard(dist.get_rank(), dist.get_world_size()))

    inner, _ = do_together(work, _report_nothing)
    return inner


def _report_nothing(result: object) -> None:
    return None


# --- what rank 0 can order; only rank 0 uses the results


def _train(
    inner: Engine, algorithm: Algorithm, servers: list[Tree], round: int, cohorts: Sequence[Cohort]
) -> list[Chunk]:
    """Train the sampled clients; return one chunk per federation on rank 0."""
    states = [unflatten_state(server) for server in servers]

    def work() -> list[_TrainedPart]:
        parts = []
        for number, state in enumerate(states):
            check = AdditivityCheck(algorithm, state, round)
            parts.append(_TrainedPart(number, algorithm, check))
        for chunk in inner.train(round, states, cohorts):
            parts[chunk.federation].add(chunk)
        return parts

    def make_report(parts: list[_TrainedPart]) -> list[_PartReport]:
        return [part.report() for part in parts]

    parts, reports = do_together(work, make_report)
    chunks = []
    for number, part in enumerate(parts):
        reports_of_federation = [report[number] for report in reports]
        summed = sum_trees([report.summed for report in reports_of_federation], part.summed)
        single = gather_rows([report.single for report in reports_of_federation], part.single)
        if dist.get_rank() == 0:
            chunk = _join_chunks([report.chunk for report in reports_of_federation])
            chunks.append(_sort_by_client(chunk, summed, single))
    return chunks


def _evaluate(
    inner: Engine, algorithm: Algorithm, servers: list[Tree], part: EvaluatedPart
) -> list[Tree]:
    """Return every client's accuracies on a part of its data, per federation."""

    def work() -> list[Tree]:
        return inner.evaluate([unflatten_state(server) for server in servers], part)

    def make_report(tables: list[Tree]) -> list[Layout]:
        return [describe_tree(table) for table in tables]

    tables, reports = do_together(work, make_report)
    sums = []
    for number, table in enumerate(tables):
        layouts = [report[number] for report in reports]
        sums.append(sum_trees(layouts, table))
    return sums


def _measure(
    inner: Engine, algorithm: Algorithm, servers: list[Tree], part: EvaluatedPart
) -> list[dict[int, MeasuredClient]]:
    """Return every client's metrics by its number, per federation; each rank measures its own."""

    def work() -> list[dict[int, MeasuredClient]]:
        return inner.measure([unflatten_state(server) for server in servers], part)

    _, tables_of_ranks = do_together(work, _report_everything)
    tables = []
    for number in range(len(servers)):
        together: dict[int, MeasuredClient] = {}
        for rank_tables in tables_of_ranks:
            together |= rank_tables[number]
        tables.append(dict(sorted(together.items())))
    return tables


def _report_everything(
    tables: list[dict[int, MeasuredClient]],
) -> list[dict[int, MeasuredClient]]:
    return tables


def _export(inner: Engine, algorithm: Algorithm, trees: list[Tree], federation: int) -> Tree:
    """Return all clients' states on rank 0, by client; the order within a state is kept."""

    def work() -> Tree:
        return inner.export(federation)

    own_states, layouts = do_together(work, describe_tree)
    all_states: Tree = {}
    for tree in gather_trees(layouts, own_states):
        all_states |= tree
    return {name: all_states[name] for name in sorted(all_states, key=_client_of)}


def _client_of(name: str) -> int:
    """Return the client of an exported value, `CLIENT.NAME`."""
    client, _, _ = name.partition(".")
    return int(client)


def _restore(inner: Engine, algorithm: Algorithm, trees: list[Tree], federation: int) -> None:
    """Continue from exported states."""
    (states,) = trees

    def work() -> None:
        inner.restore(federation, states)

    do_together(work, _report_nothing)


METHODS: dict[str, Callable[..., Any]] = {
    "train": _train,
    "evaluate": _evaluate,
    "measure": _measure,
    "export": _export,
    "restore": _restore,
}


# --- a rank's part of a round


class _PartReport(NamedTuple):
    """What a rank tells the others about its clients of one federation."""

    chunk: Chunk  # on the CPU, without uploads
    summed: Layout  # of the tree of groups that are summed
    single: Layout  # of that of single groups


class _TrainedPart:
    """What this rank's clients of one federation did in a round."""

    def __init__(
        self, federation: int, algorithm: Algorithm, check_additivity: AdditivityCheck
    ) -> None:
        self.federation = federation
        self.algorithm = algorithm
        self.check_additivity = check_additivity
        self.chunks: list[Chunk] = []  # without their uploads
        self.sum: Upload = {}  # so far, of the groups that are summed
        self.uploads: list[Upload] = []  # of single groups

    def add(self, chunk: Chunk) -> None:
        """Add a chunk of finished clients."""
        self.chunks.append(chunk._replace(uploads={}))
        if not len(chunk.speakers) or not chunk.uploads:
            return
        to_sum: Upload = {}
        if self.algorithm.additive:  # all but what is sent once
            for name, group in chunk.uploads.items():
                if name not in self.algorithm.once:
                    to_sum[name] = group
        single = {name: group for name, group in chunk.uploads.items() if name not in to_sum}
        if single:
            self.uploads.append(single)
        if to_sum:
            joined = join_uploads([self.sum, to_sum]) if self.sum else to_sum
            self.check_additivity(joined)
            self.sum = sum_uploads(joined)

    @property
    def summed(self) -> Tree:
        """The sum as a tree; to be read when all chunks are there."""
        return flatten_upload(self.sum)

    @cached_property
    def single(self) -> Tree:
        """The single groups as a tree; to be read when all chunks are there."""
        if not self.uploads:
            return {}
        return flatten_upload(join_uploads(self.uploads))

    def report(self) -> _PartReport:
        """Return what the other ranks need to know."""
        nobody = torch.zeros(0, dtype=torch.int64)
        no_clients = Chunk(
            federation=self.federation,
            clients=nobody,
            sizes=nobody.reshape(0, 0, 2),
            loss={},
            sound=nobody.bool(),
            speakers=nobody,
            uploads={},
        )
        chunks_on_cpu = [_move_to_cpu(chunk) for chunk in self.chunks]
        chunk = _join_chunks([no_clients, *chunks_on_cpu])
        return _PartReport(chunk, describe_tree(self.summed), describe_tree(self.single))


def _move_to_cpu(chunk: Chunk) -> Chunk:
    loss = {name: value.detach().cpu() for name, value in chunk.loss.items()}
    return chunk._replace(sizes=chunk.sizes.cpu(), loss=loss, sound=chunk.sound.cpu())


def _join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Return several chunks of one federation as one, without their uploads."""
    federation = chunks[0].federation
    clients = torch.cat([chunk.clients for chunk in chunks])
    # The chunk of a rank without clients does not know the number of groups.
    all_sizes = [chunk.sizes for chunk in chunks if len(chunk.clients)]
    sizes = torch.cat(all_sizes) if all_sizes else chunks[0].sizes
    loss = concatenate_rows([chunk.loss for chunk in chunks])
    sound = torch.cat([chunk.sound for chunk in chunks])
    speakers = torch.cat([chunk.speakers for chunk in chunks])
    return Chunk(federation, clients, sizes, loss, sound, speakers, {})


def _sort_by_client(chunk: Chunk, summed: Tree, single: Tree) -> Chunk:
    """Return the chunk in the order of its clients, with its uploads.

    The result must not depend on the number of ranks.

    summed  the groups of the uploads that are summed
    single  the others, with one row per speaker
    """
    order = chunk.clients.argsort()
    speaker_order = chunk.speakers.argsort()
    single = {name: _select(value, speaker_order) for name, value in single.items()}
    return Chunk(
        federation=chunk.federation,
        clients=chunk.clients[order],
        sizes=chunk.sizes[order],
        loss={name: value[order] for name, value in chunk.loss.items()},
        sound=chunk.sound[order],
        speakers=chunk.speakers[speaker_order],
        uploads=unflatten_upload(summed) | unflatten_upload(single),
    )


def _select(value: Tensor, rows: Tensor) -> Tensor:
    return value[rows.to(value.device)]
