"""Run folders as small values: read, checked, and grouped by all settings but the seed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedproto.config.config_file import VERSION as CONFIG_VERSION
from fedproto.config.config_file import flatten_tables, read_tables, require_recorded
from fedproto.config.settings import GOVERNED
from fedproto.core.files import check_version, read_tensors
from fedproto.errors import ConfigError, RunFolderError
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder, configs_below
from fedproto.runs.prototype_files import MEMBERS, PROTOTYPES, PROTOTYPES_FORMAT

#: The ways to predict, as result.json calls them, and as people do.
WAYS = {
    "head": "head",
    "head_own": "head, own classes",
    "prototype": "prototype",
    "prototype_own": "prototype, own classes",
}
T = TypeVar("T")


@dataclass(frozen=True)
class Client:
    id: int
    model: str
    classes: list[str]
    images: (
        list[int] | None
    )  # training images of each of its classes; a run of an older version did not say
    accuracy: dict[str, float]


@dataclass(frozen=True)
class Spread:
    """Mean and population standard deviation over clients."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Round:
    number: int
    loss: dict[str, Spread]
    accuracy: dict[str, Spread]  # empty where the round was not evaluated
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Prototypes:
    shared: np.ndarray  # (C, d)
    known: np.ndarray  # (C,)
    local: np.ndarray  # (clients, C, d), of no clients where the server remembers none
    held: np.ndarray  # (clients, C)


@dataclass(frozen=True)
class Run:
    path: Path
    toml: str
    config: dict[str, Any]  # flat: `algorithm.lam`
    algorithm: str
    dataset: str
    seed: int
    rounds: list[Round]
    classes: list[str]
    partition: str
    clients: list[Client]
    accuracy: dict[str, Spread]
    values_per_round: float
    bytes_up: int
    bytes_down: int
    seconds: float
    diverged: int  # clients whose loss exploded
    prototypes: Prototypes | None
    since: Membership | None = (
        None  # who makes up the prototypes now, where members came or left after training
    )


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed, in the order of their seeds."""

    label: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @cached_property
    def ways(self) -> list[str]:
        return [way for way in WAYS if way in self.first.accuracy]

    def mean(self, value: Callable[[Run], float]) -> float:
        return statistics.fmean(map(value, self.runs))

    def accuracy(self, way: str) -> Spread:
        """The mean over seeds of the mean over clients, and of the deviation over clients."""
        return mean_of([run.accuracy[way] for run in self.runs])

    def over_seeds(self, way: str) -> float | None:
        """How far the seeds' means lie apart, as a sample standard deviation."""
        means = [run.accuracy[way].mean for run in self.runs]
        return statistics.stdev(means) if len(means) > 1 else None


def mean_of(spreads: Sequence[Spread]) -> Spread:
    stds = [spread.std for spread in spreads if spread.std is not None]
    mean = statistics.fmean(spread.mean for spread in spreads)
    return Spread(mean, statistics.fmean(stds) if len(stds) == len(spreads) else None)


# --- finding and reading


def read_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """All runs of some folders, each once, and a sentence for each that was left out since it is not finished."""
    folders = list(dict.fromkeys(folder for path in paths for folder in _folders(path)))
    seen = {folder.resolve(): folder for folder in reversed(folders)}
    unfinished = [folder for folder in seen.values() if not (folder / "result.json").exists()]
    for folder in unfinished:
        if folder in paths or len(unfinished) == len(seen):
            raise RunFolderError(
                f"{_not_finished(folder)}: finish it with `fedproto resume {folder}`"
            )
    runs = [
        read_run(folder)
        for folder in folders
        if seen[folder.resolve()] == folder and folder not in unfinished
    ]
    return runs, [
        f"{_not_finished(folder)}, so it is left out: `fedproto resume {folder}`"
        for folder in unfinished
    ]


def _not_finished(folder: Path) -> str:
    return f"{folder} has not finished its rounds"


