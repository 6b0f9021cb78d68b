"""Which engine a run gets.

`auto` is: on a GPU, stacks. On a CPU, stacks of small models (large ones fill a core alone, and gain nothing), and one
process a core where the run is long enough to be worth starting them. A rule of configuration, models and cores, not of
a stopwatch: the same run gets the same engine on every such machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from fedproto.client import Training, steps_per_epoch
from fedproto.config import Config
from fedproto.engines import Engine, Shard, distributed
from fedproto.engines.cohorts import grouped
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.stacks import Plan
from fedproto.engines.vectorised import VectorisedEngine, obstacle
from fedproto.errors import ConfigError
from fedproto.federation import Federation
from fedproto.types import Algorithm

SMALL = 1_000_000  # parameters up to which a CPU trains several models faster together than one after the other
FEW = 3  # clients of an architecture from which on it pays
LONG = 5_000  # steps of single clients, some milliseconds each, from which on a process a core pays
COMPILED = 20.0  # seconds that a compiled step must save to be worth compiling


def resolve(config: Config, federations: Sequence[Federation], trainings: Sequence[Training]) -> Config:
    """The configuration with what `auto` means here, so that a run folder says what was done."""
    device = federations[0].device.type
    steps = [[steps_per_epoch(m, t) for m in f.members] for f, t in zip(federations, trainings, strict=True)]
    engine: str = config.engine
    if engine == "auto" and device == "cuda":
        engine = "vectorised"
    elif engine == "auto":
        work = config.rounds * config.epochs * config.participation * sum(map(sum, steps))
        # Not where CUDA is: a process that has used its GPU must not be forked.
        alone = torch.cuda.is_available() or distributed.under_torchrun() or _cores() == 1
        several = max(len(each) for each in steps) > 1 and not alone
        engine = "processes" if work >= LONG and several else on_one_core(federations)
    compile: str = config.compile
    if compile == "auto":
        pays = config.rounds * config.epochs * max(map(max, steps)) * _saved(sum(map(len, steps))) > COMPILED
        compile = "on" if pays and engine == "vectorised" and device == "cuda" else "off"
    workers = (config.workers or _cores()) if engine == "processes" else config.workers
    return replace(config, engine=engine, device=device, compile=compile, workers=workers)  # type: ignore[arg-type]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _saved(clients: int) -> float:
    """Seconds a step that compiling saves on a GPU (benchmarks/RESULTS.md)."""
    return 0.0003 + 2.5e-6 * clients


def on_one_core(federations: Sequence[Federation]) -> str:
    """What trains these models fastest on one core of a CPU."""
    groups = grouped(federations, Shard())
    clients = sum(map(len, groups))
    largest = max(sum(value.numel() for value in group[0][1].initial.values()) for group in groups)
    return "vectorised" if largest <= SMALL and clients >= FEW * len(groups) else "reference"


def build_engine(
    config: Config, federations: Sequence[Federation], algorithm: Algorithm, trainings: Sequence[Training]
) -> tuple[Engine, list[str]]:
    """The engine of a resolved configuration, and what a person should know about it."""
    stacked = config.engine == "vectorised" or (
        config.engine == "processes" and on_one_core(federations) == "vectorised"
    )
    plan = Plan(config.stack, config.states, config.compile == "on", config.precision == "bf16")
    hindered = obstacle(federations, algorithm, trainings, plan) if stacked else None
    if hindered:
        plan = replace(plan, tidy=True)
        hindered = obstacle(federations, algorithm, trainings, plan)
    notices = [f"{hindered}: the reference engine trains one client after the other"] if hindered else []
    if config.precision == "bf16" and (hindered or not stacked):
        raise ConfigError(f"precision bf16 needs the vectorised engine: {hindered or 'this run has another'}")

    def build(shard: Shard) -> Engine:
        if stacked and not hindered:
            return VectorisedEngine(federations, algorithm, trainings, plan, shard)
        return ReferenceEngine(federations, algorithm, trainings, shard)

    if distributed.under_torchrun():
        return distributed.join(build, algorithm, federations[0].device), notices
    if config.engine == "processes":
        return distributed.processes(build, algorithm, config.workers or _cores()), notices
    return build(Shard()), notices
