"""Finished run folders as small values: read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedproto.config.config_file import VERSION as CONFIG_VERSION
from fedproto.config.config_file import flatten_tables, read_tables, require_recorded
from fedproto.core.best_round import METRICS_TO_SELECT_BY
from fedproto.core.closed_form import TEACHER
from fedproto.core.files import check_version, read_tensors
from fedproto.deploy.server_state import STATE_FILE
from fedproto.errors import ConfigError, RunFolderError
from fedproto.membership.gain import Gain
from fedproto.membership.membership import Membership
from fedproto.plots.labels import hide_folders
from fedproto.report.privacy import Claim, read_claim
from fedproto.report.read_metrics import RunMetrics, read_metrics
from fedproto.runs.folder import CONFIG, JOIN, RESULT, RunFolder, configs_below
from fedproto.runs.metric_contents import explain_majority, list_failures
from fedproto.runs.prototype_files import MEMBERS, PROTOTYPES, PROTOTYPES_FORMAT
from fedproto.theory.files import read_theory


@dataclass(frozen=True)
class Client:
    """A client as result.json describes it."""

    id: int
    name: str  # its number, where it has no name of its own
    model: str
    classes: list[str]
    #: Training images of each of its classes; None if an older version did not record them.
    images: list[int] | None
    accuracy: dict[str, float]


@dataclass(frozen=True)
class Spread:
    """Mean and population standard deviation over clients.

    The deviation is None where an older version did not record it.
    """

    mean: float
    std: float | None


@dataclass(frozen=True)
class Round:
    """A line of metrics.jsonl.

    The terms of the loss are means over the clients that trained in the round, the accuracies
    over all clients.
    """

    number: int
    loss: dict[str, Spread]
    accuracy: dict[str, Spread]  # empty if the round was not evaluated
    bytes_up: int
    bytes_down: int
    is_validation: bool = False  # whether the accuracies are those on validation rows


@dataclass(frozen=True)
class Validation:
    """What the validation rows say: the best round, and its score."""

    best_round: int
    select_by: str  # the name of the accuracy
    score: float  # the mean over clients


@dataclass(frozen=True)
class Prototypes:
    """The global prototypes, and the last local ones of the clients if the server kept them."""

    shared: np.ndarray  # (C, d)
    known: np.ndarray  # (C,) positive where a class has a global prototype
    local: np.ndarray  # (clients, C, d), of 0 clients if the server kept none
    held: np.ndarray  # (clients, C) positive where a client has a local prototype


class Asynchrony(NamedTuple):
    """What asynchronous rounds took."""

    clock: float  # simulated time; 1 is the median client's local training
    staleness: float  # the mean number of rounds since the arrived uploads had started


@dataclass(frozen=True)
class Run:
    """A finished run: what its folder holds, as far as a report shows it.

    Traffic is that of all clients together, in all rounds unless its name says otherwise.
    """

    path: Path
    toml: str  # the text of config.toml
    config: dict[str, Any]  # the same with flat keys: `algorithm.lam`
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
    diverged: int  # number of clients whose loss exploded
    metrics: RunMetrics | None  # None if an older version wrote the run
    #: A warning for a run that is no better than the majority class, and for metrics that failed.
    warnings: list[str]
    prototypes: Prototypes | None
    membership: Membership | None  # None if nobody joined or left after training
    validation: Validation | None = None  # None if no validation rows chose the best round
    gain: Gain | None = None  # of a newcomer, against training alone
    asynchrony: Asynchrony | None = None  # None if rounds were synchronous
    theory: dict[str, Any] | None = None  # theory.json; None if nobody measured it
    claim: Claim | None = None  # None if the run was not private


# --- finding runs


class Sources(NamedTuple):
    """What a report is about, each once."""

    finished: list[Path]  # run folders
    unfinished: list[Path]  # run folders
    servers: list[Path]  # state files of deployed servers


def find_sources(paths: Sequence[Path]) -> Sources:
    """Return the runs and the deployed servers in some folders."""
    folders: dict[Path, Path] = {}  # by their resolved paths
    servers: dict[Path, Path] = {}
    for path in paths:
        server = _find_server(path)
        if server is not None:
            servers.setdefault(server.resolve(), server)
            continue
        for folder in _find_folders(path):
            folders.setdefault(folder.resolve(), folder)
    finished = [folder for folder in folders.values() if (folder / RESULT).exists()]
    unfinished = [folder for folder in folders.values() if folder not in finished]
    return Sources(finished, unfinished, list(servers.values()))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the finished runs in some folders, each once."""
    return [read_run(folder) for folder in find_sources(paths).finished]