def _folders(path: Path) -> list[Path]:
    """The folder itself where it is a run, else the runs in it, in the order they were made."""
    if not path.is_dir():
        raise RunFolderError(
            f"{path} is {'no folder' if path.exists() else 'not there'}: name a run folder"
        )
    configs = configs_below(path)
    if (path / "config.toml").exists() or not configs:
        return [RunFolder.open(path).path]
    return [RunFolder.open(config.parent).path for config in configs]


def read_run(path: Path) -> Run:
    folder = RunFolder.open(path)
    settings, toml = _config(path / "config.toml")
    result, lines = folder.result() or {}, folder.metrics()
    rounds = _damage(path / "metrics.jsonl", lambda: [_round(line) for line in lines])
    run = _damage(path / "result.json", lambda: _run(path, toml, settings, result, rounds))
    _refuse_contradiction(run, result.get("rounds"))
    return run


def _refuse_contradiction(run: Run, rounds: Any) -> None:
    """The curves must end where the table says."""
    path, numbers = run.path / "metrics.jsonl", [each.number for each in run.rounds]
    if not numbers or len(numbers) != rounds or numbers != list(range(1, len(numbers) + 1)):
        raise RunFolderError(f"{path} is damaged: it has not a line for each of the run's rounds")
    scored = [set(each.accuracy) for each in run.rounds if each.accuracy or each is run.rounds[-1]]
    if any(ways != set(run.accuracy) for ways in scored):
        raise RunFolderError(f"{path} is damaged: its accuracies are not those of result.json")


