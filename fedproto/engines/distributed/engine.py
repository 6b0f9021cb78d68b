"""Several processes, each with its share of the clients, as one engine: uploads are added by an all-reduce.

Rank 0 runs the round loop. Its engine announces what is to be done, and all ranks, rank 0 included, do it with an
inner engine of their own for the clients they hold, then enter the same collectives (`_train`, `_evaluate`, ...).
Whatever can fail comes before: each rank says how its share went, and only if all went well are tensors exchanged, so
that an error anywhere is an error of rank 0, and nobody waits for what will not come.

The processes are forked here (`processes`), or started by torchrun, on one machine or on several (`join`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedproto.core.engine import Chunk, Cohort, Engine, Shard
from fedproto.core.interrupts import held_back, leave_to_parent
from fedproto.core.tensors import append, total
from fedproto.core.tensors import join as join_uploads
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.errors import ConfigError, KnownToAllError, LostProcessError, TrainingError

Build = Callable[[Shard], Engine]  # the inner engine of the clients a rank holds
Layout = tuple[tuple[str, tuple[int, ...], torch.dtype, str], ...]  # names, shapes, types and devices of a tree
Did = TypeVar("Did")
Said = TypeVar("Said")

#: One rank may train for hours while the others wait. Who dies is noticed at once, by the connection that closes.
PATIENCE = timedelta(days=7)
JOINING = timedelta(minutes=1)  # until a process that was forked has found the others
CUT_OFF = 3  # the exit code of a worker that lost the others: it was not the first to go
LOST = "processes of this run were lost, and the states of their clients with them: resume from the last checkpoint"


@contextmanager
def _in_plain_words() -> Iterator[None]:
    try:
        yield
    except KnownToAllError as failed:
        raise failed.error from failed.error.__cause__


class Order(NamedTuple):
    """What all ranks are to do next; trees of the given layouts follow."""

    method: str
    arguments: tuple[Any, ...]
    layouts: list[Layout]


# --- trees as flat buffers: one message each, whatever they hold


def _layout(tree: Tree) -> Layout:
    return tuple((name, tuple(value.shape), value.dtype, value.device.type) for name, value in tree.items())


def _union(layouts: Sequence[Layout]) -> Layout:
    """Everything that any of the ranks has."""
    found: dict[str, Any] = {}
    for name, *rest in itertools.chain(*layouts):
        found.setdefault(name, (name, *rest))
    return tuple(found.values())


def _flatten(layout: Layout, tree: Tree) -> list[Tensor]:
    """The tree's values end to end, a buffer for each type and device; zeros for what the tree lacks."""
    parts: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    for name, shape, dtype, device in layout:
        value = tree[name] if name in tree else torch.zeros(shape, dtype=dtype, device=device)
        parts.setdefault((dtype, device), []).append(value.detach().reshape(-1))
    return [torch.cat(values) for values in parts.values()]


def _unflatten(layout: Layout, buffers: list[Tensor]) -> Tree:
    kinds = dict.fromkeys((dtype, device) for _, _, dtype, device in layout)
    rest, tree = dict(zip(kinds, buffers, strict=True)), {}
    for name, shape, dtype, device in layout:
        buffer, length = rest[dtype, device], math.prod(shape)
        tree[name], rest[dtype, device] = buffer[:length].view(shape), buffer[length:]
    return tree


# --- between the ranks


@contextmanager
def _connected() -> Iterator[None]:
    """When another process is gone, torch says RuntimeError, with the address of a socket."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(LOST) from error


@_connected()
def _announce(order: Order | None) -> Order | None:
    """Rank 0's order, on all ranks; None: there will be no further."""
    box = [order]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@_connected()
def _exchange(mine: Any) -> list[Any]:
    """What every rank says, by rank."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, mine)
    return heard


@_connected()
def _send_to_all(layout: Layout, tree: Tree) -> Tree:
    """Rank 0's tree, on all ranks. As bytes, since not every backend knows every type."""
    buffers = _flatten(layout, tree)
    for buffer in buffers:
        dist.broadcast(buffer.view(torch.uint8), src=0)
    return _unflatten(layout, buffers)


@_connected()
def _add_up(layouts: Sequence[Layout], tree: Tree) -> Tree:
    """The sum of all ranks' trees; a rank that lacks something adds zeros."""
    layout = _union(layouts)
    buffers = _flatten(layout, tree)
    for buffer in buffers:
        dist.all_reduce(buffer)
    return _unflatten(layout, buffers)


