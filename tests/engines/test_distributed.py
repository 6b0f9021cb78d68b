"""Several real processes, forked or under torchrun, compute what one does, and leave nothing."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_runs import (
    ALMOST,
    EXACT,
    FAULTS,
    RUNS,
    assert_alike,
    collect_outcomes,
    collect_states,
    do_rounds,
    make_builder,
    outcome_of_one_process,
    train_one_round,
    use_one_process,
    use_processes,
)
from helpers.patience import PATIENCE_SECONDS, wait_until
from helpers.tiny import SETTINGS, experiment
from torch import nn

from fedproto.config.settings import configure
from fedproto.core.engine import Engine, Shard
from fedproto.core.rounds import RoundResult, run_rounds
from fedproto.engines.distributed import forked
from fedproto.engines.distributed.engine import DistributedEngine
from fedproto.engines.distributed.forked import build_process_engine
from fedproto.errors import ConfigError, TrainingError
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder

#: A lost process is noticed at once, not after the days that a collective may take.
MAX_SECONDS_TO_NOTICE = PATIENCE_SECONDS
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither processes, nor the group, nor files, nor a setting."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = children(os.getpid())
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    yield
    if DistributedEngine.running:
        DistributedEngine.running.close()
        pytest.fail("the test left its processes running")
    assert not multiprocessing.active_children() and children(os.getpid()) <= before
    assert not dist.is_initialized()
    assert not list(folder.glob("fedproto-*"))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def children(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in listed for child in file.read_text().split()}


# --- the same result


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_compute_what_one_does(name: str, workers: int) -> None:
    found = collect_outcomes(use_processes(experiment(name, **FAULTS | RUNS[name]), workers))[0]
    assert_alike(found, outcome_of_one_process(name), 0 if name in EXACT else ALMOST)


@pytest.mark.parametrize("name", ["fedavg", "fesem", "fedproto-mh", "fedrep"])
def test_stacks_in_several_processes_compute_what_one_process_does(name: str) -> None:
    found = collect_outcomes(
        use_processes(experiment(name, **FAULTS | RUNS[name]), 2, vectorised=True)
    )[0]
    assert_alike(found, outcome_of_one_process(name), ALMOST)


@pytest.mark.parametrize("name", ["fedavg", "fesem", "fedproto(absent=remember)"])
@pytest.mark.parametrize("vectorised", [False, True], ids=["reference", "vectorised"])
def test_there_may_be_more_processes_than_clients(name: str, vectorised: bool) -> None:
    settings = {"clients": 2, "participation": 0.5} | RUNS[name]
    expected = collect_outcomes(use_one_process(experiment(name, **settings)))[0]
    assert_alike(
        collect_outcomes(use_processes(experiment(name, **settings), 3, vectorised=vectorised))[0],
        expected,
        ALMOST,
    )


def test_one_process_is_a_group_too() -> None:
    assert_alike(
        collect_outcomes(use_processes(experiment("fesem", **FAULTS | RUNS["fesem"]), 1))[0],
        outcome_of_one_process("fesem"),
        0,
    )


def test_a_round_of_which_nothing_arrives() -> None:
    expected = collect_outcomes(use_one_process(experiment("fedavg", lost_uploads=1)))[0]
    assert_alike(
        collect_outcomes(use_processes(experiment("fedavg", lost_uploads=1), 2))[0], expected, 0
    )


@pytest.mark.parametrize("name", ["fedavg", "fedproto(absent=remember)"])
def test_late_uploads_come_from_all_processes(name: str) -> None:
    late = {"clients": 6, "buffer": 2, "concurrency": 4, "speed_spread": 1.0, "rounds": 5}
    expected = collect_outcomes(use_one_process(experiment(name, **late)))[0]
    assert any(key.startswith("flight.uploads.") for key in expected)
    assert_alike(collect_outcomes(use_processes(experiment(name, **late), 2))[0], expected, 0)


@pytest.mark.parametrize("name", ["fedavg", "fesem", "fedproto(absent=remember)"])
def test_federations_are_trained_together(name: str) -> None:
    def pair() -> list[Experiment]:
        return [
            experiment(name, seed=seed, clients=clients, participation=0.5)
            for seed, clients in ((0, 3), (1, 5))
        ]

    runs, others = pair(), pair()
    runs[0].engine = build_process_engine(make_builder(runs), runs[0].algorithm, 2)
    others[0].engine = make_builder(others)(Shard())
    for found, expected in zip(collect_outcomes(*runs), collect_outcomes(*others), strict=True):
        assert_alike(found, expected, ALMOST)


def test_workers_have_as_many_threads_as_their_parent() -> None:
    """GNU's OpenMP would hang in the fork if the parent has used threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        big = torch.rand(1000, 1000)
        (big @ big).sin().sum()
        run = experiment(
            "local", clients=2, model="mlp(hidden=300,width=8)", batch=100, shots=20, rounds=1
        )
        base = make_builder([run])

        def build(shard: Shard) -> Engine:
            assert torch.get_num_threads() == 2
            (big @ big).sin().sum()
            return base(shard)

        run.engine = build_process_engine(build, run.algorithm, 2)
        do_rounds(run)
        run.engine.close()
    finally:
        torch.set_num_threads(before)


