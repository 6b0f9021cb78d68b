"""Runs that are killed, what they leave behind, and resuming them."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import fedproto, files_in
from helpers.patience import PATIENCE_SECONDS

from fedproto.config.settings import configure
from fedproto.core.rounds import RoundResult
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder

#: The files of a run folder by name: bytes, or the parsed JSON of what holds times.
Files = dict[str, Any]


class Killed(BaseException):
    """Stands for SIGKILL inside this process: no `except Exception` may stop it."""


def begin(path: Path, settings: dict[str, Any]) -> tuple[RunFolder, Experiment]:
    """Prepare a run and create its folder."""
    torch.manual_seed(1)
    (config,) = configure(settings)
    experiment = Experiment.prepare(config)
    return experiment.new_folder(path), experiment


def kill_in(round: int, folder: RunFolder, experiment: Experiment) -> None:
    """Execute a run until it dies right after it has written everything of a round."""

    def die(result: RoundResult) -> None:
        if result.round == round:
            raise Killed

    with pytest.raises(Killed):
        experiment.execute(folder, die)


def killed_run(path: Path, settings: dict[str, Any], round: int) -> Path:
    """Return the folder of a run that died right after a round."""
    folder, experiment = begin(path, settings)
    kill_in(round, folder, experiment)
    return path


def run_with_copies(path: Path, settings: dict[str, Any]) -> Path:
    """Run undisturbed, and return the folder with a copy of the run folder after each round.

    The copy `round-3` is what a process killed right after round 3 leaves behind; the finished run
    itself is `path`.
    """
    folder, experiment = begin(path, settings)
    copies = path.with_name(f"{path.name}-copies")

    def copy(result: RoundResult) -> None:
        shutil.copytree(path, copies / f"round-{result.round}")

    experiment.execute(folder, copy)
    return copies


def left_behind(path: Path) -> Files:
    """Return every file by name, without older checkpoints, times and checksums over them."""
    names = [name for name in files_in(path) if (path / name).is_file()]
    checkpoints = sorted(name for name in names if name.startswith("checkpoint/round-"))
    older_checkpoints = checkpoints[:-1]
    files: Files = {}
    for name in names:
        if name not in older_checkpoints:
            files[name] = (path / name).read_bytes()
    files["metrics.jsonl"] = [_without_times(line) for line in files["metrics.jsonl"].splitlines()]
    if "result.json" in files:
        files["result.json"] = _without_times(files["result.json"])
    return files


def _without_times(text: bytes) -> dict[str, Any]:
    """Drop the seconds, and the checksum, which depends on them."""
    content = json.loads(text)
    return {key: value for key, value in content.items() if key not in ("seconds", "checksum")}


def resume(path: Path) -> Files:
    """Resume a run by the command line, and return what it leaves behind."""
    torch.manual_seed(2)  # as another process: nothing may depend on what `begin` had drawn
    result = fedproto("resume", path)
    assert result.code == 0, result.err
    return left_behind(path)


def die_at_step(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Raise Killed at the given step that reaches the disk, counted from 1, and at all later ones.

    The later ones matter: a killed process does not clean up either.
    """
    left = itertools.count(steps - 1, -1)

    def until_death(function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return function(*args, **options)

        return call

    for name in ("fsync", "replace", "unlink"):
        patch.setattr(os, name, until_death(getattr(os, name)))


def copy_before_each_step(patch: pytest.MonkeyPatch, path: Path, copies: Path) -> None:
    """Copy a folder before each step that reaches the disk: what a kill at that step leaves.

    There is no copy before the folder exists, nor where no file has changed since the last one.
    """
    numbers = itertools.count(1)
    copied: list[dict[str, bytes]] = [{}]

    def copy_first(function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            names = [name for name in files_in(path) if (path / name).is_file()]
            content = {name: (path / name).read_bytes() for name in names}
            if content != copied[-1]:
                copied.append(content)
                shutil.copytree(path, copies / str(next(numbers)))
            return function(*args, **options)

        return call

    for name in ("fsync", "replace", "unlink"):
        patch.setattr(os, name, copy_first(getattr(os, name)))


def wait_until(happened: Callable[[], bool], running: subprocess.Popen) -> None:
    """Wait, looking often: a round takes some hundredths of a second."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if happened():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)
    pytest.fail("it never happened")


def count_rounds(path: Path) -> int:
    """Return how many rounds a run has written to its metrics."""
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def newest_checkpoint(path: Path) -> Path:
    """Return the file of a run's newest checkpoint."""
    return max((path / "checkpoint").glob("round-*"))


def as_toml(settings: dict[str, Any]) -> str:
    """Return flat settings as the text of a TOML file."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
