"""A run killed at any moment resumes to the bit-identical result."""

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.command_line import Gate, answer, fedproto, files_in, only_line, process
from helpers.killed_runs import (
    Files,
    Killed,
    begin,
    copy_before_each_step,
    count_rounds,
    die_at_step,
    kill_in,
    killed_run,
    left_behind,
    newest_checkpoint,
    resume,
    run_with_copies,
    wait_until,
)

from fedproto.cli import main
from fedproto.core.files import write_atomically
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder

DIGITS = {
    "dataset": "digits",
    "clients": 6,
    "shots": 5,
    "rounds": 9,
    "checkpoint_every": 3,
    "eval_every": 4,
}
SETUPS: dict[str, dict[str, Any]] = {
    # Absent clients and the latest uploads are part of the state.
    "fedproto": DIGITS | {"participation": 0.5, "lost_uploads": 0.3, "stragglers": 0.3},
    "fesem": DIGITS | {"algorithm": "fesem"},
    "fedavg": DIGITS | {"algorithm": "fedavg", "participation": 0.5},
    # Heads that stay at the client, and dropout in the model, whose draws must repeat.
    "fedrep": DIGITS
    | {
        "algorithm": "fedrep",
        "dataset": "mnist5k",
        "clients": 2,
        "rounds": 5,
        "checkpoint_every": 2,
    },
    # Most clients have not trained at the first checkpoint, so their models share tensors.
    "rarely present": DIGITS
    | {"algorithm": "fedavg", "participation": 0.2, "checkpoint_every": 1, "rounds": 4},
    "never heard": DIGITS
    | {"algorithm": "fedavg", "lost_uploads": 1, "checkpoint_every": 1, "rounds": 2},
    # Previous models, linear terms, and what a server trains, are part of the state.
    "moon": DIGITS | {"algorithm": "moon", "participation": 0.5, "rounds": 4},
    "feddyn": DIGITS | {"algorithm": "feddyn", "participation": 0.5, "rounds": 4},
    "fednh": DIGITS | {"algorithm": "fednh", "rounds": 4},
    "fedgh": DIGITS | {"algorithm": "fedgh", "rounds": 4},
    "fedtgp": DIGITS | {"algorithm": "fedtgp(server_epochs=5)", "participation": 0.5, "rounds": 4},
    "fedorgp": DIGITS | {"algorithm": "fedorgp", "participation": 0.5, "rounds": 4},
    "protonorm": DIGITS | {"algorithm": "protonorm", "participation": 0.5, "rounds": 4},
    "fedsa": DIGITS | {"algorithm": "fedsa", "participation": 0.5, "rounds": 4},
    "fedre": DIGITS | {"algorithm": "fedre", "participation": 0.5, "rounds": 4},
    "mixed": DIGITS
    | {"algorithm": "fedproto-mh", "dataset": "digits*4,mnist5k*2", "dim": 20, "rounds": 4},
    # Uploads that are on their way, and the clock, are part of the state.
    "late models": DIGITS
    | {"algorithm": "fedavg", "buffer": 2, "concurrency": 4, "speed_spread": 1.0},
    "late prototypes": DIGITS
    | {"buffer": 2, "concurrency": 4, "speed_spread": 1.0, "lost_uploads": 0.2},
    # Clients and servers that keep more than a model.
    "scaffold": DIGITS | {"algorithm": "scaffold", "participation": 0.5, "rounds": 4},
    "ditto": DIGITS | {"algorithm": "ditto", "participation": 0.5, "rounds": 4},
    "fedadam": DIGITS | {"algorithm": "fedadam", "clients": 3, "rounds": 4},
    # Long enough to be hit by a signal, and small enough to be killed at every step it takes.
    "long": DIGITS | {"participation": 0.5, "lost_uploads": 0.3, "stragglers": 0.3, "rounds": 30},
    "short": DIGITS | {"rounds": 4, "checkpoint_every": 2, "clients": 3},
}


#: Methods whose server works on what clients send.
NEWER = ("fedorgp", "protonorm", "fedsa", "fedre")


class FinishedRun(NamedTuple):
    """A run that nobody disturbed."""

    files: Files  # what it left behind
    copies: Path  # of its folder after each round

    def killed_after(self, round: int, path: Path) -> Path:
        """Return a folder as a process that was killed right after a round leaves it."""
        return Path(shutil.copytree(self.copies / f"round-{round}", path))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FinishedRun]:
    """The undisturbed run of a setup; each is run once."""

    @functools.cache
    def run(name: str) -> FinishedRun:
        path = tmp_path_factory.mktemp("finished") / "run"
        copies = run_with_copies(path, SETUPS[name])
        return FinishedRun(left_behind(path), copies)

    return run


# --- killed between rounds