# --- start, close and checkpoints


def test_no_process_starts_before_the_first_round() -> None:
    run = use_processes(experiment("fedavg"), 2)
    assert not multiprocessing.active_children()
    fresh = use_one_process(experiment("fedavg")).engine.export(0)
    assert_alike(run.engine.export(0), fresh, 0)
    run.engine.close()


def test_a_closed_engine_can_continue() -> None:
    run = use_processes(experiment("fedrep", **FAULTS), 2)
    for _ in run_rounds(run.algorithm, run.engine, [run.federation_run()]):
        run.engine.close()
        run.engine.close()
        assert not multiprocessing.active_children()
    found = collect_states(run)
    assert_alike(found, {name: outcome_of_one_process("fedrep")[name] for name in found}, ALMOST)


def test_engines_take_turns() -> None:
    """There is one group of processes, but two methods may be compared round by round."""
    names = ("fesem", "fedproto(absent=remember)")
    runs = [use_processes(experiment(name, **FAULTS | RUNS[name]), 2) for name in names]
    for _ in zip(
        *(run_rounds(run.algorithm, run.engine, [run.federation_run()]) for run in runs),
        strict=True,
    ):
        pass
    for name, run in zip(names, runs, strict=True):
        run.engine.close()
        found = collect_states(run)
        assert_alike(found, {key: outcome_of_one_process(name)[key] for key in found}, 0)


@pytest.mark.parametrize("started", [False, True])
def test_states_are_restored(started: bool) -> None:
    source, run = use_one_process(experiment("local")), use_processes(experiment("local"), 2)
    do_rounds(source)
    servers = [run.progress.server]
    if started:
        run.engine.evaluate(servers)
    run.engine.restore(0, source.engine.export(0))
    assert_alike(run.engine.export(0), source.engine.export(0), 0)
    assert_alike(run.engine.evaluate(servers)[0], source.engine.evaluate(servers)[0], 0)
    assert_alike(run.engine.export(0), source.engine.export(0), 0)
    run.engine.close()
    assert_alike(run.engine.export(0), source.engine.export(0), 0)


@pytest.mark.parametrize("started", [False, True])
def test_states_that_lack_a_value_are_refused_at_once(started: bool) -> None:
    run = use_processes(experiment("local"), 2)
    if started:
        run.engine.evaluate([run.progress.server])
    tree = run.engine.export(0)
    lacking = next(name for name in tree if name.startswith("1."))
    del tree[lacking]
    with pytest.raises(KeyError, match=lacking):
        run.engine.restore(0, tree)
    run.engine.close()


class Killed(BaseException):
    """Stands for SIGKILL inside this process."""


def test_a_run_resumes_to_the_same_checkpoint(tmp_path: Path) -> None:
    settings = FAULTS | {"rounds": 5, "checkpoint_every": 2}

    def begin(name: str) -> tuple[Experiment, RunFolder]:
        run = experiment("fedproto(absent=remember)", **settings)
        return run, run.new_folder(tmp_path / name)

    def die(result: RoundResult) -> None:
        if result.round == 3:
            raise Killed

    run, folder = begin("one")
    use_one_process(run).execute(folder)
    run, other = begin("several")
    with pytest.raises(Killed):
        use_processes(run, 2).execute(other, die)
    run.engine.close()
    again = use_processes(experiment("fedproto(absent=remember)", **settings), 4)
    again.restore(other)
    assert again.progress.round == 2
    again.execute(other)
    again.engine.close()
    (name,) = [
        str(path.relative_to(folder.path)) for path in (folder.path / "checkpoint").iterdir()
    ]
    assert (other.path / name).read_bytes() == (folder.path / name).read_bytes()


# --- what goes wrong


