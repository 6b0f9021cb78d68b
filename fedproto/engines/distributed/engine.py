"""Several processes, each with a shard of the clients, as one engine.

Rank 0 runs the round loop. Its engine broadcasts orders, and all ranks, rank 0 included, carry them
out with an inner engine for the clients they hold (`shared_work.py`); uploads are added by an
all-reduce. The processes are forked from this one (`forked.py`), or started by torchrun, on one
machine or on several (`torchrun.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fedproto.core.engine import Chunk, Cohort, Engine, Shard
from fedproto.core.federation import EvaluatedPart
from fedproto.core.measurement import MeasuredClient
from fedproto.core.tensors import flatten_state
from fedproto.core.types import Algorithm, State, Tree
from fedproto.engines.distributed.exchange import (
    LOST_PROCESSES,
    Order,
    broadcast_order,
    broadcast_tree,
    describe_tree,
    unwrap_known_errors,
)
from fedproto.engines.distributed.shared_work import METHODS, Build, build_inner
from fedproto.errors import ConfigError, KnownToAllError, LostProcessError, TrainingError


class ProcessGroup(Protocol):
    """How the processes of an engine start and end."""

    def open(self) -> None:
        """Start the other processes, or meet them."""
        ...

    def close(self, orderly: bool) -> None:
        """Leave the others; not `orderly` if they may not be waiting for an order."""
        ...

    def describe_loss(self) -> str:
        """Return one sentence about the process that was lost."""
        ...


class DistributedEngine:
    """Rank 0's engine.

    Its processes start with the first round and end with `close`; then it has the states itself.
    torch has one group of processes per process: an engine that starts while another one runs
    closes that one, which can start again.
    """

    running: DistributedEngine | None = None
    running_thread: int | None = None  # the thread that started it
    start_lock = threading.Lock()

    def __init__(self, build: Build, algorithm: Algorithm, group: ProcessGroup) -> None:
        self.build = build
        self.algorithm = algorithm
        self.group = group
        self.federations = 0
        #: This rank's engine, while the processes run.
        self.inner: Engine | None = None
        #: While they do not run, the states of federations that were trained or restored.
        self.states: dict[int, Tree] = {}
        #: Whether all processes are alive and wait for orders.
        self.in_step = True

    def train(
        self, round: int, servers: Sequence[State], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        """Train the sampled clients; return one chunk per federation when all ranks are done."""
        self._start(len(servers))
        return iter(self._order("train", _flatten(servers), round, list(cohorts)))

    def evaluate(self, servers: Sequence[State], part: EvaluatedPart = "test") -> list[Tree]:
        """Return every client's accuracies with the server's present state, per federation."""
        self._start(len(servers))
        return self._order("evaluate", _flatten(servers), part)

    def measure(
        self, servers: Sequence[State], part: EvaluatedPart = "test"
    ) -> list[dict[int, MeasuredClient]]:
        """Return all metrics of every client by its number, per federation."""
        self._start(len(servers))
        return self._order("measure", _flatten(servers), part)

    def export(self, federation: int) -> Tree:
        """Return all clients' states as one flat tree, `CLIENT.NAME`, for a checkpoint."""
        self._refuse_if_lost()
        if self.inner is not None:
            return self._order("export", [], federation)
        if federation in self.states:
            return self.states[federation]
        return self.build(Shard()).export(federation)

    def restore(self, federation: int, tree: Tree) -> None:
        """Continue from the states that `export` returned.

        Before the start they are kept, once an engine for all clients has accepted them.
        """
        if self.inner is not None:
            self._order("restore", [tree], federation)
            return
        self.build(Shard()).restore(federation, tree)
        self.states[federation] = tree

    def close(self) -> None:
        """Fetch the states and end the processes, at once if some were lost or are busy."""
        if self.inner is None:
            return
        try:
            if self.in_step:
                self.states = {number: self.export(number) for number in range(self.federations)}
                broadcast_order(None)
        except TrainingError:
            self.in_step = False  # the next call for the states will say so
        finally:
            self._leave()

    def _start(self, federations: int) -> None:
        """Start the processes, if they do not run yet, and give them the states."""
        self._refuse_if_lost()
        if self.inner is not None:
            return
        with DistributedEngine.start_lock:
            self._close_running_engine()
            self.inner = self._open()
            self.federations = federations
            DistributedEngine.running = self
            DistributedEngine.running_thread = threading.get_ident()
        for number, tree in self.states.items():
            self._order("restore", [tree], number)
        self.states = {}

    def _close_running_engine(self) -> None:
        """Close the engine that runs, if any; raise ConfigError if another thread started it."""
        if DistributedEngine.running is None:
            return
        if DistributedEngine.running_thread != threading.get_ident():
            raise ConfigError(
                "another thread of this process runs engine processes, and only one can: "
                "use vectorised"
            )
        DistributedEngine.running.close()

    def _open(self) -> Engine:
        """Bring the processes together; return this rank's inner engine."""
        try:
            with self._named_losses():
                self.group.open()
                return build_inner(self.build)
        except BaseException:
            self.group.close(orderly=False)
            raise

    def _leave(self) -> None:
        self.inner = None
        DistributedEngine.running = None
        self.group.close(self.in_step)

    def _order(self, method: str, trees: Sequence[Tree], *arguments: Any) -> Any:
        """Have all ranks do something; return this rank's result."""
        self._refuse_if_lost()
        layouts = [describe_tree(tree) for tree in trees]
        with self._named_losses():
            return self._carry_out(Order(method, arguments, layouts), trees)

    @contextmanager
    def _named_losses(self) -> Iterator[None]:
        """Raise what happened on any rank; if a process was lost, say which one and how."""
        try:
            with unwrap_known_errors():
                yield
        except LostProcessError as lost:
            raise LostProcessError(self.group.describe_loss()) from lost

    def _carry_out(self, order: Order, trees: Sequence[Tree]) -> Any:
        """Send an order and do this rank's part of it.

        Until all ranks are done, they are not in step: Ctrl-C may end this rank's part.
        """
        self.in_step = False
        broadcast_order(order)
        same_trees = []
        for layout, tree in zip(order.layouts, trees, strict=True):
            same_trees.append(broadcast_tree(layout, tree))
        try:
            result = METHODS[order.method](self.inner, self.algorithm, same_trees, *order.arguments)
        except KnownToAllError:
            self.in_step = True
            raise
        self.in_step = True
        return result

    def _refuse_if_lost(self) -> None:
        if not self.in_step:
            raise LostProcessError(LOST_PROCESSES)


def _flatten(servers: Sequence[State]) -> list[Tree]:
    return [flatten_state(server) for server in servers]