@_connected()
def _bring_together(layouts: Sequence[Layout], tree: Tree) -> list[Tree]:
    """Every rank's tree, by rank, on rank 0; nothing elsewhere. Each sends as much as it has, to nobody else."""
    if dist.get_rank() == 0:
        return [tree, *(_receive(rank, layout) for rank, layout in enumerate(layouts) if rank)]
    for buffer in _flatten(layouts[dist.get_rank()], tree):
        dist.send(buffer.view(torch.uint8), dst=0)
    return []


def _stack_up(layouts: Sequence[Layout], tree: Tree) -> Tree:
    """The rows of every rank's tree, by rank, on rank 0."""
    return append(_bring_together(layouts, tree))


def _receive(rank: int, layout: Layout) -> Tree:
    buffers = _flatten(layout, {})
    for buffer in buffers:
        dist.recv(buffer.view(torch.uint8), src=rank)
    return _unflatten(layout, buffers)


def _in_step(work: Callable[[], Did], report: Callable[[Did], Said]) -> tuple[Did, list[Said]]:
    """Do one's share and hear every rank's report of its own; an error on any rank is raised on all."""
    said = own = None
    try:
        did = work()
        said = report(did)
    except Exception as error:
        own = error
    heard = _exchange((said, own and _portable(own)))
    errors = [error for _, error in heard if error]
    if errors:
        raise KnownToAllError(own or errors[0])
    return did, [said for said, _ in heard]


def _portable(error: Exception) -> Exception:
    """An error as it can be sent: itself, or, where it cannot be copied, its sentence."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainingError(f"{type(error).__name__}: {error}")


# --- what all ranks do together; only rank 0 looks at what comes of it


def _build(build: Build) -> Engine:
    """This rank's inner engine, once every rank has its own."""
    return _in_step(lambda: build(Shard(dist.get_rank(), dist.get_world_size())), lambda inner: None)[0]


def _train(inner: Engine, algorithm: Algorithm, servers: list[Tree], round: int, lots: Sequence[Cohort]) -> list[Chunk]:
    def work() -> list[_Share]:
        shares = [_Share(number, algorithm.additive) for number in range(len(lots))]
        for chunk in inner.train(round, servers, lots):
            shares[chunk.federation].take(chunk)
        return shares

    shares, reports = _in_step(work, lambda shares: [share.report() for share in shares])
    chunks, layouts = ([[report[kind] for report in each] for each in zip(*reports, strict=True)] for kind in (0, 1))
    combine = _add_up if algorithm.additive else _stack_up
    trees = [combine(each, share.tree) for each, share in zip(layouts, shares, strict=True)]
    if dist.get_rank():
        return []
    return [_in_order(each, tree, algorithm.additive) for each, tree in zip(chunks, trees, strict=True)]


def _evaluate(inner: Engine, algorithm: Algorithm, servers: list[Tree]) -> list[Tree]:
    tables, layouts = _in_step(lambda: inner.evaluate(servers), lambda tables: [_layout(table) for table in tables])
    return [_add_up(each, table) for table, each in zip(tables, zip(*layouts, strict=True), strict=True)]


def _export(inner: Engine, algorithm: Algorithm, trees: list[Tree], federation: int) -> Tree:
    own, layouts = _in_step(lambda: inner.export(federation), _layout)
    entries = [entry for tree in _bring_together(layouts, own) for entry in tree.items()]
    return dict(sorted(entries, key=lambda entry: int(entry[0].partition(".")[0])))  # a state's own order stays


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
            self.uploads = [total(join_uploads(self.uploads))] if self.additive else self.uploads

    @cached_property
    def tree(self) -> Tree:
        """The uploads; to be asked for when all are there."""
        if not self.uploads:
            return {}
        sums, weights = join_uploads(self.uploads)
        return {f"sums.{name}": v for name, v in sums.items()} | {f"weights.{name}": v for name, v in weights.items()}

    def report(self) -> tuple[Chunk, Layout]:
        nobody = torch.zeros(0, dtype=torch.int64)
        none = Chunk(self.federation, nobody, nobody.reshape(0, 2), {}, nobody.bool(), nobody, Upload({}, {}))
        return _one([none, *map(_on_cpu, self.chunks)]), _layout(self.tree)


def _on_cpu(chunk: Chunk) -> Chunk:
    loss = {name: value.detach().cpu() for name, value in chunk.loss.items()}
    return chunk._replace(sizes=chunk.sizes.cpu(), loss=loss, sound=chunk.sound.cpu())