def describe_unfinished(folder: str) -> str:
    """Return what a report says of a run that goes on, or was stopped."""
    return (
        f"{folder} has not finished its rounds: the page shows how far it is, and the files of "
        f"figures leave it out; `fedproto resume {folder}` finishes it"
    )


def _find_folders(path: Path) -> list[Path]:
    """Return the folder itself if it is a run, else the runs in it, in the order of creation."""
    if not path.exists():
        raise RunFolderError(f"{path} does not exist: name a run folder")
    if not path.is_dir():
        raise RunFolderError(f"{path} is not a folder: name a run folder")
    configs = configs_below(path)
    if (path / CONFIG).exists() or not configs:
        return [RunFolder.open(path).path]
    return [RunFolder.open(config.parent).path for config in configs]


def _find_server(path: Path) -> Path | None:
    """Return the state file of a deployed server, or None if the path is not its folder."""
    for candidate in (path / STATE_FILE, path / "server" / STATE_FILE):
        if candidate.is_file():
            return candidate
    return None


# --- reading a run


def read_run(path: Path) -> Run:
    """Read a run folder; a RunFolderError names the file that is damaged."""
    folder = RunFolder.open(path)
    config, toml = _read_config(path / "config.toml")
    result = folder.result() or {}
    lines = folder.metrics()
    with _damage_named(path / "metrics.jsonl"):
        rounds = [_to_round(line) for line in lines]
    with _damage_named(path / "result.json"):
        run = _to_run(path, toml, config, result, rounds)
    _refuse_contradiction(run, result.get("rounds"))
    return replace(run, gain=_read_gain(folder))


