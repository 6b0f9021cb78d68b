"""Backups of a deployed server, and what is restored from one.

A backup is a copy of the server's file, which is whole at every moment: a server may be running
when it is backed up. It must not be running when it is restored.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedproto.config.options import words
from fedproto.core.files import (
    explain_write_errors,
    hold_lock,
    read_json,
    seal,
    unseal,
    write_atomically,
    write_new,
    write_tensors,
)
from fedproto.core.types import Tree
from fedproto.deploy.history import RENAMED, RESTORED, make_event, read_history
from fedproto.deploy.server_files import choose_server_file, find_server_file, read_app_config
from fedproto.deploy.server_state import STATE_FORMAT, read_state
from fedproto.errors import ConfigError, RunFolderError

BACKUPS_FILE = "backups.json"
BACKUPS_VERSION = 1
KEPT_ENTRIES = 100  # of the list of backups
LARGEST_ROUND = 2**31 - 2  # members accept numbers below 2**31


class Backup(NamedTuple):
    """A backup that was made, or had been made before."""

    path: Path
    round: int
    is_new: bool


class Restored(NamedTuple):
    """What a server was restored to."""

    path: Path
    round: int  # the last one that members may have trained, as far as is known
    backup_round: int
    kept: Path | None  # where the file is that was there before


# --- backups


def back_up_server(where: Path, folder: Path) -> Backup:
    """Copy a server's file to a folder, check the copy, and return it.

    The name has the federation's id, the round and a part of the checksum, so that equal states are
    copied once and no backup is ever overwritten.
    """
    source = find_server_file(where)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{source} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    with explain_write_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        trial = folder / f".server-{digest}.safetensors"
        write_atomically(trial, content, private=True)
        try:
            _, header = read_state(trial)  # what is on the disk of the backups, not what was meant
        finally:
            trial.unlink()
        name = f"server-{header['id']}-round-{header['round']:06d}-{digest[:8]}.safetensors"
        backup = Backup(folder / name, header["round"], not (folder / name).exists())
        if backup.is_new:
            write_new(backup.path, content, private=True)
    if backup.path.read_bytes() != content:
        raise RunFolderError(f"{backup.path} exists with other contents: name another folder")
    _note_backup(source, backup)
    return backup


def _note_backup(source: Path, backup: Backup) -> None:
    """Enter a backup in the list beside the server's file."""
    path = source.with_name(BACKUPS_FILE)
    entry = {"time": time.time(), "round": backup.round, "to": str(backup.path.absolute())}
    entries = [*_read_backups(path), entry][-KEPT_ENTRIES:]
    content = json.dumps(seal({"backups": entries}, BACKUPS_VERSION), indent=1)
    with explain_write_errors(path):
        write_atomically(path, content.encode(), private=True)


