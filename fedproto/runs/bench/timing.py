"""Times of rounds and peaks of memory, as rows of the benchmark's table."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedproto.data import DataFolders, Source
from fedproto.runs.bench.contenders import list_contenders
from fedproto.runs.bench.federations import Work, load_source
from fedproto.runs.devices import torch_settings


@dataclass(frozen=True)
class Row:
    """What was measured of one contender."""

    model: str
    clients: int
    device: str
    precision: str
    contender: str
    seconds: float  # of a round, median
    start: float  # seconds of the first round
    ratio: float | None  # how many times as fast as the plain loop in one process
    data: str
    memory: float  # GB: on a GPU the contender's peak, on a CPU that of the process so far
    counted: int  # clients really trained; if fewer than `clients`, seconds are scaled up


def measure(work: Work, folders: DataFolders, rounds: int) -> list[Row]:
    """Time rounds of each contender, and return a row for each.

    The contenders take turns: one round of each, `rounds` times, after a first round that is timed
    apart.
    """
    with torch_settings(1, work.precision):
        return _measure(work, load_source(work, folders), rounds)


def _measure(work: Work, source: Source, rounds: int) -> list[Row]:
    contenders = list_contenders(work, source)
    first_rounds: dict[str, float] = {}
    peaks: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, contender in contenders.items():
        reset_peak_memory(work.device)
        first_rounds[name] = time_round(contender.rounds, work.device)
        peaks[name] = read_peak_memory(work.device)
    for _ in range(rounds):
        for name, contender in contenders.items():
            times[name].append(time_round(contender.rounds, work.device))
    seconds: dict[str, float] = {}
    for name, contender in contenders.items():
        contender.rounds.close()
        seconds[name] = statistics.median(times[name]) * work.clients / contender.clients
    rows = []
    for name, contender in contenders.items():
        row = Row(
            **asdict(work),
            contender=name,
            seconds=seconds[name],
            start=first_rounds[name],
            ratio=seconds["plain loop"] / seconds[name],
            data=source.name,
            memory=peaks[name],
            counted=contender.clients,
        )
        rows.append(row)
    return rows


def time_round(rounds: Iterator[Any], device: str) -> float:
    """Return how many seconds the next round takes."""
    start = time.perf_counter()
    next(rounds)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def reset_peak_memory(device: str) -> None:
    """Forget the GPU's peak so far; a process's peak on a CPU cannot be reset."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def read_peak_memory(device: str) -> float:
    """Return the peak in GB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
