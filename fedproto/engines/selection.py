"""Which engine a run gets.

With `auto`, a GPU trains in stacks. A CPU trains small models in stacks (large ones use a core
fully by themselves), in one process per core if the run is long enough for that to pay off. The
rule depends on configuration, models and cores, not on measured times: the same run gets the same
engine on every machine of that kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from fedproto.config.settings import Config
from fedproto.core.batches import Training, count_passes, count_steps, steps_per_epoch
from fedproto.core.engine import Engine, Shard
from fedproto.core.federation import Federation, Member
from fedproto.core.types import Algorithm, Phase
from fedproto.engines.distributed import forked, torchrun
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.vectorised import memory
from fedproto.engines.vectorised.architecture_groups import GroupedClient, group_by_architecture
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.obstacles import find_obstacle
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.state_store import Store
from fedproto.errors import ConfigError

EngineName = Literal["reference", "vectorised", "processes"]

#: A CPU trains several models of at most this size faster together than one after the other.
MAX_STACKED_PARAMETERS = 1_000_000
#: Stacks pay off from this mean number of clients per architecture on.
MIN_STACKED_CLIENTS = 3
#: One process per core pays off from this many steps of single clients on, some milliseconds each.
MIN_STEPS_FOR_PROCESSES = 5_000
#: Compiling a step pays off if it saves more than this.
MIN_SECONDS_SAVED_BY_COMPILING = 20.0


def resolve(
    config: Config,
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
) -> tuple[Config, Plan, list[str]]:
    """Return the configuration with `auto` replaced, the plan, and notices for the user.

    A run folder gets this configuration, so that it says how the run was done.
    """
    if config.engine == "auto":
        engine = _choose_engine(config, federations, trainings)
    else:
        engine = config.engine
    plan = Plan(
        stack=config.stack,
        place=config.states,
        compile=_choose_compile(config, engine, federations, trainings),
        half=config.precision == "bf16",
        stacked=_uses_stacks(engine, federations),
    )
    notices = []
    if plan.stacked:
        plan, reason = _find_stackable_plan(plan, federations, algorithm, trainings)
        if reason is not None:
            plan = replace(plan, stacked=False)
            engine = "reference" if engine == "vectorised" else engine
            notices = [f"{reason}: the reference engine trains one client after the other"]
    if plan.stacked and plan.stack is None:
        plan = replace(plan, stack=_choose_stack_size(config, federations, trainings))
    if plan.half and not plan.stacked:
        cause = notices[0] if notices else f"this run uses engine {engine}"
        raise ConfigError(f"precision bf16 needs the vectorised engine, but {cause}")
    resolved = replace(
        config,
        engine=engine,
        device="cuda" if federations[0].device.type == "cuda" else "cpu",
        compile="on" if plan.compile and plan.stacked else "off",
        workers=_count_workers(config, engine),
        stack=plan.stack,
    )
    return resolved, plan, notices


# --- the choices


def _choose_engine(
    config: Config, federations: Sequence[Federation], trainings: Sequence[Training]
) -> EngineName:
    """Return the engine that `auto` stands for."""
    if federations[0].device.type == "cuda":
        return "vectorised"
    all_steps = sum(sum(steps) for steps in _count_steps(federations, trainings))
    steps_of_run = config.rounds * config.participation * all_steps
    largest_federation = max(len(federation.members) for federation in federations)
    can_share_work = largest_federation > 1 and _count_cores() > 1
    if steps_of_run >= MIN_STEPS_FOR_PROCESSES and can_share_work and _may_fork():
        return "processes"
    return choose_for_one_core(federations)


def _may_fork() -> bool:
    """Return whether this process may fork: not if there is CUDA, which does not survive it."""
    return not (torch.cuda.is_available() or torchrun.under_torchrun() or forked.is_daemon())


def choose_for_one_core(federations: Sequence[Federation]) -> EngineName:
    """Return the engine that trains these models fastest on one core of a CPU."""
    groups = group_by_architecture(federations, Shard())
    clients = sum(len(group) for group in groups)
    largest_model = max(_count_parameters(group[0].member) for group in groups)
    if largest_model <= MAX_STACKED_PARAMETERS and clients >= MIN_STACKED_CLIENTS * len(groups):
        return "vectorised"
    return "reference"


def _uses_stacks(engine: str, federations: Sequence[Federation]) -> bool:
    """Return whether an engine, or the engines of its processes, train in stacks."""
    if engine == "processes":
        return choose_for_one_core(federations) == "vectorised"
    return engine == "vectorised"


def _choose_compile(
    config: Config, engine: str, federations: Sequence[Federation], trainings: Sequence[Training]
) -> bool:
    """Return whether the step is compiled: only on a GPU, with `auto` only if that saves time."""
    if federations[0].device.type != "cuda" or engine != "vectorised":
        if config.compile == "on":
            raise ConfigError(
                "compile on needs device cuda and the vectorised engine: "
                "accepted here are off and auto"
            )
        return False
    if config.compile != "auto":
        return config.compile == "on"
    steps = _count_steps(federations, trainings)
    clients = sum(len(counts) for counts in steps)
    most_steps = max(max(counts) for counts in steps)
    seconds_saved_per_step = 0.0003 + 2.5e-6 * clients  # see benchmarks/RESULTS.md
    seconds_saved = config.rounds * most_steps * seconds_saved_per_step
    return seconds_saved > MIN_SECONDS_SAVED_BY_COMPILING


def _count_workers(config: Config, engine: str) -> int | None:
    """Return the number of processes that train, or None if it is this one alone."""
    if torchrun.under_torchrun():
        return torchrun.ranks()
    if engine == "processes":
        return config.workers or _count_cores()
    return None


def _find_stackable_plan(
    plan: Plan,
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
) -> tuple[Plan, str | None]:
    """Return a plan by which the models can be stacked; or the given one, and why there is none."""
    tidy_plan = replace(plan, tidy=True)  # slower, but some modules call x.view
    reason = None
    for tried_plan in (plan, tidy_plan):
        reason = find_obstacle(federations, algorithm, trainings, tried_plan)
        if reason is None:
            return tried_plan, None
    return plan, reason


def _choose_stack_size(
    config: Config, federations: Sequence[Federation], trainings: Sequence[Training]
) -> int | None:
    """Return how many clients fit into a GPU's free memory at a time; None on a CPU.

    What is free changes, and the order of sums with it. The run's configuration therefore says
    what was used, and a resumed run uses it again.
    """
    device = federations[0].device
    free = memory.free_memory(device)
    if free is None:
        return None
    shard = torchrun.own_shard() if torchrun.under_torchrun() else Shard()
    groups = group_by_architecture(federations, shard)
    for group in groups:
        state_bytes = len(group) * _model_bytes(group[0].member)
        fits_on_device = state_bytes < Store.SPARE * free
        if config.states == "device" or (config.states == "auto" and fits_on_device):
            free -= state_bytes
    stack = max(len(group) for group in groups)
    for group in groups:
        stack = min(stack, free // _training_bytes(group, trainings))
    stack = max(1, stack)
    if torchrun.under_torchrun():
        return torchrun.agree_on_smallest(stack, device)
    return stack


def _training_bytes(group: Sequence[GroupedClient], trainings: Sequence[Training]) -> int:
    """Return the bytes of a GPU's memory that one client of a group is granted in training."""
    number, first = group[0]
    training = trainings[number]
    samples = max(len(client.member.train) for client in group)
    if training.local_steps is not None:
        shortest_epoch = min(steps_per_epoch(client.member, training) for client in group)
        samples *= count_passes(training.local_steps, shortest_epoch)
    return memory.training_memory(
        model_bytes=_model_bytes(first),
        input_bytes=first.train.x[0].nbytes,
        batch=training.batch,
        dropped=first.dropped,
        samples=samples,
    )


# --- what they depend on


def _count_steps(
    federations: Sequence[Federation], trainings: Sequence[Training]
) -> list[list[int]]:
    """Return each client's steps in a round of one phase, by federation."""
    counts = []
    for federation, training in zip(federations, trainings, strict=True):
        per_epoch = [steps_per_epoch(member, training) for member in federation.members]
        counts.append([count_steps(Phase(), training, steps) for steps in per_epoch])
    return counts


def _count_cores() -> int:
    """Return the number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _count_parameters(member: Member) -> int:
    return sum(value.numel() for value in member.initial.values())


def _model_bytes(member: Member) -> int:
    return sum(value.nbytes for value in member.initial.values())


# --- building the engine


def make_builder(
    plan: Plan,
    federations: Sequence[Federation],
    algorithm: Algorithm,
    trainings: Sequence[Training],
) -> Callable[[Shard], Engine]:
    """Return a function that builds the engine for one process's shard of the clients."""

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
    """Return the engine of a resolved configuration."""
    build = make_builder(plan, federations, algorithm, trainings)
    if torchrun.under_torchrun():
        return torchrun.join(build, algorithm, federations[0].device)
    if config.engine == "processes":
        return forked.build_process_engine(build, algorithm, config.workers or 1)
    return build(Shard())