def _read_backups(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return unseal(read_json(path), BACKUPS_VERSION, str(path))["backups"]


def read_last_backup(state_file: Path) -> dict[str, Any] | None:
    """Return time, round and path of the last backup of a server, or None."""
    entries = _read_backups(state_file.with_name(BACKUPS_FILE))
    return entries[-1] if entries else None


# --- restoring


def restore_server(
    backup: Path, where: Path, replace: bool = False, last_round: int | None = None
) -> Restored:
    """Make a backup the server's state; return what it was restored to.

    where       the folder that `deploy init` made, or the folder of the server's state
    replace     whether a state that is there is replaced; a copy of it is kept
    last_round  the last round that members have trained, if that is known

    If `backup` is the server's own file, as after a whole disk was restored, it is only marked. The
    server goes on after the last round that it learns of, from here or from its members.
    """
    target = choose_server_file(where)
    tensors, header = read_state(backup)
    _refuse_forgotten_budget(backup, header)
    is_in_place = target.exists() and backup.samefile(target)
    with _hold_server(target):
        kept = None
        rounds = [header["round"]]
        if target.exists() and not is_in_place:
            if not replace:
                raise RunFolderError(
                    f"{target} exists: with --replace, a copy of it is kept and the backup takes "
                    "its place"
                )
            kept, known = _keep_replaced(target, header["id"])
            rounds.append(known.get("round", 0))
            header["registered"] = sorted({*header["registered"], *known.get("registered", [])})
        backup_round = header["round"]
        if last_round is not None:
            _check_last_round(last_round, max(rounds))
            rounds.append(last_round)
        header["round"] = max(rounds)
        what = f"from a backup of round {backup_round} ({backup.name})"
        event = make_event(RESTORED, header["round"], what)
        header["history"] = [*read_history(header), event]
        _write_state(target, tensors, header)
    return Restored(target, header["round"], backup_round, kept)


def _refuse_forgotten_budget(backup: Path, header: Mapping[str, Any]) -> None:
    """Refuse a state in which the server counts what its noise has cost the members."""
    if header.get("privacy") is not None:
        raise ConfigError(
            f"{backup} counts what rounds with privacy=client cost the members, and rounds since "
            "the backup are not in it, so their budgets would go back: begin a new federation"
        )


def _check_last_round(last_round: int, known: int) -> None:
    if not known <= last_round <= LARGEST_ROUND:
        raise ConfigError(
            f"--last-round is {last_round}, but numbers from {known}, the last round that is "
            f"known here, to {LARGEST_ROUND} are accepted"
        )


def _keep_replaced(target: Path, federation: str) -> tuple[Path, dict[str, Any]]:
    """Copy a state that will be replaced; return where to, and its header, {} if it is damaged.

    Raises RunFolderError if it is the state of another federation.
    """
    try:
        _, header = read_state(target)
    except RunFolderError:
        header = {}
    if header and header["id"] != federation:
        raise RunFolderError(
            f"{target} is the state of another federation than the backup: name another folder"
        )
    content = target.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:8]
    kept = target.with_name(f"replaced-{digest}-{target.name}")
    if not kept.exists():
        with explain_write_errors(kept):
            write_new(kept, content, private=True)
    return kept, header


# --- a member with another name


def rename_member(where: Path, old: str, new: str) -> None:
    """Give a member of the server's state another name; its number and its uploads stay its own.

    The settings must list the new name already: a member that they do not list is forgotten.
    """
    path = find_server_file(where)
    _refuse_unlisted(where, old, new)
    with _hold_server(path):
        tensors, header = read_state(path)
        members = header["members"]
        if old not in members:
            raise ConfigError(
                f"{path} has no member {old!r}; its members are {', '.join(members) or 'none'}"
            )
        if new in members:
            raise ConfigError(f"{path} has a member {new!r} already: choose another name")
        renamed = {}
        for name, record in members.items():
            renamed[new if name == old else name] = record
        header["members"] = renamed
        if old in header["registered"]:  # nobody without a key can use either name
            header["registered"] = sorted({*header["registered"], new})
        event = make_event(RENAMED, header["round"], f"{old} is called {new}")
        header["history"] = [*read_history(header), event]
        _write_state(path, tensors, header)


def _refuse_unlisted(where: Path, old: str, new: str) -> None:
    """Raise ConfigError if the settings list members, but not the new name instead of the old."""
    listed = words(str(read_app_config(where).get("members", "")))
    if listed and (new not in listed or old in listed):
        raise ConfigError(
            f"{where / 'pyproject.toml'} must list {new!r} in place of {old!r} as one of its "
            "`members` first: a member that is not listed is forgotten"
        )


# --- the file


@contextmanager
def _hold_server(path: Path) -> Iterator[None]:
    """Be the only process that uses a server's folder; RunFolderError if the server is running."""
    with explain_write_errors(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with hold_lock(path.parent):
        yield


def _write_state(path: Path, tensors: Tree, header: dict[str, Any]) -> None:
    with explain_write_errors(path):
        write_tensors(path, tensors, STATE_FORMAT, header, private=True)
