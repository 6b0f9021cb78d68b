"""Worker processes on this machine, forked from the process of the run."""

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
from fedproto.engines.distributed.engine import DistributedEngine
from fedproto.engines.distributed.exchange import (
    COLLECTIVE_TIMEOUT,
    LOST_OTHERS_EXIT_CODE,
    LOST_PROCESSES,
    gather_from_all,
    lost_connections_named,
)
from fedproto.engines.distributed.shared_work import Build, serve
from fedproto.errors import ConfigError, LostProcessError

#: Until forked processes have found each other and are connected.
MEETING_TIMEOUT = timedelta(minutes=1)
WORKER_EXIT_SECONDS = 10
#: Makes the operating system send a signal when the parent process ends (prctl of Linux).
PR_SET_PDEATHSIG = 1
#: Ends OpenMP's threads completely; they start again when they are needed.
OMP_PAUSE_HARD = 2
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def build_process_engine(build: Build, algorithm: Algorithm, workers: int) -> DistributedEngine:
    """Return an engine over so many processes of this machine, including this one."""
    return DistributedEngine(build, algorithm, _ForkedProcesses(build, algorithm, workers))


class _ForkedProcesses:
    """Forks the workers: data, modules and functions are not copied, a start takes milliseconds."""

    def __init__(self, build: Build, algorithm: Algorithm, size: int) -> None:
        self.build = build
        self.algorithm = algorithm
        self.size = size
        self.workers: list[BaseProcess] = []
        self.joined = False

    def open(self) -> None:
        """Fork the workers and wait until they have met."""
        _refuse_to_fork()
        # Before multiprocessing sends SIGTERM, which workers ignore, and waits for them.
        atexit.register(self.kill)
        folder = tempfile.mkdtemp(prefix="fedproto-")
        store = f"{folder}/store"
        _end_openmp_threads()
        gc.collect()  # process groups of earlier runs: their threads do not survive a fork
        try:
            for rank in range(1, self.size):
                self._fork(rank, store)
            _meet(store, 0, self.size)
            self.joined = True
            gather_from_all(None)  # all have met, and the file is no longer needed
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _fork(self, rank: int, store: str) -> None:
        threads = torch.get_num_threads()
        worker = multiprocessing.get_context("fork").Process(
            target=_work,
            args=(self.build, self.algorithm, store, rank, self.size, threads, os.getpid()),
            daemon=True,
        )
        with held_back():
            worker.start()
        self.workers.append(worker)

    def close(self, orderly: bool) -> None:
        """End the workers; if `orderly`, wait for them to end by themselves."""
        for worker in self.workers:
            if orderly:
                worker.join(timeout=WORKER_EXIT_SECONDS)
            worker.kill()
            worker.join()
            worker.close()
        if self.joined:
            dist.destroy_process_group()
        self.workers = []
        self.joined = False
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """End the workers at once, such as when the program ends while they run."""
        for worker in self.workers:
            worker.kill()

    def describe_loss(self) -> str:
        """Return a sentence about the first worker that ended.

        The others end by themselves, with an exit code of their own, when one is lost.
        """
        for rank, worker in enumerate(self.workers, start=1):
            worker.join(timeout=1)
            code = worker.exitcode
            if code is None or code in (0, LOST_OTHERS_EXIT_CODE):
                continue
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return (
                f"worker process {rank} {how}, and its clients' states are lost: "
                "resume from the last checkpoint"
            )
        return LOST_PROCESSES


def is_daemon() -> bool:
    """Return whether this process may not have children, like a worker of a process pool."""
    return multiprocessing.current_process().daemon


def _refuse_to_fork() -> None:
    """Raise ConfigError if this process cannot or should not fork."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            "engine processes needs an operating system that can fork: "
            "use another engine, or torchrun"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            "engine processes forks, but this process uses CUDA: "
            "use device cpu, or torchrun with one process per GPU"
        )
    if is_daemon():
        raise ConfigError(
            "engine processes cannot start processes inside a daemonic process, such as a worker "
            "of a process pool: use vectorised"
        )
    if dist.is_initialized():
        raise ConfigError(
            "engine processes needs torch.distributed for itself, but this process is in a group "
            "already"
        )


def _end_openmp_threads() -> None:
    """Tell GNU's OpenMP to end its threads.

    Otherwise it hangs in a fork of a process in which it has run several threads.
    """
    if sys.platform != "linux":
        return
    libraries = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libgomp" in line:
            *_, path = line.split(maxsplit=5)
            libraries.add(path)
    for library in libraries:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_pause_resource_all(OMP_PAUSE_HARD)


# --- in a worker


def _work(
    build: Build, algorithm: Algorithm, store: str, rank: int, size: int, threads: int, parent: int
) -> None:
    """Run a forked process until rank 0 ends it."""
    # What it inherits is the parent's to free: the end of a process group waits for its threads,
    # which exist in the parent only.
    gc.freeze()
    _die_with(parent)
    leave_to_parent()
    torch.set_num_threads(threads)

    def build_if_possible(shard: Shard) -> Engine:
        _refuse_broken_autograd()
        return build(shard)

    try:
        _join_and_serve(store, rank, size, build_if_possible, algorithm)
    except LostProcessError:
        sys.exit(LOST_OTHERS_EXIT_CODE)


def _join_and_serve(store: str, rank: int, size: int, build: Build, algorithm: Algorithm) -> None:
    _meet(store, rank, size)
    gather_from_all(None)
    serve(build, algorithm)
    dist.destroy_process_group()


def _die_with(parent: int) -> None:
    """End this process when its parent ends; a busy worker would notice only when it is done."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(LOST_OTHERS_EXIT_CODE)


def _refuse_broken_autograd() -> None:
    """Raise ConfigError if gradients cannot be computed in this fork.

    If there is a GPU, a process that has computed gradients has threads for that, which do not
    survive a fork.
    """
    try:
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, one)
    except RuntimeError as error:
        raise ConfigError(
            "engine processes forks, but this process has trained on a machine with a GPU before: "
            "set CUDA_VISIBLE_DEVICES to nothing"
        ) from error


# --- in all of them


@lost_connections_named()
def _meet(path: str, rank: int, size: int) -> None:
    """Form a process group with the others, by a file.

    One that ends before all are connected is noticed after MEETING_TIMEOUT, later ones at once.
    """
    store = dist.FileStore(path, size)
    store.set_timeout(MEETING_TIMEOUT)
    with _loopback_interface():
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=MEETING_TIMEOUT
        )
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(COLLECTIVE_TIMEOUT)


@contextmanager
def _loopback_interface() -> Iterator[None]:
    """Have processes talk through this machine's loopback interface.

    The machine's name may not resolve, and no other machine needs to connect.
    """
    before = os.environ.get(GLOO_INTERFACE)
    os.environ[GLOO_INTERFACE] = "lo" if sys.platform == "linux" else "lo0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(GLOO_INTERFACE, None)
        else:
            os.environ[GLOO_INTERFACE] = before
