"""Ranks that torchrun started, on this machine or on several."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fedproto.core.engine import Chunk, Cohort, Shard
from fedproto.core.federation import EvaluatedPart
from fedproto.core.measurement import MeasuredClient
from fedproto.core.types import Algorithm, Tree
from fedproto.engines.distributed.engine import DistributedEngine, ProcessGroup
from fedproto.engines.distributed.exchange import (
    COLLECTIVE_TIMEOUT,
    LOST_PROCESSES,
    gather_from_all,
)
from fedproto.engines.distributed.shared_work import Build, serve
from fedproto.errors import ConfigError


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_torchrun(command: str) -> None:
    """Raise ConfigError if torchrun started a command that cannot divide its work."""
    if under_torchrun():
        raise ConfigError(
            f"fedproto {command} does not divide its work among ranks: "
            "torchrun can start run and resume"
        )


def ranks() -> int:
    """Return how many processes torchrun started."""
    return int(os.environ["WORLD_SIZE"])


def follows() -> bool:
    """Return whether another process runs the rounds, writes the files and prints."""
    return under_torchrun() and int(os.environ["RANK"]) > 0


def own_shard() -> Shard:
    """Return this process's shard of the clients, among the processes that torchrun started."""
    return Shard(int(os.environ["RANK"]), ranks())


def agree_on_smallest(value: int, device: torch.device) -> int:
    """Return the smallest of all ranks' values, on all of them."""
    _TorchrunProcesses(device).open()
    return min(gather_from_all(value))


def take_device() -> None:
    """Make this process's own GPU the one that `cuda` means, before anything is put there."""
    if under_torchrun():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))


def join(build: Build, algorithm: Algorithm, device: torch.device) -> DistributedEngine | Follower:
    """Return this process's engine: rank 0's, or one that can only `serve`."""
    group = _TorchrunProcesses(device)
    if follows():
        return Follower(build, algorithm, group)
    return DistributedEngine(build, algorithm, group)


class _TorchrunProcesses:
    """One group for the life of the process: torchrun's store can bring one together only once."""

    def __init__(self, device: torch.device) -> None:
        self.backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"

    def open(self) -> None:
        """Meet the other ranks, the first time."""
        if not dist.is_initialized():
            dist.init_process_group(self.backend, timeout=COLLECTIVE_TIMEOUT)
            atexit.register(dist.destroy_process_group)

    def close(self, orderly: bool) -> None:
        """Do nothing: torchrun ends the other processes if this one fails."""

    def describe_loss(self) -> str:
        """Return a sentence about lost processes."""
        return LOST_PROCESSES


class Follower:
    """The engine of the ranks other than 0: in `serve` it does what rank 0 orders."""

    def __init__(self, build: Build, algorithm: Algorithm, group: ProcessGroup) -> None:
        self.build = build
        self.algorithm = algorithm
        self.group = group

    def serve(self) -> None:
        """Follow rank 0's orders; return when rank 0 has closed its engine."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 finishes its round
        self.group.open()
        serve(self.build, self.algorithm)

    def restore(self, federation: int, tree: Tree) -> None:
        """Do nothing: rank 0 sends what it has restored."""

    def close(self) -> None:
        """Do nothing: rank 0 closes the engine."""

    def train(
        self, round: int, servers: Sequence[Tree], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        """Raise ConfigError."""
        raise self._refusal()

    def evaluate(self, servers: Sequence[Tree], part: EvaluatedPart = "test") -> list[Tree]:
        """Raise ConfigError."""
        raise self._refusal()

    def measure(
        self, servers: Sequence[Tree], part: EvaluatedPart = "test"
    ) -> list[dict[int, MeasuredClient]]:
        """Raise ConfigError."""
        raise self._refusal()

    def export(self, federation: int) -> Tree:
        """Raise ConfigError."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError("only rank 0 runs the rounds: call serve() in the other processes")
