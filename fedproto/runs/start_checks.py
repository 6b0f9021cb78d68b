"""Checks that a run folder is continued with the data and the weights that its run began with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedproto.core.federation import Federation
from fedproto.core.files import hash_tensors
from fedproto.core.types import Tree
from fedproto.errors import ConfigError, RunFolderError
from fedproto.partitions.file import read_partition
from fedproto.runs.folder import RunFolder
from fedproto.runs.from_settings import FROM_PYTHON


def list_input_shapes(federation: Federation) -> list[list[int]]:
    """Return the shape of one input of each client."""
    return [list(member.input_shape) for member in federation.members]


def hash_states(states: Sequence[Tree]) -> str:
    """Return one hash of all clients' states; clients of one architecture may share theirs."""
    different_states = {id(state): state for state in states}
    hashes = {key: hash_tensors(state) for key, state in different_states.items()}
    listed = "\n".join(hashes[id(state)] for state in states)
    return hashlib.sha256(listed.encode()).hexdigest()


def hash_inputs(federation: Federation) -> str:
    """Return one hash of the inputs of all clients, which share pools of them."""
    digest = hashlib.sha256()
    hashed: set[int] = set()
    for member in federation.members:
        for examples in (member.train, member.test, member.validation):
            if examples is not None and id(examples.x) not in hashed:
                hashed.add(id(examples.x))
                digest.update(hash_tensors({"x": examples.x}).encode())
    return digest.hexdigest()


def refuse_other_origins(path: Path, settings: Mapping[str, Any], data: Any, modules: Any) -> None:
    """Refuse to continue a run without the arrays or modules it was started with from Python.

    Those of a run that was started with names are refused, too. `settings` are the run's.
    """
    for setting, given in (("dataset", data), ("model", modules)):
        is_from_python = settings.get(setting) == FROM_PYTHON.name
        what = "arrays" if setting == "dataset" else "modules"
        if is_from_python and given is None:
            raise RunFolderError(
                f"{path} was started from Python with {what} of its own, which no file holds: "
                f"pass them again, as in fedproto.resume({path.name!r}, {setting}=...)"
            )
        if given is not None and not is_from_python:
            raise ConfigError(
                f"{path} was started with the {setting} {settings.get(setting)!r}, not with "
                f"{what}: leave {setting} out"
            )


def hash_frozen(federation: Federation) -> str | None:
    """Return one hash of all clients' frozen weights, which no checkpoint holds; None: no such."""
    states = [member.frozen.state for member in federation.members if member.frozen is not None]
    return hash_states(states) if states else None


def refuse_other_bodies(folder: RunFolder, began_with: Any, now: str | None) -> None:
    """Refuse a run that began with other frozen weights; both are hashes of all clients'."""
    if began_with != now:
        raise RunFolderError(
            f"{folder.path} began with other weights in its models' frozen bodies: put back the "
            "file or the modules that it began with, or start a new run"
        )


def refuse_other_arrays(folder: RunFolder, began_with: Any, now: str | None) -> None:
    """Refuse a run that began with other arrays from Python; both are hashes of all inputs."""
    if began_with is not None and began_with != now:
        raise RunFolderError(
            f"{folder.path} began with other arrays than those given: pass the same arrays, in "
            "the same order, or start a new run"
        )


def refuse_other_partition(folder: RunFolder, now: dict[str, Any]) -> None:
    """Refuse a run that began with other rows, or with rows of other labels, than those `now`."""
    path = folder.path / "partition.json"
    begun = read_partition(path)
    if begun["sha256"] == now["sha256"]:
        return
    what = "rows"
    for client_begun, client_now in zip(begun["clients"], now["clients"], strict=False):
        if client_begun["labels"] != client_now["labels"]:
            what = "labels"
    raise RunFolderError(
        f"{path} was made from other {what} than the data set has now: put the data back as it was "
        "when the run began, or start a new run"
    )


def refuse_other_shapes(folder: RunFolder, began_with: Any, federation: Federation) -> None:
    """Refuse a run that began with inputs of other shapes.

    `began_with` are the shapes that start.json states, one per client.
    """
    if began_with != list_input_shapes(federation):
        raise RunFolderError(
            f"{folder.path} began with inputs of other shapes than its data set has now: put the "
            "data back, or start a new run"
        )


def refuse_other_weights(folder: RunFolder, began_with: str, states: Sequence[Tree]) -> None:
    """Refuse a run without a checkpoint whose initial weights cannot be drawn again.

    `began_with` is the hash that start.json states; `states` are the clients' states now.
    """
    if hash_states(states) != began_with:
        raise RunFolderError(
            f"{folder.path} has no checkpoint, and the weights it began with are gone or have "
            "changed (a file of weights, the models that `fedproto extend` was given, or torch "
            "itself): start a new run"
        )
