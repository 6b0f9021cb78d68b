"""The run folder under violence: a run killed at any moment resumes to the bit-identical result."""

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import answer, fedproto, files_in, only_line, process

from fedproto.cli import main
from fedproto.config.settings import configure
from fedproto.core.files import write_atomically
from fedproto.core.rounds import RoundResult
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder

Files = dict[str, Any]

DIGITS = {
    "dataset": "digits",
    "clients": 6,
    "shots": 5,
    "rounds": 9,
    "checkpoint_every": 3,
    "eval_every": 4,
}
SETUPS: dict[str, dict[str, Any]] = {
    # Who was absent, and what each said last, is part of the state.
    "fedproto": DIGITS | {"participation": 0.5, "lost_uploads": 0.3, "stragglers": 0.3},
    "fesem": DIGITS | {"algorithm": "fesem"},
    "fedavg": DIGITS | {"algorithm": "fedavg", "participation": 0.5},
    # Heads that live on at the client, and dropout inside the model, whose draws must repeat.
    "fedrep": DIGITS
    | {
        "algorithm": "fedrep",
        "dataset": "mnist5k",
        "clients": 2,
        "rounds": 5,
        "checkpoint_every": 2,
    },
    # Most have not trained when the first checkpoint is written, so that their models are one and the same tensors.
    "rarely present": DIGITS
    | {"algorithm": "fedavg", "participation": 0.2, "checkpoint_every": 1, "rounds": 4},
    "never heard": DIGITS
    | {"algorithm": "fedavg", "lost_uploads": 1, "checkpoint_every": 1, "rounds": 2},
    "mixed": DIGITS
    | {"algorithm": "fedproto-mh", "dataset": "digits*4,mnist5k*2", "dim": 20, "rounds": 4},
    # Long enough to be hit by a signal, and small enough to be killed at every step it takes.
    "long": DIGITS | {"participation": 0.5, "lost_uploads": 0.3, "stragglers": 0.3, "rounds": 30},
    "short": DIGITS | {"rounds": 4, "checkpoint_every": 2, "clients": 3},
}


