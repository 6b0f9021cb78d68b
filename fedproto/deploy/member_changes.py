"""A member with another name, or with its data in another place, goes on with its state.

The member's operator changes its TOML file and then enters the change here, on the member's own
machine: no message of a server can do that. Other settings that a state belongs to, its model and
its classes, cannot be changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedproto.core.files import explain_write_errors, read_tensors, write_tensors
from fedproto.core.tensors import find_mismatch, split_client
from fedproto.core.types import Tree
from fedproto.deploy.history import MOVED, RENAMED, make_event, read_history
from fedproto.deploy.member_checkpoint import (
    STATE_FILE,
    STATE_FORMAT,
    MemberCheckpoint,
    find_state_file,
    hold_state,
)
from fedproto.deploy.member_data import build_federation, count_rows
from fedproto.deploy.privacy_ledger import carry_over
from fedproto.deploy.settings import MemberSettings, TrainingTerms
from fedproto.errors import ConfigError, RunFolderError


def rename_own_state(own: MemberSettings, old: str) -> None:
    """Make a state the one of the member's new name, which its file has already."""
    _enter_change(own, "name", old, RENAMED)


def move_own_data(own: MemberSettings, changed: bool = False) -> dict[str, int]:
    """Make a state the one of data in the place that the member's file names now.

    Returns the training rows of each class. Raises RunFolderError unless they are as many as in
    the last round, or `changed`, and unless the member's model fits.
    """
    with hold_state(own):
        _, header = _read_state(own)
        before = _read_identity(header, own)["data"]
        saved = MemberCheckpoint.load(replace(own, **_read_identity(header, own)))
    assert saved is not None
    rows = _check_data(own, saved, changed)
    _enter_change(own, "data", before, MOVED)
    return rows


def _check_data(own: MemberSettings, saved: MemberCheckpoint, changed: bool) -> dict[str, int]:
    """Return the training rows of each class of the data; RunFolderError if they do not fit."""
    federation = build_federation(own, TrainingTerms(dim=saved.dim), saved.classes)
    params, _ = split_client(saved.state)
    mismatch = find_mismatch(params, federation.members[0].initial)
    if federation.classes != saved.classes or mismatch is not None:
        raise RunFolderError(
            f"{own.data} has other classes or inputs than the data that {own.name} trained on: "
            "name its new place, or another `state`, which starts a new model"
        )
    rows = count_rows(federation)
    if rows != saved.rows and not changed:
        raise RunFolderError(
            f"{own.data} has {sum(rows.values())} training rows of {len(rows)} classes, but in "
            f"round {saved.round} {own.name} had {sum(saved.rows.values())} of {len(saved.rows)}, "
            "or they are divided among the classes in another way: if the data has changed since, "
            "add --changed"
        )
    return rows


def _enter_change(own: MemberSettings, key: str, before: str, event: str) -> None:
    """Give a state the identity of a setting's new value; the ledger goes with it.

    The ledger is first: a member that is killed in between has spent what it has spent.
    """
    now = getattr(own, key)
    with hold_state(own):
        tensors, header = _read_state(own)
        identity = _read_identity(header, own)
        if identity[key] == now:
            raise ConfigError(
                f"{find_state_file(own)} is of the {key} {now!r} already: change `{key}` in the "
                "member's file first"
            )
        if identity[key] != before:
            raise ConfigError(
                f"{find_state_file(own)} is of the {key} {identity[key]!r}, not of {before!r}"
            )
        owner_before = replace(own, **identity)
        owner_now = replace(owner_before, **{key: now})
        carry_over(owner_before, owner_now)
        header["identity"] = owner_now.identity()
        header["member"] = owner_now.fingerprint()
        header["reply"] = header["reply"] | {"member": owner_now.name}
        what = f"{key} was {before} and is {now}"
        event_entry = make_event(event, header["round"], what)
        header["history"] = [*read_history(header), event_entry]
        path = find_state_file(own)
        with explain_write_errors(path):
            write_tensors(path, tensors, STATE_FORMAT, header, private=True)


def _read_state(own: MemberSettings) -> tuple[Tree, dict[str, Any]]:
    path = find_state_file(own)
    if not path.exists():
        raise RunFolderError(f"{own.name} has not trained yet: {own.state} holds no {STATE_FILE}")
    return read_tensors(path, STATE_FORMAT)


def _read_identity(header: dict[str, Any], own: MemberSettings) -> dict[str, Any]:
    """Return the settings that a state belongs to."""
    identity = header.get("identity")
    if not isinstance(identity, dict) or identity.keys() != own.identity().keys():
        raise RunFolderError(f"{find_state_file(own)} does not say which settings it belongs to")
    return identity