def _damage(path: Path, read: Callable[[], T]) -> T:
    """What `read` gives, or one sentence saying that the file is not what a run writes."""
    try:
        return read()
    except KeyError as error:
        raise RunFolderError(f"{path} is damaged: it lacks {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def _config(path: Path) -> tuple[dict[str, Any], str]:
    try:
        tables = read_tables(path)
        check_version(tables, CONFIG_VERSION, str(path))
        settings = flatten_tables(tables, str(path))
        require_recorded(settings, path)
        return settings, path.read_text(encoding="utf-8")
    except ConfigError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def _run(
    path: Path, toml: str, config: dict[str, Any], result: dict[str, Any], rounds: list[Round]
) -> Run:
    sent, classes = result["communication"], [str(name) for name in result["classes"]]
    clients = [_client(client, classes) for client in result["clients"]]
    accuracy = _spreads(result["accuracy"])
    if (
        not clients
        or "head" not in accuracy
        or any(set(client.accuracy) != set(accuracy) for client in clients)
    ):
        raise ValueError("its clients are not all scored by the same ways to predict")
    return Run(
        path=path,
        toml=toml,
        config=config,
        algorithm=str(result["algorithm"]),
        dataset=str(result["dataset"]),
        seed=int(result["seed"]),
        rounds=rounds,
        classes=classes,
        partition=str(result["partition"]),
        clients=clients,
        accuracy=accuracy,
        values_per_round=float(sent["values_per_round"]),
        bytes_up=int(sent["bytes_up"]),
        bytes_down=int(sent["bytes_down"]),
        seconds=float(result["seconds"]["total"]),
        diverged=len(result.get("diverged") or []),
        prototypes=_prototypes(path / PROTOTYPES, len(clients), len(classes)),
        since=Membership.of(RunFolder(path)) if (path / MEMBERS).exists() else None,
    )


def _client(stored: dict[str, Any], classes: list[str]) -> Client:
    own, images = [str(name) for name in stored["classes"]], stored.get("images")
    if not set(own) <= set(classes) or (images is not None and len(images) != len(own)):
        raise ValueError(f"client {stored['id']} has other classes than the run")
    counts = None if images is None else [int(count) for count in images]
    accuracy = {str(way): float(value) for way, value in stored["accuracy"].items()}
    return Client(int(stored["id"]), str(stored["model"]), own, counts, accuracy)


def _round(line: dict[str, Any]) -> Round:
    deviations = line.get("loss_std", {})  # an older version did not say
    loss = {
        str(term): Spread(float(mean), float(deviations[term]) if term in deviations else None)
        for term, mean in line["loss"].items()
    }
    accuracy = _spreads(line["accuracy"] or {})
    return Round(int(line["round"]), loss, accuracy, int(line["bytes_up"]), int(line["bytes_down"]))


def _spreads(stored: dict[str, Any]) -> dict[str, Spread]:
    return {
        str(way): Spread(float(value["mean"]), float(value["std"])) for way, value in stored.items()
    }


def _prototypes(path: Path, clients: int, classes: int) -> Prototypes | None:
    if not path.exists():
        return None
    tensors, _ = read_tensors(path, PROTOTYPES_FORMAT)
    stored = {
        name: value.double().numpy() for name, value in tensors.items()
    }  # numpy knows no bfloat16
    try:
        found = Prototypes(
            stored["prototypes"],
            stored["known"],
            stored.get("local", np.zeros((0, *stored["prototypes"].shape))),
            stored.get("held", np.zeros((0, classes))),
        )
    except KeyError as error:
        raise RunFolderError(f"{path} is damaged: it lacks {error}") from error
    if not _fits(found, clients, classes):
        raise RunFolderError(
            f"{path} is damaged: it does not fit the clients and classes of result.json"
        )
    return found


def _fits(found: Prototypes, clients: int, classes: int) -> bool:
    remembered = found.held.shape[:1]
    return (
        found.shared.ndim == 2
        and found.known.shape == found.shared.shape[:1] == (classes,)
        and remembered in ((0,), (clients,))
        and found.held.shape == (*remembered, classes)
        and found.local.shape == (*remembered, *found.shared.shape)
        and bool(np.isfinite(found.shared).all() and np.isfinite(found.local).all())
    )


# --- grouping

#: In what runs of a group may differ; the stack is what happened to fit into a GPU's memory.
UNSEEN = ("seed", "stack")


def group(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ in nothing but the seed together; a second one of the same seed is a group of its own."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        settings = json.dumps(
            {key: run.config[key] for key in run.config if key not in UNSEEN}, sort_keys=True
        )
        number = 0
        while any(other.seed == run.seed for other in groups.get((settings, number), [])):
            number += 1
        groups.setdefault((settings, number), []).append(run)
    ordered = [sorted(each, key=lambda run: run.seed) for each in groups.values()]
    return [
        Group(label, each)
        for label, each in zip(_labels([each[0] for each in ordered]), ordered, strict=True)
    ]


def _labels(runs: Sequence[Run]) -> list[str]:
    """The method; where that is not enough, also what sets a run apart from others of its method, or its folder."""
    labels = []
    for run in runs:
        rivals = [other for other in runs if other.algorithm == run.algorithm]
        labels.append(", ".join([run.algorithm, *_differences(run, rivals)]))
    return [
        label if labels.count(label) == 1 else f"{label}, {run.path}"
        for label, run in zip(labels, runs, strict=True)
    ]


def _differences(run: Run, rivals: Sequence[Run]) -> list[str]:
    shown = [key for key in run.config if key not in UNSEEN]
    varied = [
        key for key in shown if any(run.config[key] != rival.config.get(key) for rival in rivals)
    ]
    if "profile" in varied:  # it says what else it sets
        varied = [key for key in varied if key not in GOVERNED]
    return [f"{key.rpartition('.')[2]}={run.config[key]}" for key in varied]


def same_task(groups: Sequence[Group]) -> bool:
    """Whether accuracies can be compared: one data set, shared out among as many clients in the same way."""
    partitions = {tuple(run.partition for run in each.runs) for each in groups}
    return len(partitions) == 1 or len({_task(each.first) for each in groups}) == 1


def _task(run: Run) -> str:
    kinds = ("dataset", "partition", "clients")
    return json.dumps(
        {key: value for key, value in run.config.items() if key.partition(".")[0] in kinds},
        sort_keys=True,
    )
