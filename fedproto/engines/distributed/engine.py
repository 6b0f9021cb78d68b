"""Several processes, each with its share of the clients, as one engine: uploads are added by an all-reduce.

Rank 0 runs the round loop. Its engine announces what is to be done, and all ranks, rank 0 included, do it with an
inner engine of their own for the clients they hold, then enter the same collectives (`_train`, `_evaluate`, ...).
Whatever can fail comes before: each rank says how its share went, and only if all went well are tensors exchanged, so
that an error anywhere is an error of rank 0, and nobody waits for what will not come.

The processes are forked here (`processes`), or started by torchrun, on one machine or on several (`join`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fedproto.core.engine import Chunk, Cohort, Engine, Shard
from fedproto.core.tensors import concatenate_rows, join_uploads, sum_uploads
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.engines.distributed.exchange import (
    LOST,
    Layout,
    Order,
    _add_up,
    _announce,
    _bring_together,
    _in_plain_words,
    _in_step,
    _layout,
    _send_to_all,
    _stack_up,
)
from fedproto.errors import ConfigError, KnownToAllError, LostProcessError, TrainingError

Build = Callable[[Shard], Engine]  # the inner engine of the clients a rank holds


# --- trees as flat buffers: one message each, whatever they hold


# --- between the ranks


# --- what all ranks do together; only rank 0 looks at what comes of it


def _build(build: Build) -> Engine:
    """This rank's inner engine, once every rank has its own."""
    return _in_step(
        lambda: build(Shard(dist.get_rank(), dist.get_world_size())), lambda inner: None
    )[0]


def _train(
    inner: Engine, algorithm: Algorithm, servers: list[Tree], round: int, cohorts: Sequence[Cohort]
) -> list[Chunk]:
    def work() -> list[_Share]:
        shares = [_Share(number, algorithm.additive) for number in range(len(cohorts))]
        for chunk in inner.train(round, servers, cohorts):
            shares[chunk.federation].take(chunk)
        return shares

    shares, reports = _in_step(work, lambda shares: [share.report() for share in shares])
    chunks, layouts = (
        [[report[kind] for report in each] for each in zip(*reports, strict=True)]
        for kind in (0, 1)
    )
    combine = _add_up if algorithm.additive else _stack_up
    trees = [combine(each, share.tree) for each, share in zip(layouts, shares, strict=True)]
    if dist.get_rank():
        return []
    return [
        _in_order(each, tree, algorithm.additive) for each, tree in zip(chunks, trees, strict=True)
    ]


def _evaluate(inner: Engine, algorithm: Algorithm, servers: list[Tree]) -> list[Tree]:
    tables, layouts = _in_step(
        lambda: inner.evaluate(servers), lambda tables: [_layout(table) for table in tables]
    )
    return [
        _add_up(each, table) for table, each in zip(tables, zip(*layouts, strict=True), strict=True)
    ]


def _export(inner: Engine, algorithm: Algorithm, trees: list[Tree], federation: int) -> Tree:
    own, layouts = _in_step(lambda: inner.export(federation), _layout)
    entries = [entry for tree in _bring_together(layouts, own) for entry in tree.items()]
    return dict(
        sorted(entries, key=lambda entry: int(entry[0].partition(".")[0]))
    )  # a state's own order stays


def _restore(inner: Engine, algorithm: Algorithm, trees: list[Tree], federation: int) -> None:
    _in_step(lambda: inner.restore(federation, trees[0]), lambda nothing: None)


PARTS: dict[str, Callable[..., Any]] = {
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "restore": _restore,
}


class _Share:
    """What this rank's clients of one federation did in a round."""

    def __init__(self, federation: int, additive: bool) -> None:
        self.federation, self.additive = federation, additive
        self.chunks: list[Chunk] = []  # without their uploads
        self.uploads: list[Upload] = []  # or their sum so far, where that is all the server needs

    def take(self, chunk: Chunk) -> None:
        self.chunks.append(chunk._replace(uploads=Upload({}, {})))
        if len(chunk.speakers) and chunk.uploads.sums:
            self.uploads.append(chunk.uploads)
            self.uploads = (
                [sum_uploads(join_uploads(self.uploads))] if self.additive else self.uploads
            )

    @cached_property
    def tree(self) -> Tree:
        """The uploads; to be asked for when all are there."""
        if not self.uploads:
            return {}
        sums, weights = join_uploads(self.uploads)
        return {f"sums.{name}": v for name, v in sums.items()} | {
            f"weights.{name}": v for name, v in weights.items()
        }

    def report(self) -> tuple[Chunk, Layout]:
        nobody = torch.zeros(0, dtype=torch.int64)
        none = Chunk(
            self.federation, nobody, nobody.reshape(0, 2), {}, nobody.bool(), nobody, Upload({}, {})
        )
        return _one([none, *map(_on_cpu, self.chunks)]), _layout(self.tree)


def _on_cpu(chunk: Chunk) -> Chunk:
    loss = {name: value.detach().cpu() for name, value in chunk.loss.items()}
    return chunk._replace(sizes=chunk.sizes.cpu(), loss=loss, sound=chunk.sound.cpu())