def _one(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one federation as one, but for their uploads."""
    clients, sizes, sound, speakers = (
        torch.cat([getattr(chunk, name) for chunk in chunks]) for name in ("clients", "sizes", "sound", "speakers")
    )
    loss = append([chunk.loss for chunk in chunks])
    return Chunk(chunks[0].federation, clients, sizes, loss, sound, speakers, Upload({}, {}))


def _in_order(chunks: Sequence[Chunk], tree: Tree, additive: bool) -> Chunk:
    """All ranks' chunks as one, by client number: what comes of it must not depend on the number of ranks."""
    whole = _one(chunks)
    order, spoken = whole.clients.argsort(), whole.speakers.argsort()
    if not additive:
        tree = {name: value[spoken.to(value.device)] for name, value in tree.items()}
    sums, weights = ({n.removeprefix(p): v for n, v in tree.items() if n.startswith(p)} for p in ("sums.", "weights."))
    loss = {name: value[order] for name, value in whole.loss.items()}
    clients, sizes, sound = whole.clients[order], whole.sizes[order], whole.sound[order]
    return Chunk(whole.federation, clients, sizes, loss, sound, whole.speakers[spoken], Upload(sums, weights))


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
        self.states: dict[int, Tree] = {}  # while they do not: of the federations that have left their start
        self.federations = 0
        self.in_step = True  # all processes live and wait for orders

    def train(self, round: int, servers: Sequence[Tree], lots: Sequence[Cohort]) -> Iterator[Chunk]:
        """Train the picked clients; gives one chunk a federation, when all ranks are done."""
        self._start(len(servers))
        return iter(self._order("train", servers, round, list(lots)))

    def evaluate(self, servers: Sequence[Tree]) -> list[Tree]:
        """Every client's accuracies with the server's present state."""
        self._start(len(servers))
        return self._order("evaluate", servers)

    def export(self, federation: int) -> Tree:
        """All clients' states as one flat tree, for a checkpoint."""
        self._refuse_if_lost()
        if self.inner is not None:
            return self._order("export", [], federation)
        return self.states[federation] if federation in self.states else self.build(Shard()).export(federation)

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
        same = [_send_to_all(layout, tree) for layout, tree in zip(order.layouts, trees, strict=True)]
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


def processes(build: Build, algorithm: Algorithm, workers: int) -> DistributedEngine:
    """An engine over that many processes of this machine, this one included."""
    return DistributedEngine(build, algorithm, _Forked(build, algorithm, workers))


class _Forked:
    """Forked, so that data, modules and functions need no copying and a start takes milliseconds."""

    def __init__(self, build: Build, algorithm: Algorithm, size: int) -> None:
        self.build, self.algorithm, self.size = build, algorithm, size
        self.workers: list[BaseProcess] = []
        self.joined = False

    def open(self) -> None:
        _refuse_to_fork()
        atexit.register(self.kill)  # before multiprocessing sends SIGTERM, which they ignore, and waits for them
        folder = tempfile.mkdtemp(prefix="fedproto-")
        _rest_threads()
        gc.collect()  # process groups of earlier runs: their threads do not live on in a fork
        try:
            for rank in range(1, self.size):
                self._fork(rank, f"{folder}/store")
            _meet(f"{folder}/store", 0, self.size)
            self.joined = True
            _exchange(None)  # all have come, and the file has served
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _fork(self, rank: int, path: str) -> None:
        arguments = self.build, self.algorithm, path, rank, self.size, torch.get_num_threads(), os.getpid()
        worker = multiprocessing.get_context("fork").Process(target=_work, args=arguments, daemon=True)
        with held_back():
            worker.start()
        self.workers.append(worker)

    def close(self, orderly: bool) -> None:
        for worker in self.workers:
            if orderly:
                worker.join(timeout=10)
            worker.kill()
            worker.join()
            worker.close()
        if self.joined:
            dist.destroy_process_group()
        self.workers, self.joined = [], False
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """End the workers at once, as when the program ends while they run."""
        for worker in self.workers:
            worker.kill()

    def obituary(self) -> str:
        """The others end on their own when one is gone; it was the first that did not."""
        for rank, worker in enumerate(self.workers, start=1):
            worker.join(timeout=1)
            if worker.exitcode not in (None, 0, CUT_OFF):
                code = worker.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                return f"worker process {rank} {how}, and its clients' states are lost: resume from the last checkpoint"
        return LOST


def is_daemon() -> bool:
    """Whether this process may not have children, as a worker of a multiprocessing pool."""
    return multiprocessing.current_process().daemon


def _refuse_to_fork() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError("engine processes needs an operating system that can fork: use another engine, or torchrun")
    if torch.cuda.is_initialized():
        raise ConfigError(
            "engine processes forks, but this process uses CUDA: take device cpu, or torchrun with a process a GPU"
        )
    if is_daemon():
        raise ConfigError("engine processes cannot start processes inside a daemonic one, as of a pool: use vectorised")
    if dist.is_initialized():
        raise ConfigError("engine processes needs torch.distributed for itself, but this process is in a group already")


def _rest_threads() -> None:
    """GNU's OpenMP hangs in a fork of a process where it has run several threads, unless it was told to end them."""
    if sys.platform == "linux":
        mapped = Path("/proc/self/maps").read_text().splitlines()
        for library in {line.split(maxsplit=5)[-1] for line in mapped if "libgomp" in line}:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(library).omp_pause_resource_all(2)  # hard: they start anew when needed


def _work(build: Build, algorithm: Algorithm, path: str, rank: int, size: int, threads: int, parent: int) -> None:
    """The life of a forked process."""
    gc.freeze()  # what it inherits is the parent's to clean up: the end of a process group waits for its threads
    _die_with(parent)
    leave_to_parent()
    torch.set_num_threads(threads)

    def checked(shard: Shard) -> Engine:
        _refuse_dead_autograd()
        return build(shard)

    try:
        _join_and_serve(path, rank, size, checked, algorithm)
    except LostProcessError:
        sys.exit(CUT_OFF)


def _join_and_serve(path: str, rank: int, size: int, build: Build, algorithm: Algorithm) -> None:
    _meet(path, rank, size)
    _exchange(None)
    serve(build, algorithm)
    dist.destroy_process_group()


def _die_with(parent: int) -> None:
    """Whatever ends the parent ends this process. A busy worker would notice only when it is done."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(CUT_OFF)


def _refuse_dead_autograd() -> None:
    """With a GPU in the machine, a process that has taken gradients has threads for it, which no fork survives."""
    try:
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, one)
    except RuntimeError as error:
        raise ConfigError(
            "engine processes forks, but this one has trained beside a GPU before: set CUDA_VISIBLE_DEVICES to nothing"
        ) from error


@_connected()
def _meet(path: str, rank: int, size: int) -> None:
    store = dist.FileStore(path, size)
    store.set_timeout(JOINING)
    with _loopback():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


@contextmanager
def _loopback() -> Iterator[None]:
    """Talk through this machine's own interface: its name may not resolve, and nobody else need listen."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ[name] = "lo" if sys.platform == "linux" else "lo0"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({name: before} if before is not None else {})


# --- processes started by torchrun


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_torchrun(command: str) -> None:
    if under_torchrun():
        raise ConfigError(f"fedproto {command} does not share its work out over ranks: torchrun takes run and resume")


def ranks() -> int:
    """How many processes torchrun started."""
    return int(os.environ["WORLD_SIZE"])


def follows() -> bool:
    """Whether another process runs the rounds, and writes and says all there is to write and say."""
    return under_torchrun() and int(os.environ["RANK"]) > 0


def own_shard() -> Shard:
    """The clients of this process among those that torchrun started."""
    return Shard(int(os.environ["RANK"]), ranks())


def agree_on_smallest(value: int, device: torch.device) -> int:
    """The smallest of all ranks' values, on all of them."""
    _Torchrun(device).open()
    return min(_exchange(value))


def take_device() -> None:
    """Make the GPU that is this process's share the one that `cuda` means; before anything is put there."""
    if under_torchrun():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))


