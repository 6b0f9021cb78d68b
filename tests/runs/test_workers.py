"""Processes that share tasks: what comes back, what fails, and how they end."""

import os
import pickle
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.command_line import answer, fedproto, process
from helpers.killed_runs import as_toml
from helpers.patience import wait_until
from helpers.tiny import SETTINGS
from helpers.worker_tasks import double, fail, meet

from fedproto.engines.vectorised import memory
from fedproto.errors import ConfigError, DivergedError, LostProcessError, TrainingError
from fedproto.runs.folder import RunFolder
from fedproto.runs.sweep import Cell, read_sweep, run_sweep
from fedproto.runs.workers import Task, make_portable, run_tasks


def ignore(number: int, content: Any) -> None:
    pass


def write_sweep(path: Path, lists: dict[str, list], **settings: Any) -> Path:
    path.write_text(f"{as_toml(SETTINGS | settings)}[sweep]\n{as_toml(lists)}")
    return path


class Seen:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.rounds: list[int] = []
        self.broken_cells: list[tuple[str, str]] = []

    def batch(self, cells: Sequence[Cell], done: int, notices: Sequence[str]) -> Any:
        self.batches.append(([cell.name for cell in cells], done))
        return lambda result: self.rounds.append(result.round)

    def broken(self, cell: Cell, error: TrainingError) -> None:
        self.broken_cells.append((cell.name, str(error)))


# --- tasks


def test_every_task_is_done_once_and_two_at_the_same_time(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    tasks = [Task(meet, (tmp_path, 2, value)) for value in (5, 6)]
    tasks += [Task(meet, (tmp_path, 2, value)) for value in (7, 8)]
    found = dict(run_tasks(tasks, 2, lambda number, content: reports.append((number, content))))
    assert {number: value for number, (value, _) in found.items()} == {0: 10, 1: 12, 2: 14, 3: 16}
    assert sorted(reports) == [(0, 5), (1, 6), (2, 7), (3, 8)]
    processes = {process for _, process in found.values()}
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_nothing_begins_once_it_is_over() -> None:
    begun: list[int] = []
    tasks = [Task(double, (value,)) for value in range(6)]
    found = run_tasks(
        tasks, 1, lambda number, content: begun.append(number), lambda: len(begun) > 1
    )
    assert sorted(number for number, _ in found) == [0, 1]


def test_idle_processes_are_not_killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal while one ends by itself made it print a traceback after all was done."""
    killed: list[int | None] = []
    monkeypatch.setattr(BaseProcess, "terminate", lambda self: killed.append(self.pid))
    tasks = [Task(double, (value,)) for value in range(3)]
    assert len(list(run_tasks(tasks, 2, ignore))) == 3
    assert killed == []


@pytest.mark.parametrize(
    ("kind", "error", "sentence"),
    [
        ("setting", ConfigError, "lr must be positive, not -1"),
        ("killed", LostProcessError, "a worker process has ended"),
    ],
)
def test_an_error_of_a_task_is_raised_here(
    kind: str, error: type, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=sentence):
        list(run_tasks([Task(fail, (kind,))], 1, ignore))


def test_errors_cross_to_another_process_with_their_kind_and_sentence() -> None:
    diverged = make_portable(DivergedError("round 2, client 9: the loss is nan", 2, 9))
    again = pickle.loads(pickle.dumps(diverged))
    assert (type(again), str(again)) == (TrainingError, "round 2, client 9: the loss is nan")
    try:
        [][1]
    except IndexError as error:
        again = pickle.loads(pickle.dumps(make_portable(error)))
    assert isinstance(again, RuntimeError)
    assert "in a worker process:" in str(again)
    assert "IndexError: list index out of range" in str(again)


# --- sweeps


def test_several_processes_write_the_same_runs_as_one(tmp_path: Path) -> None:
    """What diverges in a worker is reported, and the rest finishes."""
    lists = {"algorithm": ["local", "fedproto"], "lr": [0.05, 0.1, 1e200]}
    cells = read_sweep(write_sweep(tmp_path / "sweep.toml", lists, engine="vectorised"))
    alone, shared = Seen(), Seen()
    expected = run_sweep(cells, tmp_path / "one", alone.batch, alone.broken)
    found = run_sweep(cells, tmp_path / "two", shared.batch, shared.broken, jobs=2)
    assert [result is None for result in found] == 2 * [False, False, True]
    for cell, ours, theirs in zip(cells, found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert ours | {"seconds": 0} == theirs | {"seconds": 0}
        lines = RunFolder(tmp_path / "two" / cell.name).metrics()
        same_lines = RunFolder(tmp_path / "one" / cell.name).metrics()
        for line, same in zip(lines, same_lines, strict=True):
            assert line | {"seconds": 0} == same | {"seconds": 0}
    assert sorted(shared.batches) == sorted(alone.batches)
    assert sorted(shared.rounds) == sorted(alone.rounds)
    assert sorted(shared.broken_cells) == sorted(alone.broken_cells)
    assert len(shared.broken_cells) == 2


def test_sigterm_leaves_checkpoints_and_no_process(tmp_path: Path) -> None:
    lists = {"algorithm": ["local", "fedproto"]}
    path = write_sweep(tmp_path / "sweep.toml", lists, rounds=100_000, checkpoint_every=100_000)
    out = tmp_path / "out"
    running = process("sweep", path, "--out", out, "--jobs", 2)
    folders = [out / "local", out / "fedproto"]
    files = [folder / "metrics.jsonl" for folder in folders]
    wait_until(lambda: all(path.exists() for path in files), "a round of both runs")
    workers = _children_of(running.pid)
    running.send_signal(signal.SIGTERM)
    stopped = answer(running)
    assert (stopped.code, stopped.err.strip()) == (
        130,
        f"stopped; `fedproto sweep {path} --out {out}` goes on",
    )
    for folder in folders:
        run = RunFolder.open(folder)
        assert run.checkpoint_round() == len(run.metrics()) > 0
    assert len(workers) >= 2
    wait_until(lambda: not any(map(_is_alive, workers)), "the end of the workers")


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _children_of(pid: int) -> list[int]:
    """Return the processes that one has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_workers_share_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 2**37
    gpu = torch.device("cuda")
    monkeypatch.setattr(memory, "_sharing_processes", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, total))
    found = SimpleNamespace(total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert (memory.free_memory(gpu), memory.values_per_pass(gpu)) == (2**36, 2**26)
    memory.share_gpu(16)
    assert (memory.free_memory(gpu), memory.values_per_pass(gpu)) == (2**33, 2**22)
    assert memory.free_memory(torch.device("cpu")) is None


def test_the_number_of_processes_is_positive(tmp_path: Path) -> None:
    path = write_sweep(tmp_path / "sweep.toml", {"seed": [0, 1]})
    refused = fedproto("sweep", path, "--jobs", 0)
    assert refused.code == 2
    assert "--jobs" in refused.err
