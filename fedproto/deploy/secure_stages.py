"""What a member does in each stage of a secure sum: see privacy/secure_sum.

Flower starts a new process for every message, so the secrets of a stage are in a file that only the
member's owner can read, from one message to the next. Each stage replaces it, and before the last
answer leaves, all secrets are deleted: a member answers each stage once. A sum that its server
abandons leaves secrets of no further use, which the next sum replaces.

What is trained for a secure sum is kept as any round's reply, but never sent as it is. A member
that has helped to unmask a round takes part in no other sum of that round: the difference of two
sums over different members would tell the server about single ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedproto.core.files import TensorFormat, explain_write_errors, read_tensors, write_tensors
from fedproto.core.tensors import map_upload, scatter_rows
from fedproto.core.types import Upload
from fedproto.deploy.member import check_request, train_round
from fedproto.deploy.member_checkpoint import hold_state
from fedproto.deploy.messages import SECURE_SUM, Header, Message, unpack_upload
from fedproto.deploy.settings import MemberSettings
from fedproto.errors import (
    FedProtoError,
    MessageError,
    RefusedByMember,
    RunFolderError,
    ServerBehind,
)
from fedproto.privacy.secure_sum.flat_uploads import to_vectors
from fedproto.privacy.secure_sum.member import KeyStage, MaskedStage, ShareStage, start_member
from fedproto.privacy.secure_sum.stage_fields import (
    Stage,
    pack_stage,
    pack_terms,
    unpack_stage,
    unpack_terms,
)

STAGE_FILE = "secure_sum.safetensors"
STAGE_FORMAT = TensorFormat("secure sum's secrets", 1)


def take_stage(request: Message, own: MemberSettings) -> Message:
    """Return a member's answer to a request of a secure sum."""
    asked = request.header[SECURE_SUM]
    if not isinstance(asked, dict):
        raise MessageError("the server's message has no terms of a secure sum")
    check_request(request, own)
    told: Header = {}
    stage = asked.get("stage")
    try:
        if stage == "keys":
            answer = _make_keys(request, own, asked)
        elif stage == "shares":
            answer = _share_secrets(request, own, asked)
        elif stage == "masked":
            answer, told = _mask_upload(request, own, asked)
        elif stage == "unmasking":
            answer = _help_to_unmask(request, own, asked)
        else:
            raise MessageError("the server names a stage that a secure sum does not have")
    except FedProtoError:
        if stage != "keys":
            with hold_state(own):
                _StageFile(own).forget_secrets()  # this sum goes on without the member
        raise
    header = {
        "member": own.name,
        "round": request.header["round"],
        "federation": request.header.get("federation"),
        "stage": stage,
        **told,
    }
    return Message(header, {SECURE_SUM: np.frombuffer(answer, np.uint8)})


# --- the stages


def _make_keys(request: Message, own: MemberSettings, asked: dict[str, Any]) -> bytes:
    """Begin a sum: forget the secrets of an earlier one, and make keys."""
    terms = unpack_terms(asked)
    position = asked.get("position")
    if type(position) is not int or not 0 <= position < terms.fixed_point.members:
        raise MessageError("the server's message has no position of this member in a secure sum")
    with hold_state(own):
        file = _StageFile(own)
        file.refuse_added(request.header)
        stage, keys = start_member(terms, position)
        file.save(request.header, stage)
    return keys


def _share_secrets(request: Message, own: MemberSettings, asked: dict[str, Any]) -> bytes:
    with hold_state(own):
        file = _StageFile(own)
        stage = file.load(request.header, asked)
        if not isinstance(stage, KeyStage):
            raise _not_its_turn("shares")
        new_stage, shares = stage.share(_read_payload(request))
        file.save(request.header, new_stage)
    return shares


def _mask_upload(
    request: Message, own: MemberSettings, asked: dict[str, Any]
) -> tuple[bytes, Header]:
    """Train the round, and return the masked upload and what else the reply says."""
    delivered = _read_payload(request)
    plain_request = Message(
        {key: value for key, value in request.header.items() if key != SECURE_SUM},
        {name: value for name, value in request.arrays.items() if name != SECURE_SUM},
    )
    reply = train_round(plain_request, own, hidden=True)
    upload = make_dense(reply, tuple(request.header["classes"]))
    values = to_vectors(map_upload(upload, lambda value: value[None]))[0]
    with hold_state(own):
        file = _StageFile(own)
        stage = file.load(request.header, asked)
        if not isinstance(stage, ShareStage):
            raise _not_its_turn("masked values")
        new_stage, masked = stage.mask(values, delivered)
        file.save(request.header, new_stage)
    return masked, _choose_told(reply.header)


