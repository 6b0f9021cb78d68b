"""Checks that a run folder is continued with the data and the weights that its run began with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from fedproto.core.federation import Federation
from fedproto.core.files import hash_tensors
from fedproto.core.types import Tree
from fedproto.errors import RunFolderError
from fedproto.partitions.file import read_partition
from fedproto.runs.folder import RunFolder


def list_input_shapes(federation: Federation) -> list[list[int]]:
    """Return the shape of one input of each client."""
    return [list(member.train.x.shape[1:]) for member in federation.members]


def hash_states(states: Sequence[Tree]) -> str:
    """Return one hash of all clients' states; clients of one architecture may share theirs."""
    different_states = {id(state): state for state in states}
    hashes = {key: hash_tensors(state) for key, state in different_states.items()}
    listed = "\n".join(hashes[id(state)] for state in states)
    return hashlib.sha256(listed.encode()).hexdigest()


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
