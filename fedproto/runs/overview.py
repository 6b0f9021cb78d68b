"""All runs in a folder: their state, accuracy and size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedproto.config.config_file import read_tables
from fedproto.core.files import is_locked
from fedproto.errors import FedProtoError, RunFolderError
from fedproto.runs.folder import CHECKPOINTS, CONFIG, DIVERGED, PARTITION, RunFolder

#: States of a run.
FINISHED = "finished"
RUNNING = "running"
STOPPED = "stopped"
BROKEN = "diverged"
UNREADABLE = "damaged"


@dataclass(frozen=True)
class RunOverview:
    """What is known of a run without opening its models."""

    name: str  # its path below the folder
    algorithm: str
    state: str
    round: int  # the last completed one
    rounds: int
    #: The mean over clients by the first way to predict; None before the end.
    accuracy: float | None
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Freed(NamedTuple):
    """What was deleted."""

    runs: int
    bytes: int


def list_runs(path: Path) -> list[RunOverview]:
    """Return the runs in a folder and in the folders inside it, by name.

    Raises RunFolderError if there is no such folder. A run that cannot be read is listed, too.
    """
    return [_look_at(folder, path) for folder in _find_folders(path)]


def drop_finished_checkpoints(path: Path) -> Freed:
    """Delete the checkpoints of all finished runs in a folder; models and results stay."""
    freed = Freed(0, 0)
    for folder in _find_folders(path):
        if not folder.has_checkpoint() or folder.result() is None:
            continue
        size = _count_bytes(folder.path / CHECKPOINTS)
        with folder.hold():
            for file in (folder.path / CHECKPOINTS).glob("round-*.safetensors"):
                file.unlink()
        freed = Freed(freed.runs + 1, freed.bytes + size)
    return freed


def _find_folders(path: Path) -> Iterator[RunFolder]:
    if not path.is_dir():
        raise RunFolderError(f"{path} is not a folder with runs")
    for config in sorted(path.rglob(CONFIG)):
        folders = config.parent.relative_to(path).parts
        is_hidden = any(name.startswith(".") for name in folders)
        if not is_hidden and (config.parent / PARTITION).exists():
            yield RunFolder(config.parent)


def _look_at(folder: RunFolder, above: Path) -> RunOverview:
    name = str(folder.path.relative_to(above))
    size = _count_bytes(folder.path)
    try:
        settings = read_tables(folder.path / CONFIG)
        chosen = settings.get("algorithm", "")
        algorithm = chosen.get("name", "") if isinstance(chosen, dict) else str(chosen)
        rounds = int(settings.get("rounds", 0))
        result = folder.result()
        if result is not None:
            accuracy = next(iter(result["accuracy"].values()))["mean"]
            last = int(result.get("stopped_round", rounds))
            return RunOverview(name, algorithm, FINISHED, last, rounds, accuracy, size)
        lines = folder.metrics()
        last = lines[-1]["round"] if lines else 0
        state = _find_state(folder)
        return RunOverview(name, algorithm, state, last, rounds, None, size)
    except (FedProtoError, KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return RunOverview(name, "", UNREADABLE, 0, 0, None, size)


def _find_state(folder: RunFolder) -> str:
    """Return the state of a run without a result; it is running if somebody writes its folder."""
    if (folder.path / DIVERGED).exists():
        return BROKEN
    return RUNNING if is_locked(folder.path) else STOPPED


def _count_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