def _one(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one federation as one, but for their uploads."""
    clients, sizes, sound, speakers = (
        torch.cat([getattr(chunk, name) for chunk in chunks])
        for name in ("clients", "sizes", "sound", "speakers")
    )
    loss = concatenate_rows([chunk.loss for chunk in chunks])
    return Chunk(chunks[0].federation, clients, sizes, loss, sound, speakers, Upload({}, {}))


def _in_order(chunks: Sequence[Chunk], tree: Tree, additive: bool) -> Chunk:
    """All ranks' chunks as one, by client number: what comes of it must not depend on the number of ranks."""
    whole = _one(chunks)
    order, spoken = whole.clients.argsort(), whole.speakers.argsort()
    if not additive:
        tree = {name: value[spoken.to(value.device)] for name, value in tree.items()}
    sums, weights = (
        {n.removeprefix(p): v for n, v in tree.items() if n.startswith(p)}
        for p in ("sums.", "weights.")
    )
    loss = {name: value[order] for name, value in whole.loss.items()}
    clients, sizes, sound = whole.clients[order], whole.sizes[order], whole.sound[order]
    return Chunk(
        whole.federation, clients, sizes, loss, sound, whole.speakers[spoken], Upload(sums, weights)
    )


def serve(build: Build, algorithm: Algorithm) -> None:
    """What every rank but 0 does: its share of what rank 0 orders, until there is nothing left to do."""
    with suppress(KnownToAllError):
        inner = _build(build)
        while (order := _announce(None)) is not None:
            trees = [_send_to_all(layout, {}) for layout in order.layouts]
            with suppress(KnownToAllError):
                PARTS[order.method](inner, algorithm, trees, *order.arguments)


# --- rank 0


class Group(Protocol):
    """How the processes come together."""

    def open(self) -> None: ...

    def close(self, orderly: bool) -> None:
        """Part; not `orderly` where the others may be anywhere but waiting for an order."""
        ...

    def obituary(self) -> str:
        """Who was lost, in one sentence."""
        ...


class DistributedEngine:
    """Rank 0's engine. Its processes start with the first round and end with `close`, after which it has the states.

    torch has one group of processes: an engine that starts while another runs closes that one, which can start again.
    """

    running: DistributedEngine | None = None
    thread: int | None = None  # that started it
    starting = threading.Lock()

    def __init__(self, build: Build, algorithm: Algorithm, group: Group) -> None:
        self.build, self.algorithm, self.group = build, algorithm, group
        self.inner: Engine | None = None  # while the processes run
        self.states: dict[
            int, Tree
        ] = {}  # while they do not: of the federations that have left their start
        self.federations = 0
        self.in_step = True  # all processes live and wait for orders

    def train(
        self, round: int, servers: Sequence[Tree], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        """Train the sampled clients; gives one chunk a federation, when all ranks are done."""
        self._start(len(servers))
        return iter(self._order("train", servers, round, list(cohorts)))

    def evaluate(self, servers: Sequence[Tree]) -> list[Tree]:
        """Every client's accuracies with the server's present state."""
        self._start(len(servers))
        return self._order("evaluate", servers)

    def export(self, federation: int) -> Tree:
        """All clients' states as one flat tree, for a checkpoint."""
        self._refuse_if_lost()
        if self.inner is not None:
            return self._order("export", [], federation)
        return (
            self.states[federation]
            if federation in self.states
            else self.build(Shard()).export(federation)
        )

    def restore(self, federation: int, tree: Tree) -> None:
        """Take up what `export` gave; before the start it is kept, once an engine for all clients found it fitting."""
        if self.inner is not None:
            self._order("restore", [tree], federation)
            return
        self.build(Shard()).restore(federation, tree)
        self.states[federation] = tree

    def close(self) -> None:
        """Fetch the states and let the processes go; where some were lost, or busy, end them."""
        if self.inner is None:
            return
        try:
            if self.in_step:
                self.states = {number: self.export(number) for number in range(self.federations)}
                _announce(None)
        except TrainingError:
            self.in_step = False  # who asks for the states will be told
        finally:
            self._leave()

    def _start(self, federations: int) -> None:
        self._refuse_if_lost()
        if self.inner is not None:
            return
        with DistributedEngine.starting:
            self._make_room()
            self.inner = self._open()
            DistributedEngine.running, self.federations = self, federations
            DistributedEngine.thread = threading.get_ident()
        for number, tree in self.states.items():
            self._order("restore", [tree], number)
        self.states = {}

    def _make_room(self) -> None:
        if DistributedEngine.running is None:
            return
        if DistributedEngine.thread != threading.get_ident():
            raise ConfigError(
                "another thread of this process runs engine processes, of which there can be one: use vectorised"
            )
        DistributedEngine.running.close()

    def _open(self) -> Engine:
        try:
            with _in_plain_words():
                self.group.open()
                return _build(self.build)
        except BaseException:
            self.group.close(orderly=False)
            raise

    def _leave(self) -> None:
        self.inner = DistributedEngine.running = None
        self.group.close(self.in_step)

    def _order(self, method: str, trees: Sequence[Tree], *arguments: Any) -> Any:
        self._refuse_if_lost()
        order = Order(method, arguments, [_layout(tree) for tree in trees])
        try:
            with _in_plain_words():
                done = self._carry_out(order, trees)
        except LostProcessError as lost:
            raise LostProcessError(self.group.obituary()) from lost
        return done

    def _carry_out(self, order: Order, trees: Sequence[Tree]) -> Any:
        """Have all ranks do something. Until all have, they are not in step: Ctrl-C may end this one's part in it."""
        self.in_step = False
        _announce(order)
        same = [
            _send_to_all(layout, tree) for layout, tree in zip(order.layouts, trees, strict=True)
        ]
        try:
            done = PARTS[order.method](self.inner, self.algorithm, same, *order.arguments)
        except KnownToAllError:
            self.in_step = True
            raise
        self.in_step = True
        return done

    def _refuse_if_lost(self) -> None:
        if not self.in_step:
            raise LostProcessError(LOST)


# --- processes forked on this machine


# --- processes started by torchrun