def join(build: Build, algorithm: Algorithm, device: torch.device) -> DistributedEngine | Follower:
    """The engine of this process among those that torchrun started: rank 0's, or one that can only `serve`."""
    group = _Torchrun(device)
    return Follower(build, algorithm, group) if follows() else DistributedEngine(build, algorithm, group)


class _Torchrun:
    """One group for as long as the process lives, since torchrun's store can bring one together only once."""

    def __init__(self, device: torch.device) -> None:
        self.backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"

    def open(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group(self.backend, timeout=PATIENCE)
            atexit.register(dist.destroy_process_group)

    def close(self, orderly: bool) -> None:
        """torchrun ends the others if this process fails."""

    def obituary(self) -> str:
        return LOST


class Follower:
    """The engine of the other ranks: it does what rank 0's orders, in `serve`, and nothing on its own."""

    def __init__(self, build: Build, algorithm: Algorithm, group: Group) -> None:
        self.build, self.algorithm, self.group = build, algorithm, group

    def serve(self) -> None:
        """Returns when rank 0 has closed its engine."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 finishes its round
        self.group.open()
        serve(self.build, self.algorithm)

    def restore(self, federation: int, tree: Tree) -> None:
        """Rank 0 sends what it has restored."""

    def close(self) -> None:
        pass

    def train(self, round: int, servers: Sequence[Tree], lots: Sequence[Cohort]) -> Iterator[Chunk]:
        raise self._refusal()

    def evaluate(self, servers: Sequence[Tree]) -> list[Tree]:
        raise self._refusal()

    def export(self, federation: int) -> Tree:
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError("only rank 0 runs the rounds: call serve() in the other processes")
