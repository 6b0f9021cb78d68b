"""The contenders of `fedproto bench`: generators that do one round each time they are asked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.batches import Training
from fedproto.core.engine import Engine
from fedproto.core.federation import Federation, Member
from fedproto.core.rounds import FederationRun, run_rounds
from fedproto.core.sampling import Schedule
from fedproto.core.server import Progress
from fedproto.core.types import Algorithm
from fedproto.data import Source
from fedproto.engines.distributed.forked import build_process_engine
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.selection import choose_for_one_core, make_builder
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.plan import Plan
from fedproto.models import Fit
from fedproto.runs.bench import plain_loop
from fedproto.runs.bench.federations import Work, build_federation

#: The most clients that the plain loop and the reference engine train; their time is scaled up.
MAX_SLOW_CLIENTS = 20
MANY_ROUNDS = 10**6  # more than are ever asked for

EngineBuilder = Callable[[Sequence[Federation], Algorithm, Sequence[Training]], Engine]


class Contender(NamedTuple):
    """A way to train, ready to do its rounds."""

    clients: int  # that it really trains
    rounds: Generator[None]


def list_contenders(work: Work, source: Source) -> dict[str, Contender]:
    """Return all contenders on a device, by name.

    On a CPU these include two processes, of the plain loop and of the engine; on a GPU the compiled
    engine. Nothing is built before a contender's first round.
    """
    is_cpu = work.device == "cpu"
    is_half = work.precision == "bf16"
    few = min(work.clients, MAX_SLOW_CLIENTS)
    contenders = {"plain loop": Contender(few, run_plain_loop(work, source, few))}

    def add(name: str, clients: int, build: EngineBuilder) -> None:
        contenders[name] = Contender(clients, run_engine(work, source, clients, build))

    if is_cpu and few > 1:
        in_processes = run_plain_processes(work, source, few)
        contenders["plain loop, 2 processes"] = Contender(few, in_processes)
    add("reference", few, ReferenceEngine)
    add("vectorised", work.clients, _vectorised(Plan(compile=False, half=is_half)))
    if is_cpu:
        add("processes", work.clients, _build_two_processes)
    else:
        add("vectorised, compiled", work.clients, _vectorised(Plan(compile=True, half=is_half)))
    return contenders


# --- the engines


def run_engine(work: Work, source: Source, clients: int, build: EngineBuilder) -> Generator[None]:
    """Train a federation with an engine of this package, without evaluations."""
    algorithm = plugins.build("algorithm", Part("fedproto"))
    federation = build_federation(work, source, clients)
    engine = build([federation], algorithm, [work.training()])
    schedule = Schedule(MANY_ROUNDS, eval_every=MANY_ROUNDS)
    federation_run = FederationRun(federation, schedule, Progress.start(federation, algorithm))
    try:
        for _ in run_rounds(algorithm, engine, [federation_run]):
            yield
    finally:
        engine.close()


def _vectorised(plan: Plan) -> EngineBuilder:
    """Return a function that builds the vectorised engine with this plan."""

    def build(
        federations: Sequence[Federation], algorithm: Algorithm, trainings: Sequence[Training]
    ) -> Engine:
        return VectorisedEngine(federations, algorithm, trainings, plan)

    return build


def _build_two_processes(
    federations: Sequence[Federation], algorithm: Algorithm, trainings: Sequence[Training]
) -> Engine:
    """Build what `auto` means on a machine with two cores and no GPU."""
    plan = Plan(stacked=choose_for_one_core(federations) == "vectorised")
    return build_process_engine(
        make_builder(plan, federations, algorithm, trainings), algorithm, workers=2
    )


# --- the plain loop


def run_plain_loop(work: Work, source: Source, clients: int) -> Generator[None]:
    """Train the same clients with `plain_loop`, in this process."""
    loop = _PlainLoop(work, build_federation(work, source, clients).members)
    while True:
        loop.run_round()
        yield


def run_plain_processes(work: Work, source: Source, clients: int) -> Generator[None]:
    """Train half of the clients in each of two processes, which wait for each other every round."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(3)
    members = build_federation(work, source, clients).members

    def train_half(which: int) -> None:
        torch.set_num_threads(1)
        try:
            loop = _PlainLoop(work, members[which::2])
            while True:
                gate.wait()
                loop.run_round()
                gate.wait()
        finally:
            gate.abort()  # so that nobody waits for this process any more

    workers = []
    for which in range(2):
        worker = context.Process(target=train_half, args=(which,), daemon=True)
        worker.start()
        workers.append(worker)
    try:
        while True:
            gate.wait()
            gate.wait()
            yield
    finally:
        for worker in workers:
            worker.kill()


class _PlainLoop:
    """The plain loop's clients and server state."""

    def __init__(self, work: Work, members: Sequence[Member]) -> None:
        shape = tuple(members[0].train.x.shape[1:])
        device = torch.device(work.device)
        dim = 512 if work.model == "resnet18" else 50
        self.batch = work.batch
        self.prototypes = torch.zeros(10, dim, device=device)
        self.known = torch.zeros(10, device=device)
        self.clients = []
        for member in members:
            x = member.train.x[member.train.rows]
            y = member.train.y[member.train.rows]
            model = plain_loop.CNN() if work.model == "cnn" else build_model(work.model, shape)
            self.clients.append(plain_loop.Client(x, y, model, lr=0.01, momentum=0.5))

    def run_round(self) -> None:
        """Train all clients once, and make new prototypes."""
        self.prototypes, self.known = plain_loop.run_round(
            self.clients, self.prototypes, self.known, lam=1.0, batch=self.batch
        )


def build_model(name: str, shape: tuple[int, ...]) -> torch.nn.Module:
    """Return a model of this package for ten classes."""
    return plugins.build("model", Part(name), Fit(shape, 10))
