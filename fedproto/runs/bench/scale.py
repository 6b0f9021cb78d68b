"""Rows for several seeds in one stack, and for a federation of a million clients."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.batches import Training
from fedproto.core.federation import Federation, Member
from fedproto.core.rounds import FederationRun, run_rounds
from fedproto.core.sampling import Schedule
from fedproto.core.server import Progress
from fedproto.core.types import Algorithm
from fedproto.data import Source
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup, Data
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.stacks import Stack
from fedproto.engines.vectorised.state_store import Store
from fedproto.runs.bench import federations
from fedproto.runs.bench.contenders import MANY_ROUNDS
from fedproto.runs.bench.federations import Work, build_federation
from fedproto.runs.bench.timing import Row, read_peak_memory, reset_peak_memory, time_round

ROUNDS_OF_SEEDS = 100
EVAL_EVERY = 10  # rounds


def measure_seeds(work: Work, source: Source, seeds: int) -> Row:
    """Time a round of `seeds` federations in one stack: 100 rounds, an evaluation every 10."""
    algorithm = plugins.build("algorithm", Part("fedproto"))
    stacked = []
    federation_runs = []
    for seed in range(seeds):
        federation = build_federation(work, source, work.clients, seed, test_shots=None)
        schedule = Schedule(EVAL_EVERY + ROUNDS_OF_SEEDS, eval_every=EVAL_EVERY, seed=seed)
        progress = Progress.start(federation, algorithm)
        stacked.append(federation)
        federation_runs.append(FederationRun(federation, schedule, progress))
    trainings = [work.training(seed) for seed in range(seeds)]
    plan = Plan(compile=work.device == "cuda")
    engine = VectorisedEngine(stacked, algorithm, trainings, plan)
    reset_peak_memory(work.device)
    rounds = run_rounds(algorithm, engine, federation_runs)
    started = time.perf_counter()
    for _ in range(EVAL_EVERY):  # after the first evaluation, everything is recorded and compiled
        next(rounds)
    warm = time.perf_counter()
    for _ in rounds:
        pass
    total = time.perf_counter() - warm
    engine.close()
    evaluations = ROUNDS_OF_SEEDS // EVAL_EVERY
    name = (
        f"{seeds} seeds, {ROUNDS_OF_SEEDS} rounds in {total:.2f} s with {evaluations} evaluations"
    )
    return Row(
        **asdict(work),
        contender=name,
        seconds=total / ROUNDS_OF_SEEDS,
        start=warm - started,
        ratio=None,
        data=source.name,
        memory=read_peak_memory(work.device),
        counted=work.clients,
    )


def measure_crowd(
    work: Work, source: Source, fraction: float = 0.01, rounds: int = 5, stack: int = 1000
) -> Row:
    """Time a round of a federation with too many clients to list, of which a fraction is sampled.

    Args:
        work: the model, the number of all clients and the device.
        source: the data, from which each client draws with replacement.
        fraction: of the clients, sampled anew in each round.
        rounds: whose median is taken, after a first round that is timed apart.
        stack: the number of clients that are trained at a time.
    """
    algorithm = plugins.build("algorithm", Part("fedproto"))
    federation_of_one = build_federation(work, source, 1)
    member = federation_of_one.members[0]
    federation = _CrowdFederation(
        federation_of_one.classes,
        _Crowd(member, work.clients),
        federation_of_one.task._replace(clients=work.clients),
        {},
    )
    reset_peak_memory(work.device)
    started = time.perf_counter()
    group = _build_group(work, source, member, federation)
    plan = Plan(stack=stack, compile=work.device == "cuda")
    engine = _CrowdEngine(group, algorithm, work.training(), plan)
    schedule = Schedule(MANY_ROUNDS, fraction, eval_every=MANY_ROUNDS)
    federation_run = FederationRun(federation, schedule, Progress.start(federation, algorithm))
    steps = run_rounds(algorithm, engine, [federation_run])
    next(steps)
    first_round = time.perf_counter() - started
    times = [time_round(steps, work.device) for _ in range(rounds)]
    engine.close()
    sampled = int(fraction * work.clients)
    return Row(
        **asdict(work),
        contender=f"vectorised, {sampled:,} a round, states on {group.states.place}",
        seconds=statistics.median(times),
        start=first_round,
        ratio=None,
        data=source.name,
        memory=read_peak_memory(work.device),
        counted=sampled,
    )


class _Crowd(Sequence[Member]):
    """Equal members that are made when they are looked at."""

    def __init__(self, first: Member, clients: int) -> None:
        self.first = first
        self.clients = clients

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.clients:  # by which iteration ends
            raise IndexError(number)
        return replace(self.first, id=number)


class _CrowdFederation(Federation):
    """A federation of equal clients that all have all classes, so that none is looked at."""

    @cached_property
    def own_classes(self) -> Tensor:
        return torch.ones(len(self.members), len(self.classes), device=self.device)

    @cached_property
    def architectures(self) -> dict[str, list[Member]]:
        return {}


class _CrowdEngine(VectorisedEngine):
    """A vectorised engine of one group, which was built without looking at each client."""

    def __init__(
        self, group: ArchitectureGroup, algorithm: Algorithm, training: Training, plan: Plan
    ) -> None:
        self.algorithm = algorithm
        self.sizes = [len(group)]
        self.stacks = [Stack(group, algorithm, training, plan)]


def _build_group(
    work: Work, source: Source, member: Member, federation: Federation
) -> ArchitectureGroup:
    """Return the crowd as a group; each client draws its images with replacement."""
    clients = work.clients
    images = federations.WAYS * federations.SHOTS  # per client
    device = torch.device(work.device)
    x = source.tensor(source.train, np.arange(len(source.train.y))).to(device)
    y = torch.from_numpy(source.train.y).to(device)
    rows = torch.randint(len(y), (clients, images), device=device)
    lengths = torch.full((clients,), images, device=device)
    training = work.training()
    return ArchitectureGroup(
        model=member.model,
        module=member.module,
        dropped=member.dropped,
        federation=torch.zeros(clients, dtype=torch.int64),
        number=torch.arange(clients),
        seed=torch.zeros(clients, dtype=torch.int64),
        lr=torch.full((clients,), training.lr, device=device),
        momentum=torch.full((clients,), training.momentum, device=device),
        per_epoch=torch.full((clients,), math.ceil(images / training.batch)),
        own=federation.own_classes,
        border=None,
        train=Data(x, y, rows, lengths),
        test=Data(x, y, rows[:, :1], torch.ones_like(lengths)),
        states=Store([member.initial] * clients, device),
    )