def _help_to_unmask(request: Message, own: MemberSettings, asked: dict[str, Any]) -> bytes:
    """Return shares of the others' secrets, once: before they leave, all secrets are deleted."""
    with hold_state(own):
        file = _StageFile(own)
        stage = file.load(request.header, asked)
        if not isinstance(stage, MaskedStage):
            raise _not_its_turn("shares to unmask")
        shares = stage.unmask(_read_payload(request))
        file.save(request.header, None)
    return shares


def make_dense(reply: Message, classes: tuple[str, ...]) -> Upload:
    """Return a reply's upload with a row for each class, zeros where the member has none.

    Raises RefusedByMember if the member has classes that the federation does not have: a longer
    vector could not be added, and would tell that it has them.
    """
    spoken = reply.header.get("spoken", [])
    unknown = [name for name in spoken if name not in classes]
    if unknown:
        raise RefusedByMember(
            f"this member has the class {unknown[0]!r}, which the server does not list: a secure "
            "sum needs the same classes of all members"
        )
    places = torch.tensor([classes.index(name) for name in spoken], dtype=torch.long)
    dense = {}
    for name, group in unpack_upload(reply).items():
        has_rows = f"{name}/extra.rows" in reply.arrays
        dense[name] = scatter_rows(group, places, len(classes)) if has_rows else group
    return dense


def _choose_told(header: Header) -> Header:
    """Return what a reply's header says beside its upload; it names no classes."""
    told_keys = [key for key in header if key.startswith("accuracy.")]
    told_keys += [key for key in ("site", "epsilon") if key in header]
    return {key: header[key] for key in told_keys}


def _read_payload(request: Message) -> bytes:
    payload = request.arrays.get(SECURE_SUM)
    if payload is None or payload.dtype != np.uint8 or payload.ndim != 1:
        raise MessageError("the server's message has no bytes of a secure sum")
    return payload.tobytes()


def _not_its_turn(what: str) -> MessageError:
    return MessageError(
        f"the server asks for {what}, which is not the next stage of this secure sum"
    )


# --- the file


def forget_sums(own: MemberSettings, federation: str, last_round: int) -> None:
    """Delete all secrets of a member that is restored; no round up to `last_round` is added again.

    The caller holds the member's folder.
    """
    file = _StageFile(own)
    added = max(last_round, file.added_round(federation))
    file.write(federation, last_round, added, None)


class _StageFile:
    """The secrets of a member's secure sum, and the last round that it has helped to unmask."""

    def __init__(self, own: MemberSettings) -> None:
        self.path = Path(own.state) / STAGE_FILE

    def load(self, header: Header, asked: dict[str, Any]) -> Stage:
        """Return the stage of the sum that the server asks about; MessageError if there is none."""
        stored = self._read()
        is_same = stored.get("federation") == header.get("federation")
        is_same = is_same and stored.get("round") == header["round"]
        fields = stored.get("stage")
        if not is_same or not fields:
            raise MessageError("the server asks about a secure sum that this member is not part of")
        try:
            stage = unpack_stage(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{self.path} is not a complete stage: {error}") from error
        if pack_terms(stage.terms) != {key: asked.get(key) for key in pack_terms(stage.terms)}:
            raise MessageError("the server has changed the terms of a secure sum")
        return stage

    def save(self, header: Header, stage: Stage | None) -> None:
        """Replace the file; with None, the round is unmasked, and no secrets are left."""
        federation = header.get("federation")
        added = self.added_round(federation)
        if stage is None:
            added = header["round"]
        fields = None if stage is None else pack_stage(stage)
        self.write(federation, header["round"], added, fields)

    def forget_secrets(self) -> None:
        """Delete the secrets; which round was unmasked is still known."""
        stored = self._read()
        if stored.get("stage"):
            federation = stored.get("federation")
            self.write(federation, stored.get("round"), self.added_round(federation), None)

    def refuse_added(self, header: Header) -> None:
        """Raise ServerBehind if the member has helped to unmask this round, or a later one."""
        added = self.added_round(header.get("federation"))
        if header["round"] <= added:
            raise ServerBehind(
                f"round {added} has been added in a secure sum, so round {header['round']} is not "
                "added again: the difference of two sums would tell about single members",
                added,
            )

    def added_round(self, federation: Any) -> int:
        """Return the last round of a federation that the member has helped to unmask."""
        stored = self._read()
        return stored.get("added", 0) if stored.get("federation") == federation else 0

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        _, header = read_tensors(self.path, STAGE_FORMAT)
        return header

    def write(self, federation: Any, round: Any, added: int, fields: dict[str, Any] | None) -> None:
        """Replace the file."""
        header = {"federation": federation, "round": round, "added": added, "stage": fields}
        with explain_write_errors(self.path):
            write_tensors(self.path, {}, STAGE_FORMAT, header, private=True)