class Killed(BaseException):
    """Stands for SIGKILL inside this process: no `except Exception` may stop it."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """What a run that nobody disturbs leaves behind; each setup is run once."""

    @functools.cache
    def files(name: str) -> Files:
        folder, experiment = begin(tmp_path_factory.mktemp("undisturbed") / "run", SETUPS[name])
        experiment.execute(folder)
        return left_behind(folder.path)

    return files


def begin(path: Path, settings: dict[str, Any]) -> tuple[RunFolder, Experiment]:
    torch.manual_seed(1)
    (config,) = configure(settings)
    experiment = Experiment.prepare(config)
    return experiment.new_folder(path), experiment


def killed_run(path: Path, settings: dict[str, Any], round: int) -> Path:
    """A run that died right after it had written everything of a round."""
    folder, experiment = begin(path, settings)
    kill_in(round, folder, experiment)
    return path


def kill_in(round: int, folder: RunFolder, experiment: Experiment) -> None:
    def die(result: RoundResult) -> None:
        if result.round == round:
            raise Killed

    with pytest.raises(Killed):
        experiment.execute(folder, die)


def left_behind(path: Path) -> Files:
    """Every file by name, in full; without the seconds, which two equal runs do not share, and older checkpoints."""
    names = [name for name in files_in(path) if (path / name).is_file()]
    old = sorted(name for name in names if name.startswith("checkpoint/round-"))[:-1]
    files: Files = {name: (path / name).read_bytes() for name in names if name not in old}
    files["metrics.jsonl"] = [_timeless(line) for line in files["metrics.jsonl"].splitlines()]
    return files | (
        {"result.json": _timeless(files["result.json"])} if "result.json" in files else {}
    )


def _timeless(text: bytes) -> dict[str, Any]:
    """Without the seconds, and the checksum, which depends on them."""
    return {
        key: value for key, value in json.loads(text).items() if key not in ("seconds", "checksum")
    }


def resume(path: Path) -> Files:
    torch.manual_seed(
        2
    )  # another process than in `begin`: nothing may hang on what that one had drawn
    result = fedproto("resume", path)
    assert result.code == 0, result.err
    return left_behind(path)


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
    + [("mixed", 3)],
)
def test_a_run_killed_after_any_round_resumes_to_the_same_folder(
    name: str, round: int, tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    """In rounds 3, 6 and 9 a checkpoint was just written, in the others it is older than the metrics."""
    path = killed_run(tmp_path / "run", SETUPS[name], round)
    assert not (path / "result.json").exists()
    assert resume(path) == undisturbed(name)


def test_a_run_killed_between_its_last_checkpoint_and_its_result_writes_the_result(
    tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    path = killed_run(tmp_path / "run", SETUPS["fedproto"], round=9)
    assert (path / "checkpoint/round-00000009.safetensors").exists()
    assert resume(path)["result.json"] == undisturbed("fedproto")["result.json"]


def test_a_run_may_be_killed_again_and_again(
    tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    path = killed_run(tmp_path / "run", SETUPS["fedproto"], round=1)
    for round in (2, 4, 5, 8):
        experiment, folder = reopen(RunFolder(path))
        kill_in(round, folder, experiment)
    assert resume(path) == undisturbed("fedproto")


def test_without_checkpoints_a_run_resumes_from_the_start(
    tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    path = killed_run(tmp_path / "run", SETUPS["fedproto"] | {"checkpoint_every": 0}, round=7)
    assert files_in(path / "checkpoint") == []
    files, expected = resume(path), undisturbed("fedproto")
    for name in ("result.json", "metrics.jsonl", "prototypes.safetensors"):
        assert files[name] == expected[name]
    assert files_in(path / "checkpoint") == []


def test_a_run_resumes_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Callable[[str], Files]
) -> None:
    killed_run(tmp_path / "run", SETUPS["fedavg"], round=4)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert resume(Path(".")) == undisturbed("fedavg")


# --- killed while it writes


def mortal(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Die at the given step that reaches the disk, counted from 1; the dead clean nothing up either."""
    left = itertools.count(steps - 1, -1)

    def until_death(function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return function(*args, **options)

        return call

    for name in ("fsync", "replace", "unlink"):
        patch.setattr(os, name, until_death(getattr(os, name)))


def test_a_run_killed_at_any_step_of_its_writing_resumes_to_the_same_folder(
    tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    for step in itertools.count(1):
        folder, experiment = begin(tmp_path / f"killed at step {step}", SETUPS["short"])
        with pytest.MonkeyPatch.context() as patch:
            mortal(patch, step)
            try:
                experiment.execute(folder)
                break  # it has fewer steps than this
            except Killed:
                pass
        assert resume(folder.path) == undisturbed("short"), folder.path
    assert (
        step > 10
    )  # two checkpoints of three steps or more, the metrics, the prototypes, the result


def test_a_folder_is_there_completely_or_not_at_all(tmp_path: Path) -> None:
    for step in itertools.count(1):
        path = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as patch:
            mortal(patch, step)
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
        mortal(patch, 1)
        with pytest.raises(Killed):
            write_atomically(tmp_path / place / "result.json", b"first")
    assert files_in(tmp_path) != ["checkpoint"]
    with RunFolder(tmp_path).hold():
        pass
    assert files_in(tmp_path) == ["checkpoint"]


def test_half_a_line_of_metrics_is_forgotten_wherever_it_was_cut(tmp_path: Path) -> None:
    """Some cuts end in a bracket, as whole lines do."""
    folder = RunFolder(killed_run(tmp_path / "run", SETUPS["short"], round=3))
    file = tmp_path / "run/metrics.jsonl"
    *whole, last = file.read_text().splitlines()
    for cut in range(len(last) + 1):
        file.write_text("".join(f"{line}\n" for line in whole) + last[:cut])
        assert [line["round"] for line in folder.metrics()] == [1, 2], last[:cut]


def test_a_run_with_half_a_line_of_metrics_resumes(
    tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    path = killed_run(tmp_path / "run", SETUPS["short"], round=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "loss": {"supervised": 1.0}')
    assert resume(path) == undisturbed("short")


# --- real processes, real signals


def start(path: Path) -> subprocess.Popen:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SETUPS["long"].items()]
    return process("run", *flags, "--out", path)


def wait_until(happened: Callable[[], bool], running: subprocess.Popen) -> None:
    """Look often: a round takes some hundredths of a second."""
    for _ in range(60_000):
        if happened():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.001)
    pytest.fail("it never happened")


def lines(path: Path) -> int:
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "after the first line": lambda path: lines(path) >= 1,
    "after 4 lines": lambda path: lines(path) >= 4,
    "after 11 lines": lambda path: lines(path) >= 11,
    "when a checkpoint is written": lambda path: bool(files_in(path / "checkpoint")),
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_process_killed_at_any_moment_resumes_to_the_same_folder(
    moment: Callable[[Path], bool], tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    path = tmp_path / "run"
    running = start(path)
    wait_until(lambda: moment(path), running)
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    assert not (path / "result.json").exists()
    assert resume(path) == undisturbed("long")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "told to end"])
def test_an_interrupted_process_finishes_its_round_and_says_how_to_go_on(
    stop: signal.Signals, tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    path = tmp_path / "run"
    running = start(path)
    wait_until(lambda: lines(path) >= 4, running)
    running.send_signal(stop)
    result = answer(running)
    assert result.code == 130
    assert (
        only_line(result.err)
        == f"fedproto stopped after round {lines(path)} of 30; continue with: fedproto resume {path}"
    )
    assert not (path / "result.json").exists()
    assert resume(path) == undisturbed("long")


def test_who_cannot_be_interrupted_can_be_told_to_end(tmp_path: Path) -> None:
    """As what a script leaves in the background: Ctrl-C is ignored there, and passed on so."""
    path = tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        running = start(path)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: lines(path) >= 4, running)
    running.send_signal(signal.SIGTERM)
    assert answer(running).code == 130
    assert RunFolder(path).checkpoint_round() == lines(path)


def test_who_is_not_in_a_round_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def newest_checkpoint(path: Path) -> Path:
    return max((path / "checkpoint").glob("round-*"))


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
    kept: float, tmp_path: Path, undisturbed: Callable[[str], Files]
) -> None:
    path = killed_run(tmp_path / "run", SETUPS["short"], round=3)
    checkpoint = newest_checkpoint(path)
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: kept if kept in (0, 4) else int(kept * len(whole))])
    message = refused(path)
    assert str(checkpoint) in message and "corrupted" in message and "delete it" in message
    checkpoint.unlink()  # as the message says
    assert resume(path) == undisturbed("short")


