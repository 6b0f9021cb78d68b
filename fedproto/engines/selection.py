"""Which engine a run gets.

`auto` is: on a GPU, stacks. On a CPU, stacks of small models (large ones fill a core alone, and gain nothing), and one
process a core where the run is long enough to be worth starting them. A rule of configuration, models and cores, not of
a stopwatch: the same run gets the same engine on every such machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedproto.config.settings import Config
from fedproto.core.engine import Engine, Shard
from fedproto.core.federation import Federation, Member
from fedproto.core.local_training import Training, steps_per_epoch
from fedproto.core.types import Algorithm
from fedproto.engines.distributed import forked, torchrun
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.vectorised import architecture_groups
from fedproto.engines.vectorised.architecture_groups import grouped
from fedproto.engines.vectorised.engine import VectorisedEngine, obstacle
from fedproto.engines.vectorised.stacks import Plan, training_memory
from fedproto.errors import ConfigError

SMALL = 1_000_000  # parameters up to which a CPU trains several models faster together than one after the other
FEW = 3  # clients of an architecture from which on it pays
LONG = 5_000  # steps of single clients, some milliseconds each, from which on a process a core pays
COMPILED = 20.0  # seconds that a compiled step must save to be worth compiling


def resolve(
    config: Config,
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
) -> tuple[Config, Plan, list[str]]:
    """The configuration with what `auto` means here, so that a run folder says what was done; and what to say."""
    device = federations[0].device.type
    engine = _engine(config, federations, trainings) if config.engine == "auto" else config.engine
    plan = Plan(
        config.stack,
        config.states,
        _compiles(config, engine, federations, trainings),
        config.precision == "bf16",
    )
    stacked = engine == "vectorised" or (
        engine == "processes" and on_one_core(federations) == "vectorised"
    )
    notices = []
    if stacked:
        plan, why_not = _fitting(plan, federations, algorithm, trainings)
        if why_not:
            notices = [f"{why_not}: the reference engine trains one client after the other"]
            engine, stacked = "reference" if engine == "vectorised" else engine, False
    if stacked and plan.stack is None:
        plan = replace(plan, stack=_fitting_stack(config, federations, trainings))
    if config.precision == "bf16" and not stacked:
        raise ConfigError(
            f"precision bf16 needs the vectorised engine, but {notices[0] if notices else engine} it is"
        )
    ranks = torchrun.ranks() if torchrun.under_torchrun() else None
    workers = ranks or ((config.workers or _cores()) if engine == "processes" else None)
    compile = "on" if plan.compile and stacked else "off"
    settled = {
        "engine": engine,
        "device": device,
        "compile": compile,
        "workers": workers,
        "stack": plan.stack,
    }
    return replace(config, **settled), replace(plan, stacked=stacked), notices  # type: ignore[arg-type]


def _engine(
    config: Config, federations: Sequence[Federation], trainings: Sequence[Training]
) -> str:
    """What `auto` means."""
    if federations[0].device.type == "cuda":
        return "vectorised"
    steps = (
        config.rounds
        * config.epochs
        * config.participation
        * sum(map(sum, _steps(federations, trainings)))
    )
    # Not where CUDA is: a process that has used its GPU must not be forked.
    may_fork = not (torch.cuda.is_available() or torchrun.under_torchrun() or forked.is_daemon())
    several = max(len(each.members) for each in federations) > 1 and _cores() > 1
    return "processes" if steps >= LONG and several and may_fork else on_one_core(federations)


def _steps(federations: Sequence[Federation], trainings: Sequence[Training]) -> list[list[int]]:
    """Each client's batches an epoch."""
    return [
        [steps_per_epoch(m, t) for m in f.members]
        for f, t in zip(federations, trainings, strict=True)
    ]


def _compiles(
    config: Config, engine: str, federations: Sequence[Federation], trainings: Sequence[Training]
) -> bool:
    """Whether the step is compiled: on a GPU only, and by itself only where the run is long enough to win it back."""
    if federations[0].device.type != "cuda" or engine != "vectorised":
        if config.compile == "on":
            raise ConfigError(
                "compile on needs device cuda and the vectorised engine: accepted here are off and auto"
            )
        return False
    steps = _steps(federations, trainings)
    saved = 0.0003 + 2.5e-6 * sum(map(len, steps))  # seconds a step (benchmarks/RESULTS.md)
    pays = config.rounds * config.epochs * max(map(max, steps)) * saved > COMPILED
    return pays if config.compile == "auto" else config.compile == "on"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_one_core(federations: Sequence[Federation]) -> str:
    """What trains these models fastest on one core of a CPU."""
    groups = grouped(federations, Shard())
    clients = sum(map(len, groups))
    largest = max(sum(value.numel() for value in group[0][1].initial.values()) for group in groups)
    return "vectorised" if largest <= SMALL and clients >= FEW * len(groups) else "reference"


def _fitting(
    plan: Plan,
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
) -> tuple[Plan, str | None]:
    """The plan under which the models can be stacked, or why there is none."""
    for tried in (plan, replace(plan, tidy=True)):  # tidy is slower, but some modules call x.view
        why_not = obstacle(federations, algorithm, trainings, tried)
        if why_not is None:
            return tried, None
    return plan, why_not


def _fitting_stack(
    config: Config, federations: Sequence[Federation], trainings: Sequence[Training]
) -> int | None:
    """The number of clients that a GPU's free memory lets us train at a time; None on a CPU.

    What is free differs from hour to hour, and the order of sums with it. So the run's configuration
    says what was used, and whoever resumes the run uses it again.
    """
    device = federations[0].device
    free = architecture_groups.free_memory(device)
    if free is None:
        return None
    under_torchrun = torchrun.under_torchrun()
    groups = architecture_groups.grouped(
        federations, torchrun.own_shard() if under_torchrun else Shard()
    )
    for group in groups:  # where the models lie between rounds
        held = len(group) * _model_memory(group[0][1])
        if config.states == "device" or (
            config.states == "auto" and held < architecture_groups.Store.SPARE * free
        ):
            free -= held
    fitting = []
    for group in groups:
        number, first = group[0]
        longest = max(len(member.train) for _, member in group)
        image = first.train.x[0].nbytes
        batch = trainings[number].batch
        need = training_memory(_model_memory(first), image, batch, first.dropped, longest)
        fitting.append(free // need)
    largest = max(len(group) for group in groups)
    stack = max(1, min(*fitting, largest))
    return torchrun.agree_on_smallest(stack, device) if under_torchrun else stack


def _model_memory(member: Member) -> int:
    return sum(value.nbytes for value in member.initial.values())


def builder(
    plan: Plan,
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
) -> Callable[[Shard], Engine]:
    """What makes the engine of one process's share of the clients."""

    def build(shard: Shard) -> Engine:
        if plan.stacked:
            return VectorisedEngine(federations, algorithm, trainings, plan, shard)
        return ReferenceEngine(federations, algorithm, trainings, shard)

    return build


def build_engine(
    config: Config,
    plan: Plan,
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
) -> Engine:
    """The engine of a resolved configuration."""
    build = builder(plan, federations, algorithm, trainings)
    if torchrun.under_torchrun():
        return torchrun.join(build, algorithm, federations[0].device)
    if config.engine == "processes":
        return forked.processes(build, algorithm, config.workers or 1)
    return build(Shard())
