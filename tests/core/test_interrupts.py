"""SIGTERM and Ctrl-C sent to whole process groups, as by `timeout` or systemd, lose nothing."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import patience
from helpers.command_line import Answer, Gate, answer, fedproto, process
from helpers.killed_runs import as_toml, count_rounds, newest_checkpoint, wait_until
from helpers.tiny import SETTINGS
from safetensors.torch import load_file

from fedproto.core.interrupts import finish_round_on_interrupt, handle_sigterm
from fedproto.runs.execution import Interrupted
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder
from fedproto.runs.sweep import read_sweep, run_sweep

#: Rounds enough to be hit by a signal; without a checkpoint of its own before the last of them.
LONG: dict[str, Any] = {
    "dataset": "digits",
    "clients": 6,
    "shots": 5,
    "rounds": 40,
    "eval_every": 20,
    "checkpoint_every": 40,
    "model": "mlp(hidden=16,width=8)",
    "engine": "processes",
    "workers": 2,
}
SIGNALS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]


def start_group(*arguments: str | Path, gate: Gate | None = None) -> subprocess.Popen:
    """`fedproto ARGUMENTS` as the leader of a new process group, in a session of its own."""
    return process(*arguments, gate=gate, own_session=True)


def stop_group(running: subprocess.Popen, stop: signal.Signals, gate: Gate | None = None) -> Answer:
    """Send the signal to all processes of the group; SIGTERM twice, as `timeout` sends it."""
    os.killpg(running.pid, stop)
    if stop == signal.SIGTERM:
        time.sleep(0.02)
        os.killpg(running.pid, stop)
    if gate is not None:
        gate.open()
    return answer(running)


def states_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(folder))


def assert_equal_runs(one: Path, other: Path) -> None:
    first, second = states_in(one), states_in(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    results = [RunFolder(folder).result() for folder in (one, other)]
    assert results[0] is not None and results[1] is not None
    for key in ("clients", "accuracy", "communication"):
        assert results[0][key] == results[1][key]


def processes_of_session(session: int) -> list[int]:
    """The living processes of a session, by id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, session_of_it = fields[0], int(fields[3])
        if session_of_it == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("stop", SIGNALS, ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_the_group_of_a_run_loses_no_round(
    stop: signal.Signals, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(as_toml(LONG))
    path = tmp_path / "run"
    gate = Gate(tmp_path / "gate", round=39)
    running = start_group("run", config, "--out", path, gate=gate)
    wait_until(lambda: count_rounds(path) >= 3, running)
    stopped = stop_group(running, stop, gate)
    done = count_rounds(path)
    assert stopped.code == 130, stopped.err
    assert (
        stopped.err
        == f"fedproto stopped after round {done} of 40; continue with: fedproto resume {path}\n"
    )
    assert RunFolder(path).checkpoint_round() == done < 40
    resumed = fedproto("resume", path)
    assert resumed.code == 0, resumed.err
    assert fedproto("run", config, "--out", tmp_path / "undisturbed").code == 0
    assert_equal_runs(path, tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("stop", SIGNALS, ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_the_group_of_a_sweep_stops_it(stop: signal.Signals, tmp_path: Path) -> None:
    """Neither is the batch halved, as if memory had run out, nor does the next one start."""
    config = tmp_path / "sweep.toml"
    config.write_text(as_toml(LONG) + '[sweep]\nalgorithm = ["fedproto", "local"]\nseed = [0, 1]\n')
    out = tmp_path / "out"
    gate = Gate(tmp_path / "gate", round=39)
    running = start_group("sweep", config, "--out", out, gate=gate)
    first = out / "fedproto-seed=0"
    wait_until(lambda: count_rounds(first) >= 3, running)
    stopped = stop_group(running, stop, gate)
    assert stopped.code == 130, stopped.err
    assert stopped.err == f"stopped; `fedproto sweep {config} --out {out}` goes on\n"
    assert "broke down" not in stopped.out
    for seed in (0, 1):
        folder = RunFolder(out / f"fedproto-seed={seed}")
        assert folder.checkpoint_round() == count_rounds(first) < 40
        assert folder.result() is None
    assert not (out / "local-seed=0").exists()
    assert fedproto("sweep", config, "--out", out).code == 0
    assert fedproto("sweep", config, "--out", tmp_path / "undisturbed").code == 0
    for name in ("fedproto-seed=0", "fedproto-seed=1", "local-seed=1"):
        assert_equal_runs(out / name, tmp_path / "undisturbed" / name)


@pytest.mark.slow
def test_sigterm_to_the_group_of_reproduce_stops_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    running = start_group(
        "reproduce", "table-mnist", "--quick", "--rounds", "500", "--seeds", "1", "--out", out
    )
    wait_until(
        lambda: any(count_rounds(path.parent) >= 2 for path in out.rglob("metrics.jsonl")), running
    )
    stopped = stop_group(running, signal.SIGTERM)
    assert stopped.code == 130, stopped.err
    command = f"fedproto reproduce table-mnist --quick --seeds 1 --rounds 500 --out {out}"
    assert stopped.err == f"stopped; `{command}` goes on\n"
    begun = [RunFolder(path.parent) for path in out.rglob("metrics.jsonl")]
    assert begun
    for folder in begun:
        assert folder.result() is not None or folder.checkpoint_round() == count_rounds(folder.path)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_workers_do_not_outlive_a_killed_run(tmp_path: Path) -> None:
    """They ignore SIGTERM, so nothing else would end them."""
    config = tmp_path / "config.toml"
    config.write_text(as_toml(LONG | {"rounds": 100_000, "workers": 3}))
    running = start_group("run", config, "--out", tmp_path / "run")
    wait_until(lambda: count_rounds(tmp_path / "run") >= 2, running)
    assert len(processes_of_session(running.pid)) == 3
    running.kill()
    running.communicate()
    patience.wait_until(lambda: not processes_of_session(running.pid), "the workers end, too")


def kill_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()


@pytest.mark.slow  # gloo once waited for ever for the killed workers
def test_workers_lost_in_an_interrupt_are_no_lack_of_memory(tmp_path: Path) -> None:
    """Where something kills the workers although they ignore SIGTERM, the sweep still stops."""
    config = tmp_path / "sweep.toml"
    config.write_text(
        as_toml(LONG | {"rounds": 4, "checkpoint_every": 4}) + "[sweep]\nseed = [0, 1]\n"
    )
    batches: list[int] = []
    broken: list[str] = []

    def on_batch(cells: Any, done: int, notices: Any) -> Callable[[Any], None]:
        batches.append(len(cells))

        def on_round(result: Any) -> None:
            if result.round == 2 and multiprocessing.active_children():
                kill_workers()
                signal.raise_signal(signal.SIGINT)

        return on_round

    with pytest.raises(Interrupted) as stopped:
        run_sweep(
            read_sweep(config),
            tmp_path / "out",
            on_batch,
            lambda cell, error: broken.append(cell.name),
        )
    assert "last checkpoint" in str(stopped.value.__cause__)
    assert (batches, broken) == ([2], [])


@pytest.mark.slow
def test_workers_lost_without_an_interrupt_are_still_an_error(tmp_path: Path) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text(as_toml(LONG | {"rounds": 3}) + "[sweep]\nseed = [0, 1]\n")
    batches: list[int] = []

    def on_batch(cells: Any, done: int, notices: Any) -> Callable[[Any], None]:
        batches.append(len(cells))
        return lambda result: kill_workers() if result.round == 2 and len(cells) == 2 else None

    results = run_sweep(read_sweep(config), tmp_path / "out", on_batch, lambda cell, error: None)
    assert batches == [2, 1, 1]
    assert None not in results


def test_an_interrupt_while_a_run_is_finished_stops_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came too late for the first batch, whose result is written, but not for the second."""
    config = tmp_path / "sweep.toml"
    settings = SETTINGS | {"rounds": 2, "engine": "vectorised"}
    config.write_text(as_toml(settings) + '[sweep]\nalgorithm = ["fedproto", "local"]\n')
    finish = Experiment.finish

    def interrupted_finish(self: Experiment, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return finish(self, *arguments)

    monkeypatch.setattr(Experiment, "finish", interrupted_finish)
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        run_sweep(read_sweep(config), out, lambda cells, done, notices: lambda result: None)
    assert RunFolder(out / "fedproto").result() is not None
    assert not (out / "local").exists()


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_stops() -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupted = threading.Event()
    try:
        handle_sigterm()
        with finish_round_on_interrupt(interrupted):
            signal.raise_signal(signal.SIGTERM)
            assert interrupted.is_set()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # the first Ctrl-C
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
