"""How fast: a round of each engine beside a plain loop over clients, the same work in the same run.

Rounds of all contenders take turns, so that a noisy machine is noisy for all of them; medians are compared. The
first round of each, in which graphs are recorded and memory is found, is not counted but shown as `start`.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedproto.config import plugins
from fedproto.config.options import Part, PositiveInt, convert
from fedproto.config.settings import configure
from fedproto.core import rng
from fedproto.core.engine import Engine
from fedproto.core.federation import Federation, Member
from fedproto.core.local_training import Training
from fedproto.core.rounds import FederationRun, run_rounds
from fedproto.core.sampling import Schedule
from fedproto.core.server import Progress
from fedproto.core.types import Algorithm
from fedproto.data import DIGITS, DataFolders, Source, Split
from fedproto.engines.distributed.forked import build_process_engine
from fedproto.engines.distributed.torchrun import refuse_torchrun
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.selection import choose_for_one_core, make_builder
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup, Data
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.engines.vectorised.plan import Plan
from fedproto.engines.vectorised.stacks import Stack
from fedproto.engines.vectorised.state_store import Store
from fedproto.errors import ConfigError, DataError
from fedproto.partitions import ClientRows
from fedproto.runs.assemble import assemble
from fedproto.runs.devices import device_of, settings

WAYS, SHOTS = 3, 100
SAMPLE = 20  # clients of which the plain loop and the reference engine do a round; more are counted as so many more
PLAIN_LOOP = Path(__file__).parents[2] / "benchmarks" / "plain_loop.py"


@dataclass(frozen=True)
class Work:
    """A federation to train: `clients` of three classes with a hundred images each, FedProto's loss."""

    model: str
    clients: int
    device: str
    precision: str = "float32"

    @property
    def batch(self) -> int:
        return 32 if self.model == "resnet18" else 8

    def training(self, seed: int = 0) -> Training:
        return Training(self.batch, 0.01, 0.5, 1, "auto", seed)


@dataclass(frozen=True)
class Row:
    """What was measured of one contender."""

    model: str
    clients: int
    device: str
    precision: str
    contender: str
    seconds: float  # a round, median
    start: float  # the first round
    ratio: float | None  # how many times the plain loop in one process
    data: str
    memory: float  # GB: of a GPU the peak of this contender, of a CPU that of the process so far
    counted: (
        int  # clients that were really trained; where fewer than `clients`, seconds are scaled up
    )


def source_of(work: Work, places: DataFolders) -> Source:
    """Real MNIST where it can be found, else noise of its shape; noise of CIFAR-10's shape for ResNet18."""
    if work.model == "resnet18":
        return _noise("noise like CIFAR-10", (3, 32, 32), 10000)
    try:
        return plugins.build("dataset", Part("mnist"), places)
    except DataError:
        if places.data_dir is not None:  # where somebody says there is some, there must be
            raise
        return _noise("noise like MNIST", (28, 28), 60000)


def _noise(name: str, shape: tuple[int, ...], count: int) -> Source:
    generator = np.random.default_rng(0)
    train, test = (
        Split(generator.integers(0, 256, (rows, *shape), dtype=np.uint8), np.arange(rows) % 10)
        for rows in (count, 10000)
    )
    channels = shape[0] if len(shape) == 3 else 1
    return Source(name, DIGITS, train, test, mean=(0.1,) * channels, std=(0.3,) * channels)


def virtual(
    source: Source, clients: int, seed: int = 0, tests: int | None = 10
) -> list[ClientRows]:
    """Each client draws its images with replacement, so that a million can share one data set: for measuring only."""
    generator = rng.generator(seed, "virtual")
    by_class = [np.flatnonzero(source.train.y == label) for label in range(len(source.classes))]
    known = [np.flatnonzero(source.test.y == label)[:tests] for label in range(len(source.classes))]
    portions = []
    for _ in range(clients):
        labels = generator.permutation(len(by_class))[:WAYS]
        train = np.concatenate([generator.choice(by_class[label], SHOTS) for label in labels])
        portions.append(ClientRows(train, np.concatenate([known[label] for label in labels])))
    return portions


