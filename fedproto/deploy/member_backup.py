"""Backups of a member, and what is restored from one.

A backup holds the member's model, its last reply, the encoding of its data and the entries of its
ledger. It holds no secrets of secure sums: masks are never used twice. A member that is restored
takes part only in rounds after the last one that its operator knows of, and what it has spent of
its budget is never less than before.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from fedproto.core.files import (
    TensorFormat,
    explain_write_errors,
    pack_tensors,
    read_json,
    read_tensors,
    write_atomically,
    write_new,
    write_tensors,
)
from fedproto.core.types import Tree
from fedproto.data.shared.feature_encoding import ENCODING
from fedproto.deploy.history import RESTORED, make_event, read_history
from fedproto.deploy.member_checkpoint import (
    STATE_FILE,
    STATE_FORMAT,
    MemberCheckpoint,
    find_state_file,
    hold_state,
)
from fedproto.deploy.privacy_ledger import describe_entries, read_entries, recall_spending
from fedproto.deploy.secure_stages import forget_sums
from fedproto.deploy.settings import MemberSettings
from fedproto.errors import ConfigError, RunFolderError

FORMAT = TensorFormat("member backup", 1)


class MemberBackup(NamedTuple):
    """A backup that was made, or had been made before."""

    path: Path
    round: int
    is_new: bool


def back_up_member(own: MemberSettings, folder: Path) -> MemberBackup:
    """Copy a member's state to a folder, and return the copy; no backup is ever overwritten."""
    with hold_state(own):
        if MemberCheckpoint.load(own) is None:
            raise RunFolderError(
                f"{own.name} has not trained yet: {own.state} holds no {STATE_FILE}"
            )
        tensors, state = read_tensors(find_state_file(own), STATE_FORMAT)
        encoding = Path(own.state) / ENCODING
        header = {
            "state": state,
            "encoding": read_json(encoding) if encoding.exists() else None,
            "ledger": describe_entries(own),
        }
    content = pack_tensors(tensors, FORMAT, header)
    digest = hashlib.sha256(content).hexdigest()[:8]
    name = f"member-{own.name}-round-{state['round']:06d}-{digest}.safetensors"
    backup = MemberBackup(folder / name, state["round"], not (folder / name).exists())
    with explain_write_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if backup.is_new:
            write_new(backup.path, content, private=True)
    read_tensors(backup.path, FORMAT)  # what is on the disk of the backups
    return backup


def restore_member(
    backup: Path, own: MemberSettings, last_round: int | None = None, replace: bool = False
) -> int:
    """Make a backup the member's state; return the last round that it took part in.

    last_round  that round, as the operator knows it; needed unless there is a newer state
    replace     whether a state that is there is replaced; a copy of it is kept
    """
    tensors, header = read_tensors(backup, FORMAT)
    state = header["state"]
    federation = str(state["reply"].get("federation"))
    if state.get("member") != own.fingerprint():
        raise RunFolderError(
            f"{backup} is of other settings than the member's file: its name, data, model and "
            "classes must be those of the backup; `fedproto deploy rename` and `move-data` follow"
        )
    with hold_state(own):
        target = find_state_file(own)
        known = _find_last_round(target, federation, replace)
        last = _choose_last_round(state["round"], known, last_round)
        # Should this be killed half-way, it can be repeated, and nothing was forgotten.
        entries = read_entries(header["ledger"], str(backup))
        recall_spending(own, entries, federation, range(state["round"] + 1, last + 1))
        forget_sums(own, federation, last)
        _write_encoding(own, header["encoding"])
        what = f"from a backup of round {state['round']} ({backup.name})"
        state["history"] = [*read_history(state), make_event(RESTORED, last, what)]
        if last > state["round"]:
            tensors, state = _without_reply(tensors, state)
        state["round"] = last
        with explain_write_errors(target):
            write_tensors(target, tensors, STATE_FORMAT, state, private=True)
    return last


def _find_last_round(target: Path, federation: str, replace: bool) -> int | None:
    """Return the round of a state that will be replaced, of which a copy is kept; None: none."""
    if not target.exists():
        return None
    if not replace:
        raise RunFolderError(
            f"{target} exists: with --replace, a copy of it is kept and the backup takes its place"
        )
    content = target.read_bytes()
    kept = target.with_name(f"replaced-{hashlib.sha256(content).hexdigest()[:8]}-{target.name}")
    if not kept.exists():
        with explain_write_errors(kept):
            write_new(kept, content, private=True)
    try:
        _, header = read_tensors(target, STATE_FORMAT)
    except RunFolderError:
        return None
    if str(header["reply"].get("federation")) != federation:
        raise RunFolderError(
            f"{target} is a state in another federation than the backup: name another `state`"
        )
    return header["round"]


def _choose_last_round(backed_up: int, known: int | None, stated: int | None) -> int:
    """Return the last round that a member took part in; ConfigError if nobody knows it."""
    if known is None and stated is None:
        raise ConfigError(
            "--last-round, the last round that this member took part in, is needed: its log says "
            "so, and `fedproto deploy status` at the server"
        )
    least = max(backed_up, known or 0)
    if stated is None:
        return least
    if not least <= stated < 2**31 - 1:
        raise ConfigError(
            f"--last-round is {stated}, but numbers from {least}, the last round that is known "
            "here, are accepted"
        )
    return stated


def _write_encoding(own: MemberSettings, stored: Any) -> None:
    """Write how columns or words are encoded, unless that is there."""
    path = Path(own.state) / ENCODING
    if stored is not None and not path.exists():
        with explain_write_errors(path):
            write_atomically(path, json.dumps(stored).encode(), private=True)


def _without_reply(tensors: Tree, state: dict[str, Any]) -> tuple[Tree, dict[str, Any]]:
    """Return a state whose last reply is lost: it answers later rounds only."""
    kept = {name: value for name, value in tensors.items() if not name.startswith("reply.")}
    known = {key: state["reply"][key] for key in ("member", "federation") if key in state["reply"]}
    return kept, state | {"reply": known}
