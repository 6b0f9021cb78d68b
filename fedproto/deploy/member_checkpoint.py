"""The file in which a member keeps everything it needs for the next request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedproto.core.files import (
    TensorFormat,
    explain_write_errors,
    hold_lock,
    read_tensors,
    write_tensors,
)
from fedproto.core.prototypes import DEFAULT_TAU, Tau
from fedproto.core.tensors import flatten_groups, split_groups
from fedproto.core.types import Tree
from fedproto.deploy.history import Event, read_history
from fedproto.deploy.messages import Message
from fedproto.deploy.settings import MemberSettings
from fedproto.errors import RunFolderError, shown

STATE_FILE = "member.safetensors"
STATE_FORMAT = TensorFormat("member state", 2)
LOCK_WAIT_SECONDS = 3600.0  # while another request is handled
MAX_SHOWN_CHARACTERS = 300  # of a setting, in an error


@dataclass(frozen=True)
class MemberCheckpoint:
    """What a member's file holds."""

    round: int  # the last one that the member trained
    classes: tuple[str, ...]  # of its head
    state: Tree  # of its model
    server: Tree  # the prototypes it received last, over the same classes
    reply: Message  # to the request for this round
    dim: int = 0  # values of an embedding, as the server says; 0: as the model has them
    tau: Tau = DEFAULT_TAU  # of the prediction by both prototypes and head
    number: int = 0  # that the server gave the member; its random numbers are drawn by it
    rows: dict[str, int] = field(default_factory=dict)  # training rows of each class, in that round
    history: list[Event] = field(default_factory=list)  # see history.py

    @property
    def is_without_reply(self) -> bool:
        """Whether the reply to the last round is lost: the member was restored from a backup."""
        return "round" not in self.reply.header

    def save(self, own: MemberSettings) -> None:
        """Write the member's file, for its owner only."""
        path = find_state_file(own)
        reply = {}
        for name, value in self.reply.arrays.items():
            reply[name] = torch.from_numpy(np.array(value))
        tensors = flatten_groups({"state": self.state, "server": self.server, "reply": reply})
        header = {
            "round": self.round,
            "classes": list(self.classes),
            "dim": self.dim,
            "tau": list(self.tau),
            "number": self.number,
            "rows": self.rows,
            "history": self.history,
            "reply": self.reply.header,
            "member": own.fingerprint(),
            "identity": own.identity(),
        }
        with explain_write_errors(path):
            write_tensors(path, tensors, STATE_FORMAT, header, private=True)

    @classmethod
    def load(cls, own: MemberSettings) -> MemberCheckpoint | None:
        """Return what the member's file holds, or None if there is no file.

        Raises RunFolderError if the file is corrupted or belongs to another member.
        """
        path = find_state_file(own)
        if not path.exists():
            return None
        tensors, header = read_tensors(path, STATE_FORMAT)
        if header.get("member") != own.fingerprint():
            raise RunFolderError(
                f"{path} {_describe_difference(header.get('identity'), own)}: change that back, "
                "or name another `state`, which starts a new model; a new name or place of the "
                "data is entered by `fedproto deploy rename` or `move-data`"
            )
        groups = split_groups(tensors)
        arrays = {name: value.numpy() for name, value in groups.get("reply", {}).items()}
        try:
            return cls(
                round=header["round"],
                classes=tuple(header["classes"]),
                state=groups.get("state", {}),
                server=groups.get("server", {}),
                reply=Message(header["reply"], arrays),
                dim=header.get("dim", 0),
                tau=Tau(*header.get("tau", ())),
                number=int(header.get("number", 0)),
                rows=dict(header.get("rows", {})),
                history=read_history(header),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{path} is not a complete member state: {error}") from error


def _describe_difference(stored: object, own: MemberSettings) -> str:
    """Return which settings of a saved state are not the member's; a file may not tell them."""
    differences = []
    if isinstance(stored, dict):
        for key, value in own.identity().items():
            if key in stored and stored[key] != value:
                before = shown(stored[key], MAX_SHOWN_CHARACTERS)
                now = shown(value, MAX_SHOWN_CHARACTERS)
                differences.append(f"{key} was {before} and is {now} now")
    if not differences:
        return "belongs to another member: its name, data, model or classes are not the same"
    return f"belongs to other settings ({'; '.join(differences)})"


def find_state_file(own: MemberSettings) -> Path:
    """Return the path of the member's file."""
    return Path(own.state) / STATE_FILE


@contextmanager
def hold_state(own: MemberSettings) -> Iterator[None]:
    """Be the only process that uses the member's folder; wait while another one does."""
    folder = Path(own.state)
    with ExitStack() as held:
        with explain_write_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(hold_lock(folder, wait_seconds=LOCK_WAIT_SECONDS))
        yield