def federation_of(
    work: Work, source: Source, clients: int, seed: int = 0, tests: int | None = 10
) -> Federation:
    return assemble(
        [source] * clients,
        virtual(source, clients, seed, tests),
        [Part(work.model)] * clients,
        dim=None,
        seed=seed,
        device=torch.device(work.device),
        dtype=torch.float32,
    )


# --- contenders: each a generator that does a round whenever it is asked


def rounds_of(
    work: Work, source: Source, clients: int, build: Callable[..., Engine]
) -> Iterator[None]:
    algorithm = plugins.build("algorithm", Part("fedproto"))
    federation = federation_of(work, source, clients)
    engine = build([federation], algorithm, [work.training()])
    federation_run = FederationRun(
        federation, Schedule(10**6, eval_every=10**6), Progress.start(federation, algorithm)
    )
    try:
        for _ in run_rounds(algorithm, engine, [federation_run]):
            yield
    finally:
        engine.close()


def plain_loop(work: Work, source: Source, clients: int) -> Iterator[None]:
    """`benchmarks/plain_loop.py` over the same clients."""
    run = _plain_round(work, federation_of(work, source, clients).members)
    while True:
        run()
        yield


def _plain_round(work: Work, members: Sequence[Member]) -> Callable[[], None]:
    plain = _plain_loop_module()
    first = members[0]
    device = torch.device(work.device)

    def model() -> torch.nn.Module:
        if work.model == "cnn":
            return plain.CNN()
        return _original(work.model, tuple(first.train.x.shape[1:]))

    clients = [
        plain.Client(m.train.x[m.train.rows], m.train.y[m.train.rows], model(), 0.01, 0.5)
        for m in members
    ]
    dim = 512 if work.model == "resnet18" else 50
    state = [torch.zeros(10, dim, device=device), torch.zeros(10, device=device)]

    def run() -> None:
        state[:] = plain.round_of(clients, *state, lam=1.0, batch=work.batch)

    return run


def _original(name: str, shape: tuple[int, ...]) -> torch.nn.Module:
    from fedproto.models import Fit

    return plugins.build("model", Part(name), Fit(shape, 10))