@pytest.mark.parametrize(
    ("name", "round"),
    [(name, round) for name in ("fedproto", "fesem", "fedavg") for round in range(1, 10)]
    + [
        ("fedrep", 1),
        ("fedrep", 2),
        ("fedrep", 3),
        ("fedrep", 5),
        ("rarely present", 2),
        ("never heard", 1),
    ]
    + [(name, 3) for name in ("moon", "feddyn", "fednh", "fedgh", "fedtgp", *NEWER)]
    + [("fedtgp", 2)]
    + [("mixed", 3), ("scaffold", 2), ("scaffold", 3), ("ditto", 3), ("fedadam", 3)]
    + [("late models", 1), ("late models", 5), ("late prototypes", 3), ("late prototypes", 8)],
)
def test_a_run_killed_after_any_round_resumes_to_the_same_folder(
    name: str, round: int, tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    """After rounds 3, 6 and 9 the checkpoint is new, after others it is older than the metrics.

    After round 9 the result alone is missing.
    """
    path = finished(name).killed_after(round, tmp_path / "run")
    assert not (path / "result.json").exists()
    assert resume(path) == finished(name).files


def test_a_run_may_be_killed_again_and_again(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = finished("fedproto").killed_after(1, tmp_path / "run")
    for round in (2, 4, 5, 8):
        experiment, folder = reopen(RunFolder(path))
        kill_in(round, folder, experiment)
    assert resume(path) == finished("fedproto").files


def test_without_checkpoints_a_run_resumes_from_the_start(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = killed_run(tmp_path / "run", SETUPS["fedproto"] | {"checkpoint_every": 0}, round=7)
    assert files_in(path / "checkpoint") == []
    files, expected = resume(path), finished("fedproto").files
    for name in ("result.json", "metrics.jsonl", "prototypes.safetensors"):
        assert files[name] == expected[name]
    assert files_in(path / "checkpoint") == []


def test_a_run_resumes_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Callable[[str], FinishedRun]
) -> None:
    finished("fedavg").killed_after(4, tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert resume(Path(".")) == finished("fedavg").files


# --- killed while it writes


def test_a_run_killed_at_any_step_of_its_writing_resumes_to_the_same_folder(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = tmp_path / "run"
    copies = tmp_path / "killed at step"
    folder, experiment = begin(path, SETUPS["short"])
    with pytest.MonkeyPatch.context() as patch:
        copy_before_each_step(patch, path, copies)
        experiment.execute(folder)
    killed = list(copies.iterdir())
    # Two checkpoints of three steps or more, the metrics, the prototypes and the result.
    assert len(killed) > 10
    for copy in killed:
        assert resume(copy) == finished("short").files, copy


def test_a_folder_is_there_completely_or_not_at_all(tmp_path: Path) -> None:
    for step in itertools.count(1):
        path = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as patch:
            die_at_step(patch, step)
            try:
                with RunFolder.fill(path, "config", {"clients": []}):
                    pass
                break
            except Killed:
                assert not path.exists()
    assert files_in(path) == ["checkpoint", "config.toml", "metrics.jsonl", "partition.json"]
    assert step == 6  # two files, each synced and renamed, then the folder


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    broken: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(type(error)):
        write_atomically(path, b"new")
    assert files_in(tmp_path) == ["result.json"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("place", [".", "checkpoint"])
def test_what_a_killed_write_left_is_removed_by_the_next_writer(place: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        die_at_step(patch, 1)
        with pytest.raises(Killed):
            write_atomically(tmp_path / place / "result.json", b"first")
    assert files_in(tmp_path) != ["checkpoint"]
    with RunFolder(tmp_path).hold():
        pass
    assert files_in(tmp_path) == ["checkpoint"]


def test_half_a_line_of_metrics_is_forgotten_wherever_it_was_cut(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    """Some cuts end in a bracket, as whole lines do."""
    folder = RunFolder(finished("short").killed_after(3, tmp_path / "run"))
    file = tmp_path / "run/metrics.jsonl"
    *whole, last = file.read_text().splitlines()
    for cut in range(len(last) + 1):
        file.write_text("".join(f"{line}\n" for line in whole) + last[:cut])
        assert [line["round"] for line in folder.metrics()] == [1, 2], last[:cut]


def test_a_run_with_half_a_line_of_metrics_resumes(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = finished("short").killed_after(3, tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "loss": {"supervised": 1.0}')
    assert resume(path) == finished("short").files


# --- real processes, real signals


def start(path: Path) -> tuple[subprocess.Popen, Gate]:
    """Start a long run that waits before its last round, or it could be over too soon."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SETUPS["long"].items()]
    gate = Gate(path.with_name("gate"), round=29)
    return process("run", *flags, "--out", path, gate=gate), gate


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "after the first line": lambda path: count_rounds(path) >= 1,
    "after 11 lines": lambda path: count_rounds(path) >= 11,
    "when a checkpoint is written": lambda path: bool(files_in(path / "checkpoint")),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(MOMENTS["after the first line"], marks=pytest.mark.slow),
        pytest.param(MOMENTS["after 11 lines"], marks=pytest.mark.slow),
        MOMENTS["when a checkpoint is written"],
    ],
    ids=MOMENTS,
)
def test_a_process_killed_at_any_moment_resumes_to_the_same_folder(
    moment: Callable[[Path], bool], tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = tmp_path / "run"
    running, _ = start(path)
    wait_until(lambda: moment(path), running)
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    assert not (path / "result.json").exists()
    assert resume(path) == finished("long").files


@pytest.mark.parametrize(
    "stop",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupted_process_finishes_its_round_and_says_how_to_continue(
    stop: signal.Signals, tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = tmp_path / "run"
    running, gate = start(path)
    wait_until(lambda: count_rounds(path) >= 4, running)
    running.send_signal(stop)
    gate.open()
    result = answer(running)
    assert result.code == 130
    stopped = f"fedproto stopped after round {count_rounds(path)} of 30"
    assert only_line(result.err) == f"{stopped}; continue with: fedproto resume {path}"
    assert not (path / "result.json").exists()
    assert resume(path) == finished("long").files


def test_a_background_process_stops_on_sigterm(tmp_path: Path) -> None:
    """A shell's background job ignores Ctrl-C, and so do the processes it starts."""
    path = tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        running, gate = start(path)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: count_rounds(path) >= 4, running)
    running.send_signal(signal.SIGTERM)
    gate.open()
    assert answer(running).code == 130
    assert RunFolder(path).checkpoint_round() == count_rounds(path)


def test_sigterm_outside_a_round_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "app", lambda: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        for interrupt in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, interrupt)
            with pytest.raises(KeyboardInterrupt):
                main.main()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


# --- a folder that was damaged by other means


def refused(path: Path) -> str:
    """The one line that resuming is refused with, having changed nothing."""
    before = {
        name: (path / name).read_bytes() for name in files_in(path) if (path / name).is_file()
    }
    result = fedproto("resume", path)
    assert result.code == 2
    assert {
        name: (path / name).read_bytes() for name in files_in(path) if (path / name).is_file()
    } == before
    return only_line(result.err)


@pytest.mark.parametrize("kept", [0, 4, 0.5, 0.99])
def test_a_checkpoint_cut_short_is_refused_and_without_it_the_run_starts_over(
    kept: float, tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = finished("short").killed_after(3, tmp_path / "run")
    checkpoint = newest_checkpoint(path)
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: kept if kept in (0, 4) else int(kept * len(whole))])
    message = refused(path)
    assert str(checkpoint) in message and "corrupted" in message and "delete it" in message
    checkpoint.unlink()  # as the message says
    assert resume(path) == finished("short").files


OTHER_RUNS = {
    "of another method": {"algorithm": "local"},
    "of more clients": {"clients": 4},
    "of other models": {"width": 20},
    "of another seed": {"seed": 1},
    "at another learning rate": {"lr": 0.02},
}


@pytest.mark.parametrize("difference", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(
    difference: dict[str, Any], tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = finished("short").killed_after(3, tmp_path / "run")
    other = killed_run(tmp_path / "other", SETUPS["short"] | difference, round=3)
    shutil.copy(newest_checkpoint(other), newest_checkpoint(path))
    message = refused(path)
    assert str(newest_checkpoint(path)) in message and "another run" in message


def test_a_run_whose_configuration_was_changed_is_refused(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    """Half the rounds at one learning rate and half at another would be no result."""
    path = finished("short").killed_after(3, tmp_path / "run")
    config = path / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.02"))
    assert "config.toml" in refused(path)


def test_a_run_whose_partition_was_changed_is_refused(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = finished("short").killed_after(3, tmp_path / "run")
    partition = json.loads((path / "partition.json").read_text())
    partition["clients"][0]["train"].pop()
    (path / "partition.json").write_text(json.dumps(partition))
    assert "SHA-256" in refused(path)


@pytest.mark.parametrize("missing", ["config.toml", "partition.json"])
def test_a_folder_that_lacks_what_a_run_needs_is_refused(
    missing: str, tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    path = finished("short").killed_after(1, tmp_path / "run")
    (path / missing).unlink()
    assert "is not a run" in refused(path)


def test_a_damaged_line_that_is_not_the_last_is_refused(
    tmp_path: Path, finished: Callable[[str], FinishedRun]
) -> None:
    """It was complete once, so a kill did not damage it."""
    path = finished("short").killed_after(3, tmp_path / "run")
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss"', "loss", 1))
    message = refused(path)
    assert "metrics.jsonl, line 1," in message and "corrupted" in message