class Moody(nn.Module):
    """Calls its mood, if any, when it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 8)
        self.head = nn.Linear(8, 10)
        self.mood: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training and self.mood:
            self.mood()
        features = self.body(x.flatten(1))
        return features, self.head(features)


def moody(mood: Callable[[], None], client: int) -> Experiment:
    settings = {key: value for key, value in SETTINGS.items() if key != "model"}
    modules = [Moody() for _ in range(4)]
    (config,) = configure(settings | {"algorithm": "fedavg"})
    run = Experiment.prepare(config, modules=modules)
    run.federation.members[client].module.mood = mood  # type: ignore[assignment]
    return run


def complain() -> None:
    raise ValueError("I would rather not")


@pytest.mark.parametrize("client", [0, 1, 3])
def test_an_error_on_one_rank_is_raised_on_rank_0_and_the_others_continue(client: int) -> None:
    run = use_processes(moody(complain, client), 3)
    for _ in range(2):
        with pytest.raises(
            TrainingError, match=f"^round 1, client {client} .*: I would rather not$"
        ):
            train_one_round(run)
    assert len(run.engine.evaluate([run.progress.server])[0]["head"]) == 4
    run.engine.close()
    assert len(run.engine.export(0)) == 16


class Odd(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_cannot_be_built_says_so(rank: int) -> None:
    run = experiment("fedavg")
    base = make_builder([run])

    def build(shard: Shard) -> Engine:
        if shard.first == rank:
            raise Odd("this", "that")
        return base(shard)

    run.engine = build_process_engine(build, run.algorithm, 2)
    with pytest.raises((TrainingError, Odd), match=r"this and that$"):
        run.engine.evaluate([run.progress.server])
    assert not multiprocessing.active_children()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_at_work_is_an_error_at_once() -> None:
    run = use_processes(moody(die, client=2), 4)
    started = time.perf_counter()
    with pytest.raises(
        TrainingError, match=r"^worker process 2 was killed by signal 9, .* last checkpoint$"
    ):
        train_one_round(run)
    assert time.perf_counter() - started < MAX_SECONDS_TO_NOTICE
    with pytest.raises(TrainingError, match="last checkpoint"):
        run.engine.export(0)
    run.engine.close()
    run.engine.close()
    with pytest.raises(TrainingError, match="last checkpoint"):
        run.engine.export(0)


def test_a_worker_killed_between_rounds_is_an_error_too() -> None:
    run = use_processes(experiment("fedavg"), 2)
    train_one_round(run)
    (worker,) = multiprocessing.active_children()
    assert worker.pid
    os.kill(worker.pid, signal.SIGKILL)
    run.engine.close()  # which says nothing: the run may be over
    with pytest.raises(TrainingError, match="last checkpoint"):
        run.engine.export(0)


def test_a_worker_killed_while_all_connect_is_an_error_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 waited for it as long as for one that trains: seven days."""

    def die_in_rank_1(*args: Any, rank: int, **options: Any) -> None:
        if rank == 1:
            die()
        connect(*args, rank=rank, **options)

    connect = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", die_in_rank_1)
    monkeypatch.setattr(forked, "MEETING_TIMEOUT", timedelta(seconds=3))
    run = use_processes(experiment("fedavg"), 2)
    with pytest.raises(TrainingError, match=r"^worker process 1 was killed by signal 9"):
        train_one_round(run)
    assert not multiprocessing.active_children()
    assert not dist.is_initialized()


def test_processes_that_have_met_wait_longer_than_for_the_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank may train for hours while the others wait for it."""
    monkeypatch.setattr(forked, "MEETING_TIMEOUT", timedelta(seconds=3))
    pauses = iter([4])  # in the first step only
    run = use_processes(moody(lambda: time.sleep(next(pauses, 0)), client=1), 2)
    (chunk,) = train_one_round(run)
    assert chunk.clients.tolist() == [0, 1, 2, 3]
    run.engine.close()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_round_leaves_no_process_waiting() -> None:
    """A second Ctrl-C stops rank 0 anywhere; the others wait for it in the middle of the round."""
    run = use_processes(moody(interrupt, client=0), 3)
    with pytest.raises(KeyboardInterrupt):
        train_one_round(run)
    started = time.perf_counter()
    run.engine.close()
    assert time.perf_counter() - started < MAX_SECONDS_TO_NOTICE
    with pytest.raises(TrainingError, match="last checkpoint"):
        run.engine.export(0)


def test_a_process_that_is_in_a_group_already_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = use_processes(experiment("fedavg"), 2)
    with pytest.raises(ConfigError, match="in a group already"):
        train_one_round(run)
    assert dist.is_initialized()
    dist.destroy_process_group()


class Remnant:
    """Writes down the process in which it is freed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.itself = self  # a cycle, so that only the garbage collector finds it

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_workers_never_free_what_their_parent_left(tmp_path: Path) -> None:
    """An earlier run's group, freed in a fork, waited for threads that only the parent has."""
    path = tmp_path / "freed"
    run = experiment("fedavg", rounds=2)
    build = make_builder([run])

    def collecting(shard: Shard) -> Engine:
        gc.collect()
        return build(shard)

    gc.disable()
    try:
        Remnant(path)
        run.engine = build_process_engine(collecting, run.algorithm, 2)
        kept = [Remnant(path)]  # garbage only in a fork that lets go of it
        do_rounds(run)
        run.engine.close()
        del kept
    finally:
        gc.enable()
    gc.collect()
    assert path.read_text().splitlines() == [str(os.getpid())] * 2