def _read_gain(folder: RunFolder) -> Gain | None:
    """Return what joining gained a newcomer, or None if the run is not a newcomer's."""
    path = folder.path / JOIN
    if not path.exists():
        return None
    content = folder.read_json(JOIN)
    with _damage_named(path):
        stated = content["gain"]
        return Gain(
            difference=float(stated["difference"]),
            low=float(stated["low"]),
            high=float(stated["high"]),
            rows=int(stated["rows"]),
        )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn errors of reading a file's content into one sentence that names the file."""
    try:
        yield
    except KeyError as error:
        raise RunFolderError(f"{path} is damaged: it lacks {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    """Return the flat settings of a config.toml, and its text."""
    try:
        tables = read_tables(path)
        check_version(tables, CONFIG_VERSION, str(path))
        settings = flatten_tables(tables, str(path))
        require_recorded(settings, path)
        return settings, path.read_text(encoding="utf-8")
    except ConfigError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def _to_run(
    path: Path, toml: str, config: dict[str, Any], result: dict[str, Any], rounds: list[Round]
) -> Run:
    """Return the run of a result.json; raise a KeyError or a ValueError if it is damaged."""
    traffic = result["communication"]
    classes = [str(name) for name in result["classes"]]
    clients = [_to_client(client, classes) for client in result["clients"]]
    accuracy = _to_spreads(result["accuracy"])
    _check_accuracies(clients, accuracy)
    has_membership = (path / MEMBERS).exists()
    return Run(
        path=path,
        toml=toml,
        config=config,
        algorithm=str(result["algorithm"]),
        dataset=hide_folders(str(result["dataset"])),
        seed=int(result["seed"]),
        rounds=rounds,
        classes=classes,
        partition=str(result["partition"]),
        clients=clients,
        accuracy=accuracy,
        values_per_round=float(traffic["values_per_round"]),
        bytes_up=int(traffic["bytes_up"]),
        bytes_down=int(traffic["bytes_down"]),
        seconds=float(result["seconds"]["total"]),
        diverged=len(result.get("diverged") or []),
        metrics=read_metrics(result, classes),
        warnings=_list_warnings(result),
        prototypes=_read_prototypes(path / PROTOTYPES, len(clients), len(classes)),
        membership=Membership.of(RunFolder(path)) if has_membership else None,
        validation=_to_validation(result),
        asynchrony=_to_asynchrony(result),
        theory=read_theory(path),
        claim=read_claim(result),
    )


def _to_asynchrony(result: dict[str, Any]) -> Asynchrony | None:
    """Return what a result says of its asynchronous rounds, if it had such."""
    if "asynchronous" not in result:
        return None
    found = result["asynchronous"]
    return Asynchrony(float(found["clock"]), float(found["staleness"]))


def _list_warnings(result: dict[str, Any]) -> list[str]:
    """Return what a reader should know before believing the metrics of a result."""
    sentence = explain_majority(result)
    majority = [] if sentence is None else [sentence]
    return [*majority, *list_failures(result)]


def _to_validation(result: dict[str, Any]) -> Validation | None:
    """Return what a result.json says of validation, if anything."""
    stored = result.get("validation")
    if stored is None:
        return None
    return Validation(int(result["best_round"]), str(stored["select_by"]), float(stored["score"]))


def _to_client(stored: dict[str, Any], classes: list[str]) -> Client:
    """Return a client of result.json; `classes` are those of the run."""
    own_classes = [str(name) for name in stored["classes"]]
    images = stored.get("images")
    is_known = set(own_classes) <= set(classes)
    is_counted = images is None or len(images) == len(own_classes)
    if not is_known or not is_counted:
        raise ValueError(f"client {stored['id']} has other classes than the run")
    if images is not None:
        images = [int(count) for count in images]
    accuracy = {}
    for name, value in stored["accuracy"].items():
        accuracy[str(name)] = float(value)
    return Client(
        id=int(stored["id"]),
        name=str(stored.get("name", stored["id"])),
        model=str(stored["model"]),
        classes=own_classes,
        images=images,
        accuracy=accuracy,
    )


def _check_accuracies(clients: Sequence[Client], accuracy: dict[str, Spread]) -> None:
    """Raise unless the clients have the accuracies of the run, one by the head or the teacher."""
    names = set(accuracy)
    is_same = all(set(client.accuracy) == names for client in clients)
    if not clients or names.isdisjoint(("head", TEACHER)) or not is_same:
        raise ValueError(
            "its clients do not all have the same accuracies, or have none by the head or a teacher"
        )


def _to_round(line: dict[str, Any]) -> Round:
    """Return the round of a line of metrics.jsonl."""
    deviations = line.get("loss_std", {})  # older versions did not record them
    loss = {}
    for term, mean in line["loss"].items():
        std = float(deviations[term]) if term in deviations else None
        loss[str(term)] = Spread(float(mean), std)
    validation = line.get("validation")
    return Round(
        number=int(line["round"]),
        loss=loss,
        accuracy=_to_spreads(line["accuracy"] or validation or {}),
        is_validation=bool(validation),
        bytes_up=int(line["bytes_up"]),
        bytes_down=int(line["bytes_down"]),
    )


def _to_spreads(stored: dict[str, Any]) -> dict[str, Spread]:
    """Return means and deviations by name."""
    spreads = {}
    for name, value in stored.items():
        mean = float(value["mean"])
        std = float(value["std"])
        spreads[str(name)] = Spread(mean, std)
    return spreads


def _refuse_contradiction(run: Run, round_count: Any) -> None:
    """Raise if metrics.jsonl does not hold the rounds and accuracies of result.json."""
    path = run.path / "metrics.jsonl"
    numbers = [round.number for round in run.rounds]
    expected = list(range(1, len(numbers) + 1))
    if not numbers or len(numbers) != round_count or numbers != expected:
        raise RunFolderError(
            f"{path} is damaged: it does not have a line for each of the run's rounds"
        )
    last = run.rounds[-1]
    for round in run.rounds:
        is_evaluated = bool(round.accuracy) or round is last
        names = set(round.accuracy)
        if round.is_validation:
            names -= set(METRICS_TO_SELECT_BY)
        if is_evaluated and names != set(run.accuracy):
            raise RunFolderError(f"{path} is damaged: its accuracies are not those of result.json")


# --- prototypes


def _read_prototypes(path: Path, clients: int, classes: int) -> Prototypes | None:
    """Read the prototypes of a run; None if it has none.

    Nothing else in a report depends on what was trained.
    """
    if not path.exists():
        return None
    tensors, _ = read_tensors(path, PROTOTYPES_FORMAT)
    # Numpy has no bfloat16.
    stored = {name: value.double().numpy() for name, value in tensors.items()}
    try:
        shared = stored["prototypes"]
        known = stored["known"]
    except KeyError as error:
        raise RunFolderError(f"{path} is damaged: it lacks {error}") from error
    local = stored.get("local", np.zeros((0, *shared.shape)))
    held = stored.get("held", np.zeros((0, classes)))
    prototypes = Prototypes(shared, known, local, held)
    if not _fits(prototypes, clients, classes):
        raise RunFolderError(
            f"{path} is damaged: it does not fit the clients and classes of result.json"
        )
    return prototypes


def _fits(prototypes: Prototypes, clients: int, classes: int) -> bool:
    """Whether all shapes fit each other and the run, and all values are finite."""
    shared = prototypes.shared
    if shared.ndim != 2 or len(shared) != classes or prototypes.known.shape != (classes,):
        return False
    kept_clients = len(prototypes.held) if prototypes.held.ndim else -1
    if kept_clients not in (0, clients):
        return False
    if prototypes.held.shape != (kept_clients, classes):
        return False
    if prototypes.local.shape != (kept_clients, *shared.shape):
        return False
    is_shared_finite = np.isfinite(shared).all()
    is_local_finite = np.isfinite(prototypes.local).all()
    return bool(is_shared_finite and is_local_finite)
