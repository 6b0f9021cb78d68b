"""What a member can bring back to a server that has lost its disk: a file of what it had sent.

The file holds the member's last upload, as it left the member, and the prototypes that it received
last: nothing that is new to whoever ran the server. What was sent only in a secure sum stays at
the member.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedproto.core.entries import Entry, find_wrong_entry
from fedproto.core.files import (
    TensorFormat,
    explain_write_errors,
    pack_tensors,
    read_tensors,
    write_new,
)
from fedproto.core.tensors import flatten_groups, split_groups
from fedproto.core.types import Tree
from fedproto.deploy.member_checkpoint import STATE_FILE, MemberCheckpoint, hold_state
from fedproto.deploy.member_privacy import release_reply
from fedproto.deploy.messages import Header, Message
from fedproto.deploy.settings import MemberSettings
from fedproto.errors import RunFolderError, shown

FORMAT = TensorFormat("member contribution", 1)
#: What the header of a reply says to the checks of the server.
_REPLY_KEYS = ("member", "round", "spoken", "site")
_ENTRIES = {
    "member": Entry(lambda value: isinstance(value, str), "a name"),
    "number": Entry(lambda value: type(value) is int and 0 <= value < 2**31, "a whole number"),
    "round": Entry(lambda value: type(value) is int and 0 < value < 2**31, "a whole number"),
    "federation": Entry(lambda value: isinstance(value, str), "a text"),
    "classes": Entry(lambda value: isinstance(value, list), "a list of names"),
    "reply": Entry(lambda value: value is None or isinstance(value, dict), "an object"),
}


@dataclass(frozen=True)
class Contribution:
    """What one member brings."""

    member: str
    number: int
    round: int  # the last one that it trained
    federation: str
    classes: tuple[str, ...]  # of the prototypes
    reply: Message | None  # None if its upload was hidden in a secure sum, or is lost
    prototypes: Tree  # those that it received last; perhaps none


def write_contribution(own: MemberSettings, folder: Path) -> Path:
    """Write what a member can bring back to a new file in a folder, and return the file."""
    with hold_state(own):
        saved = MemberCheckpoint.load(own)
    if saved is None:
        raise RunFolderError(f"{own.name} has not trained yet: {own.state} holds no {STATE_FILE}")
    is_hidden = saved.reply.header.get("hidden", False) or saved.is_without_reply
    reply: Header | None = None
    arrays: Tree = {}
    if not is_hidden:
        reply = {key: saved.reply.header[key] for key in _REPLY_KEYS if key in saved.reply.header}
        for name, value in saved.reply.arrays.items():
            arrays[name] = torch.from_numpy(np.array(value))
    header = {
        "member": own.name,
        "number": saved.number,
        "round": saved.round,
        "federation": saved.reply.header["federation"],
        "classes": list(saved.classes),
        "reply": reply,
    }
    tensors = flatten_groups({"reply": arrays, "server": saved.server})
    if not is_hidden:
        release_reply(own, saved.reply.header)  # a ledger counts it, had it not been sent before
    path = folder / f"contribution-{own.name}-round-{saved.round:06d}.safetensors"
    with explain_write_errors(path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_new(path, pack_tensors(tensors, FORMAT, header), private=True)
        except FileExistsError as error:
            raise RunFolderError(f"{path} exists: name another folder") from error
    return path


def read_contribution(path: Path) -> Contribution:
    """Return what a member's file brings; RunFolderError if it is not such a file.

    The server checks the reply as it checks any reply.
    """
    tensors, header = read_tensors(path, FORMAT)
    wrong = find_wrong_entry(header, _ENTRIES)
    if wrong is not None:
        found = shown(header.get(wrong), 40)
        description = _ENTRIES[wrong].description
        raise RunFolderError(f"{path} is damaged: {wrong!r} must be {description}, not {found}")
    groups = split_groups(tensors)
    reply = None
    if header["reply"] is not None:
        arrays = {name: value.numpy() for name, value in groups.get("reply", {}).items()}
        reply = Message(header["reply"], arrays)
    return Contribution(
        member=header["member"],
        number=header["number"],
        round=header["round"],
        federation=header["federation"],
        classes=tuple(str(name) for name in header["classes"]),
        reply=reply,
        prototypes=groups.get("server", {}),
    )