# --- as programs: signals, and torchrun

SCRIPT = """
import multiprocessing, os, sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers.tiny import experiment
from helpers.distributed_runs import *
from fedproto.engines.distributed import torchrun
folder = Path({folder!r})
"""


def program(tmp_path: Path, body: str, *launcher: str) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)) + body
    )
    return subprocess.Popen(
        [sys.executable, *launcher, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@needs_proc
@pytest.mark.parametrize("ending", ["killed", pytest.param("exits", marks=pytest.mark.slow)])
def test_workers_do_not_outlive_their_parent(ending: str, tmp_path: Path) -> None:
    body = """
run = use_processes(experiment("fedavg"), 3)
train_one_round(run)
print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
"""
    parent = program(tmp_path, body + ("time.sleep(3600)" if ending == "killed" else ""))
    assert parent.stdout
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    if ending == "killed":
        parent.kill()
    _, stderr = parent.communicate(timeout=PATIENCE_SECONDS)
    assert stderr == ""
    assert parent.returncode == (0 if ending == "exits" else -signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, workers)), "the workers end, too")


def test_an_interrupt_of_all_processes_finishes_the_round(tmp_path: Path) -> None:
    body = """
from fedproto.runs.execution import Interrupted
run = use_processes(experiment("fedavg", rounds=100000, checkpoint_every=100000), 2)
try:
    run.execute(run.new_folder(folder / "run"), lambda result: print(result.round, flush=True))
except Interrupted:
    run.engine.close()
    print("closed", run.progress.round, len(run.engine.export(0)), flush=True)
"""
    running = program(tmp_path, body)
    assert running.stdout and running.stdout.readline() == "1\n"
    os.killpg(running.pid, signal.SIGINT)
    out, stderr = running.communicate(timeout=PATIENCE_SECONDS)
    assert stderr == "" and running.returncode == 0
    *_, rounds, last = ["1", *out.splitlines()]
    assert last.split()[0] == "closed" and last.split()[2] == "24" and rounds == last.split()[1]


@pytest.mark.slow
def test_ranks_agree_on_the_size_of_their_stacks(tmp_path: Path) -> None:
    """Each looks at its own GPU's free memory; all use, and write down, the smallest size."""
    body = """
from fedproto.engines.vectorised import memory
from fedproto.runs.execution import follow
rank = int(os.environ["RANK"])
memory.free_memory = lambda device: 2**40 if rank == 0 else 1
run = experiment("fedavg", engine="vectorised", clients=6)
assert run.config.stack == 1, run.config.stack
if torchrun.follows():
    follow([run])
    sys.exit(0)
run.execute(run.new_folder(folder / "run"))
print("done")
"""
    running = program(
        tmp_path, body, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"
    )
    out, stderr = running.communicate(timeout=PATIENCE_SECONDS)
    assert (running.returncode, out) == (0, "done\n"), stderr
    assert "\nstack = 1\n" in (tmp_path / "run" / "config.toml").read_text()


def test_torchrun(tmp_path: Path) -> None:
    """Two methods one after the other, as the command line compares them; only rank 0 prints."""
    body = """
assert torchrun.under_torchrun()
names = ("fedavg", "fesem")
runs = [experiment(name, **FAULTS | RUNS[name]) for name in names]
for run in runs:
    run.engine = torchrun.join(make_builder([run]), run.algorithm, torch.device("cpu"))
if torchrun.follows():
    for run in runs:
        run.engine.serve()
    sys.exit(0)
for name, run in zip(names, runs):
    tolerance = 0 if name in EXACT else ALMOST
    assert_alike(collect_outcomes(run)[0], outcome_of_one_process(name), tolerance)
print("alike")
"""
    running = program(
        tmp_path, body, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"
    )
    out, stderr = running.communicate(timeout=PATIENCE_SECONDS)
    assert (running.returncode, out) == (0, "alike\n"), stderr
