"""Worker processes on this machine, forked from the run."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from fedproto.core.engine import Engine, Shard
from fedproto.core.interrupts import held_back, leave_to_parent
from fedproto.core.types import Algorithm
from fedproto.engines.distributed.engine import Build, DistributedEngine, serve
from fedproto.engines.distributed.exchange import (
    CUT_OFF,
    LOST,
    PATIENCE,
    _connected,
    _exchange,
)
from fedproto.errors import ConfigError, LostProcessError

JOINING = timedelta(minutes=1)  # until a process that was forked has found the others


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
        atexit.register(
            self.kill
        )  # before multiprocessing sends SIGTERM, which they ignore, and waits for them
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
        arguments = (
            self.build,
            self.algorithm,
            path,
            rank,
            self.size,
            torch.get_num_threads(),
            os.getpid(),
        )
        worker = multiprocessing.get_context("fork").Process(
            target=_work, args=arguments, daemon=True
        )
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
        raise ConfigError(
            "engine processes needs an operating system that can fork: use another engine, or torchrun"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            "engine processes forks, but this process uses CUDA: take device cpu, or torchrun with a process a GPU"
        )
    if is_daemon():
        raise ConfigError(
            "engine processes cannot start processes inside a daemonic one, as of a pool: use vectorised"
        )
    if dist.is_initialized():
        raise ConfigError(
            "engine processes needs torch.distributed for itself, but this process is in a group already"
        )


def _rest_threads() -> None:
    """GNU's OpenMP hangs in a fork of a process where it has run several threads, unless it was told to end them."""
    if sys.platform == "linux":
        mapped = Path("/proc/self/maps").read_text().splitlines()
        for library in {line.split(maxsplit=5)[-1] for line in mapped if "libgomp" in line}:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(library).omp_pause_resource_all(2)  # hard: they start anew when needed


def _work(
    build: Build, algorithm: Algorithm, path: str, rank: int, size: int, threads: int, parent: int
) -> None:
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
