"""Ranks that torchrun started, on this machine or on several."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fedproto.core.engine import Chunk, Cohort, Shard
from fedproto.core.types import Algorithm, Tree
from fedproto.engines.distributed.engine import Build, DistributedEngine, Group, serve
from fedproto.engines.distributed.exchange import (
    LOST,
    PATIENCE,
    _exchange,
)
from fedproto.errors import ConfigError


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_torchrun(command: str) -> None:
    if under_torchrun():
        raise ConfigError(
            f"fedproto {command} does not share its work out over ranks: torchrun takes run and resume"
        )


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
    return (
        Follower(build, algorithm, group)
        if follows()
        else DistributedEngine(build, algorithm, group)
    )


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

    def train(
        self, round: int, servers: Sequence[Tree], cohorts: Sequence[Cohort]
    ) -> Iterator[Chunk]:
        raise self._refusal()

    def evaluate(self, servers: Sequence[Tree]) -> list[Tree]:
        raise self._refusal()

    def export(self, federation: int) -> Tree:
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError("only rank 0 runs the rounds: call serve() in the other processes")