OTHER_RUNS = {
    "of another method": {"algorithm": "local"},
    "of more clients": {"clients": 4},
    "of other models": {"width": 20},
    "of another seed": {"seed": 1},
    "at another learning rate": {"lr": 0.02},
}


@pytest.mark.parametrize("difference", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(difference: dict[str, Any], tmp_path: Path) -> None:
    path = killed_run(tmp_path / "run", SETUPS["short"], round=3)
    other = killed_run(tmp_path / "other", SETUPS["short"] | difference, round=3)
    shutil.copy(newest_checkpoint(other), newest_checkpoint(path))
    message = refused(path)
    assert str(newest_checkpoint(path)) in message and "another run" in message


def test_a_run_whose_configuration_was_changed_is_refused(tmp_path: Path) -> None:
    """Half the rounds at one learning rate and half at another would be nobody's result."""
    path = killed_run(tmp_path / "run", SETUPS["short"], round=3)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.02"))
    assert "config.toml" in refused(path)


def test_a_run_whose_partition_was_changed_is_refused(tmp_path: Path) -> None:
    path = killed_run(tmp_path / "run", SETUPS["short"], round=3)
    partition = json.loads((path / "partition.json").read_text())
    partition["clients"][0]["train"].pop()
    (path / "partition.json").write_text(json.dumps(partition))
    assert "SHA-256" in refused(path)


@pytest.mark.parametrize("missing", ["config.toml", "partition.json"])
def test_a_folder_that_lacks_what_a_run_needs_is_refused(missing: str, tmp_path: Path) -> None:
    path = killed_run(tmp_path / "run", SETUPS["short"], round=1)
    (path / missing).unlink()
    assert "is not a run" in refused(path)


def test_a_damaged_line_that_is_not_the_last_is_refused(tmp_path: Path) -> None:
    """It was whole once: something else than a kill has been at it."""
    path = killed_run(tmp_path / "run", SETUPS["short"], round=3)
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss"', "loss", 1))
    message = refused(path)
    assert "metrics.jsonl, line 1," in message and "corrupted" in message