def _plain_loop_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_loop", PLAIN_LOOP)
    if spec is None or spec.loader is None or not PLAIN_LOOP.exists():
        raise ConfigError(
            f"fedproto bench compares with {PLAIN_LOOP}, which is only in a checkout of the project"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_processes(work: Work, source: Source, clients: int) -> Iterator[None]:
    """The plain loop as two processes of one thread, each with half of the clients; they meet after every round."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(3)
    members = federation_of(work, source, clients).members

    def half(which: int) -> None:
        torch.set_num_threads(1)
        try:
            run = _plain_round(work, members[which::2])
            while True:
                gate.wait()
                run()
                gate.wait()
        finally:
            gate.abort()  # whoever waits learns that nobody will come

    workers = [context.Process(target=half, args=(which,), daemon=True) for which in range(2)]
    for worker in workers:
        worker.start()
    try:
        while True:
            gate.wait()
            gate.wait()
            yield
    finally:
        for worker in workers:
            worker.kill()


def contenders(work: Work, source: Source) -> dict[str, tuple[int, Iterator[None]]]:
    """Name -> clients really trained, and the rounds."""
    few = min(work.clients, SAMPLE)
    half = work.precision == "bf16"
    found: dict[str, tuple[int, Iterator[None]]] = {
        "plain loop": (few, plain_loop(work, source, few))
    }

    def vectorised(compile: bool) -> Callable[..., Engine]:
        plan = Plan(compile=compile, half=half)
        return lambda federations, algorithm, trainings: VectorisedEngine(
            federations, algorithm, trainings, plan
        )

    if work.device == "cpu" and few > 1:
        found["plain loop, 2 processes"] = few, plain_processes(work, source, few)
    found["reference"] = few, rounds_of(work, source, few, ReferenceEngine)
    found["vectorised"] = work.clients, rounds_of(work, source, work.clients, vectorised(False))
    if work.device == "cpu":
        found["processes"] = work.clients, rounds_of(work, source, work.clients, _two_processes)
    else:
        found["vectorised, compiled"] = (
            work.clients,
            rounds_of(work, source, work.clients, vectorised(True)),
        )
    return found


def _two_processes(
    federations: Sequence[Federation], algorithm: Algorithm, trainings: Sequence[Training]
) -> Engine:
    """What `auto` is on a machine of two cores without a GPU."""
    plan = Plan(stacked=choose_for_one_core(federations) == "vectorised")
    build = make_builder(plan, federations, algorithm, trainings)
    return build_process_engine(build, algorithm, workers=2)


def measure(work: Work, places: DataFolders, rounds: int) -> list[Row]:
    """Every contender's rounds, in turns."""
    with settings(1, work.precision):
        return _measure(work, source_of(work, places), rounds)


def _measure(work: Work, source: Source, rounds: int) -> list[Row]:
    runs = contenders(work, source)
    starts, peaks = {}, {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, (_, steps) in runs.items():
        _forget_peak(work.device)
        starts[name] = _timed(steps, work.device)
        peaks[name] = _peak(work.device)
    for _ in range(rounds):
        for name, (_, steps) in runs.items():
            times[name].append(_timed(steps, work.device))
    for _, steps in runs.values():
        steps.close()  # type: ignore[attr-defined]
    scaled = {
        name: statistics.median(times[name]) * work.clients / counted
        for name, (counted, _) in runs.items()
    }
    loop = scaled["plain loop"]
    return [
        Row(**asdict(work), contender=name, seconds=scaled[name], start=starts[name], ratio=loop / scaled[name],
            data=source.name, memory=peaks[name], counted=runs[name][0])
        for name in runs
    ]  # fmt: skip


def _timed(steps: Iterator[Any], device: str) -> float:
    start = time.perf_counter()
    next(steps)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


# --- several seeds in one stack, and a federation of a million


def seeds_row(work: Work, source: Source, seeds: int) -> Row:
    """A round of `seeds` federations in one stack, from a hundred rounds with an evaluation every ten."""
    algorithm = plugins.build("algorithm", Part("fedproto"))
    federations = [
        federation_of(work, source, work.clients, seed, tests=None) for seed in range(seeds)
    ]
    trainings = [work.training(seed) for seed in range(seeds)]
    engine = VectorisedEngine(
        federations, algorithm, trainings, Plan(compile=work.device == "cuda")
    )
    federation_runs = [
        FederationRun(
            federation,
            Schedule(110, eval_every=10, seed=seed),
            Progress.start(federation, algorithm),
        )
        for seed, federation in enumerate(federations)
    ]
    _forget_peak(work.device)
    rounds = run_rounds(algorithm, engine, federation_runs)
    start = time.perf_counter()
    for _ in range(10):  # until the first evaluation: all that is recorded and compiled is so then
        next(rounds)
    begun = time.perf_counter()
    for _ in rounds:
        pass
    seconds = (time.perf_counter() - begun) / 100
    engine.close()
    name = f"{seeds} seeds, 100 rounds in {100 * seconds:.2f} s with 10 evaluations"
    return Row(**asdict(work), contender=name, seconds=seconds, start=begun - start, ratio=None, data=source.name,
               memory=_peak(work.device), counted=work.clients)  # fmt: skip


class _Crowd(Sequence[Member]):
    """Members that are made when somebody looks at them."""

    def __init__(self, first: Member, count: int) -> None:
        self.first, self.clients = first, count

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, number: Any) -> Any:
        return replace(self.first, id=number)


class _CrowdFederation(Federation):
    @cached_property
    def own_classes(self) -> Tensor:
        return torch.ones(len(self.members), len(self.classes), device=self.device)


class _CrowdEngine(VectorisedEngine):
    def __init__(
        self, group: ArchitectureGroup, algorithm: Algorithm, training: Training, plan: Plan
    ) -> None:
        self.algorithm, self.sizes = algorithm, [len(group)]
        self.stacks = [Stack(group, algorithm, training, plan)]


def huge_row(
    work: Work, source: Source, share: float = 0.01, rounds: int = 5, stack: int = 1000
) -> Row:
    """A round of a federation whose clients are too many to be listed: a share of them is sampled each time."""
    algorithm = plugins.build("algorithm", Part("fedproto"))
    first = federation_of(work, source, 1)
    member = first.members[0]
    federation = _CrowdFederation(
        first.classes, _Crowd(member, work.clients), first.task._replace(clients=work.clients), {}
    )
    _forget_peak(work.device)
    started = time.perf_counter()
    group = _crowd_group(work, source, member, federation)
    engine = _CrowdEngine(
        group, algorithm, work.training(), Plan(stack=stack, compile=work.device == "cuda")
    )
    federation_run = FederationRun(
        federation, Schedule(10**6, share, eval_every=10**6), Progress.start(federation, algorithm)
    )
    steps = run_rounds(algorithm, engine, [federation_run])
    next(steps)
    start = time.perf_counter() - started
    times = [_timed(steps, work.device) for _ in range(rounds)]
    engine.close()
    name = f"vectorised, {int(share * work.clients):,} a round, states on {group.states.place}"
    return Row(**asdict(work), contender=name, seconds=statistics.median(times), start=start, ratio=None,
               data=source.name, memory=_peak(work.device), counted=int(share * work.clients))  # fmt: skip


def _crowd_group(
    work: Work, source: Source, member: Member, federation: Federation
) -> ArchitectureGroup:
    """The clients as stacks: each draws 300 images of the training set with replacement."""
    count, device = work.clients, torch.device(work.device)
    x = source.tensor(source.train, np.arange(len(source.train.y))).to(device)
    y = torch.from_numpy(source.train.y).to(device)
    rows = torch.randint(len(y), (count, WAYS * SHOTS), device=device)
    lengths = torch.full((count,), WAYS * SHOTS, device=device)
    training = work.training()
    return ArchitectureGroup(
        model=member.model,
        module=member.module,
        dropped=member.dropped,
        federation=torch.zeros(count, dtype=torch.int64),
        number=torch.arange(count),
        seed=torch.zeros(count, dtype=torch.int64),
        lr=torch.full((count,), training.lr, device=device),
        momentum=torch.full((count,), training.momentum, device=device),
        per_epoch=torch.full((count,), math.ceil(WAYS * SHOTS / training.batch)),
        own=federation.own_classes,
        border=None,
        train=Data(x, y, rows, lengths),
        test=Data(x, y, rows[:, :1], torch.ones_like(lengths)),
        states=Store([member.initial] * count, device),
    )


def bench(
    clients: str,
    model: str,
    device: str,
    precision: str,
    rounds: int,
    seeds: int,
    huge: int,
    data_dir: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All that `fedproto bench` measures, as the content of its JSON file."""
    # The same checks as for a run, and the same words.
    numbers = [
        convert("clients", number, PositiveInt) for number in filter(None, clients.split(","))
    ]
    kinds = [
        configure({"precision": kind, "device": device})[0].precision
        for kind in precision.split(",")
    ]
    if "float64" in kinds:
        raise ConfigError(
            "fedproto bench measures float32, tf32 and bf16: the plain loop knows no float64"
        )
    if not (numbers or seeds or huge):
        raise ConfigError("nothing to measure: name numbers of clients, --seeds or --huge")
    refuse_torchrun("bench")
    for name in model.split(","):
        plugins.find("model", name)
    device = device_of(device).type
    places = DataFolders(None if data_dir is None else str(data_dir))
    works = [
        Work(name, number, device, kind)
        for name in model.split(",")
        for number in numbers
        for kind in kinds
    ]
    rows = []
    for work in works:
        say(f"measuring {work.model}, {work.clients:,} clients, {work.precision}, on {device}")
        rows += measure(work, places, rounds)
    cnn = Work("cnn", 20, device)
    with settings(1, cnn.precision):
        if seeds:
            rows.append(seeds_row(cnn, source_of(cnn, places), seeds))
        if huge:
            rows.append(huge_row(replace(cnn, clients=huge), source_of(cnn, places)))
    return {"machine": machine(device), "rows": [asdict(row) for row in rows]}


def machine(device: str) -> dict[str, Any]:
    """What a number means nothing without."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "device": name,
        "cores": multiprocessing.cpu_count(),
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
