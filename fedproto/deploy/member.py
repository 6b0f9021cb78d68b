"""What a member does with a message: train a round from where it stands, and remember that it did.

Flower starts a new process for every message, so everything a member is lies in one file, replaced atomically. A round
that is asked for twice, as by a server that was killed before it could keep the answers, is answered from that file and
not trained again. Whoever asks while a round is trained waits for its end: a lock lets one process at a time work on
the member's folder, which only its owner can read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedproto.config import plugins
from fedproto.config.choices import AUTO, complete, parse_choice, resolve_auto
from fedproto.config.options import words
from fedproto.core.class_names import is_plain
from fedproto.core.federation import Federation, Member, rearrange_head
from fedproto.core.files import (
    TensorFormat,
    explain_write_errors,
    hold_lock,
    read_tensors,
    write_atomically,
    write_tensors,
)
from fedproto.core.local_training import evaluate, train
from fedproto.core.tensors import flatten_groups, split_groups
from fedproto.core.types import Algorithm, Task, Tree, nothing
from fedproto.data import DataFolders, Source
from fedproto.data.shared.feature_encoding import ENCODING, to_json
from fedproto.deploy.messages import Header, Message, of_upload, to_server
from fedproto.deploy.settings import MemberSettings, TrainingTerms, checked
from fedproto.errors import (
    ConfigError,
    MessageError,
    RefusedByMember,
    RunFolderError,
    TrainingError,
)
from fedproto.inference.trained_client import TrainedClient, calibrate_client
from fedproto.partitions import PartitionRequest
from fedproto.partitions.classes import classes as of_classes
from fedproto.runs.assemble import assemble
from fedproto.runs.devices import device_of, torch_settings
from fedproto.runs.prototype_files import Prototypes

STATE = "member.safetensors"
FORMAT = TensorFormat("member state", 1)
LOCK_WAIT_SECONDS = 3600.0  # for whoever asks while another round is being trained


@dataclass(frozen=True)
class MemberCheckpoint:
    """What a member's file holds."""

    round: int
    classes: tuple[str, ...]  # of its head
    state: Tree
    server: Tree  # what it was sent last, over the same classes
    reply: Message

    def save(self, path: Path, fingerprint: str) -> None:
        reply = {
            name: torch.from_numpy(np.array(value)) for name, value in self.reply.arrays.items()
        }
        tensors = flatten_groups({"state": self.state, "server": self.server, "reply": reply})
        header = {
            "round": self.round,
            "classes": list(self.classes),
            "reply": self.reply.header,
            "member": fingerprint,
        }
        with explain_write_errors(path):
            write_tensors(path, tensors, FORMAT, header, private=True)

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> MemberCheckpoint | None:
        """What the file holds; None where there is none. Corrupted and foreign files are refused by name."""
        if not path.exists():
            return None
        tensors, header = read_tensors(path, FORMAT)
        if header.get("member") != fingerprint:
            raise RunFolderError(
                f"{path} is of another member, or of other data or another model: name another state"
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
            )
        except (KeyError, TypeError) as error:
            raise RunFolderError(f"{path} is not a complete member state: {error}") from error


def answer(parcel: Message, own: MemberSettings) -> Message:
    """Train the round that the server asks for, and say what it may know."""
    terms = _terms(parcel.header)
    refuse_what_is_not_allowed(terms, own)
    round = parcel.header["round"]
    path = Path(own.state) / STATE
    with _hold_state(own):
        kept = MemberCheckpoint.load(path, own.fingerprint())
        if kept is not None and kept.reply.header.get("federation") != parcel.header.get(
            "federation"
        ):
            raise RunFolderError(
                f"{path} is of another federation, or its server lost its state: name another state"
            )
        if kept is not None and kept.round == round:
            return kept.reply
        if kept is not None and kept.round > round:
            raise RunFolderError(
                f"{own.name} has trained round {kept.round}, and the server asks for round {round}: is it new?"
            )
        with torch_settings(own.threads, "float32"):
            found = _trained(parcel, own, terms, kept)
        found.save(path, own.fingerprint())
        return found.reply


def scored(parcel: Message, own: MemberSettings) -> Message:
    """How accurate the member is with the server's last state, which it keeps; nothing is trained."""
    terms = _terms(parcel.header)
    refuse_what_is_not_allowed(terms, own)
    path = Path(own.state) / STATE
    with _hold_state(own):
        kept = MemberCheckpoint.load(path, own.fingerprint())
        with torch_settings(own.threads, "float32"):
            seat = _seated(parcel, own, terms, kept)
            found = Message(
                {"member": own.name, "round": parcel.header["round"], **seat.accuracies()}, {}
            )
        if kept is not None and "known" in seat.server:
            newer = replace(
                kept, state=seat.state, classes=seat.federation.classes, server=seat.server
            )
            newer.save(path, own.fingerprint())
        return found


def refuse_what_is_not_allowed(terms: TrainingTerms, own: MemberSettings) -> None:
    """Raise RefusedByMember where the member's own file does not allow the algorithm, or what it sends."""
    algorithm = _algorithm(terms)
    part = terms.part()
    allowed = words(own.algorithms)
    if allowed and part.name not in allowed:
        raise RefusedByMember(
            f"the server asks for {part.name}, and this member's `algorithms` are {own.algorithms!r}"
        )
    content = "prototypes" if algorithm.shared is nothing else "weights"
    counts = part.options.get("weighting") != "uniform"  # with it, every member counts once
    sent = [content, "counts"] if counts else [content]
    for kind in sent:
        if kind not in words(own.sends):
            raise RefusedByMember(
                f"{terms.algorithm} sends {kind}, and this member's `sends` are {own.sends!r}"
            )


@contextmanager
def _hold_state(own: MemberSettings) -> Iterator[None]:
    """Be the only process that works on the member's folder; wait while another one does."""
    folder = Path(own.state)
    with ExitStack() as held:
        with explain_write_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(hold_lock(folder, wait_seconds=LOCK_WAIT_SECONDS))
        yield


def trained(own: MemberSettings) -> TrainedClient:
    """The member as it classifies: with the model it has, and the prototypes it was sent last."""
    kept = MemberCheckpoint.load(Path(own.state) / STATE, own.fingerprint())
    if kept is None:
        raise RunFolderError(f"{own.name} has not trained yet: {own.state} holds no {STATE}")
    dim = kept.server["prototypes"].shape[1] if "prototypes" in kept.server else 0
    federation = _federation(own, TrainingTerms(dim=dim), kept.classes)
    if federation.classes != kept.classes:
        raise RunFolderError(f"{own.name}'s data has other classes than when it trained")
    shared = (
        Prototypes(kept.classes, kept.server["prototypes"], kept.server["known"]) if dim else None
    )
    about = {
        "client": own.name,
        "dataset": federation.members[0].dataset,
        "model": federation.members[0].model,
    }
    return calibrate_client(
        federation.members[0], kept.state, kept.classes, shared, about | {"round": kept.round}
    )


@dataclass(frozen=True)
class _Seated:
    """A member in the place that the server has for it."""

    own: MemberSettings
    federation: Federation
    member: Member
    algorithm: Algorithm
    state: Tree
    server: Tree

    def accuracies(self) -> Header:
        if not self.own.tell_accuracy:
            return {}
        everything = torch.ones(len(self.federation.classes), device=self.federation.device)
        received = self.algorithm.send(self.server, everything)
        found = evaluate(self.member, self.algorithm, self.state, received)
        return {f"accuracy.{name}": value for name, value in found.items()}


def _trained(
    parcel: Message, own: MemberSettings, terms: TrainingTerms, kept: MemberCheckpoint | None
) -> MemberCheckpoint:
    seat, round = _seated(parcel, own, terms, kept), parcel.header["round"]
    received = seat.algorithm.send(seat.server, seat.federation.own_classes[0])
    told = seat.accuracies() if round > 1 else {}
    told.pop("accuracy.prototype", None)  # to train it gets the prototypes of its own classes only
    outcome = train(seat.member, seat.algorithm, seat.state, received, terms.training(), round)
    reply = of_upload(outcome.upload, seat.federation.classes)
    for name, value in (*outcome.state.items(), *outcome.upload.sums.items()):
        if not torch.isfinite(value).all():
            raise TrainingError(
                f"{own.name}'s training broke down in round {round}: {name} is not finite; the lr may be too high"
            )
    header = {
        "member": own.name,
        "round": round,
        "federation": parcel.header.get("federation"),
        **reply.header,
        **told,
    }
    # Weights that travel are in the state already; prototypes are what it classifies by.
    sent = seat.server if "known" in seat.server else {}
    return MemberCheckpoint(
        round, seat.federation.classes, outcome.state, sent, Message(header, reply.arrays)
    )


def _seated(
    parcel: Message, own: MemberSettings, terms: TrainingTerms, kept: MemberCheckpoint | None
) -> _Seated:
    federation = _federation(own, terms, tuple(parcel.header["classes"]))
    member = replace(federation.members[0], id=parcel.header["number"])
    algorithm = _algorithm(terms)
    like = algorithm.init(
        member.initial, Task(len(federation.classes), federation.task.dim, 1, terms.seed)
    )
    try:
        server = to_server(parcel, federation.classes, like)
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
        raise MessageError(f"the server's message does not fit this member: {error}") from error
    for name, value in server.items():
        if not torch.isfinite(value).all() or value.shape != like[name].shape:
            raise MessageError(
                f"the server sent {name} that is not finite, or of another shape than {tuple(like[name].shape)}"
            )
    state = member.initial
    if kept is not None:
        held = {name: value.to(member.initial[name]) for name, value in kept.state.items()}
        state = rearrange_head(held, member.initial, kept.classes, federation.classes)
    return _Seated(own, federation, member, algorithm, state, server)


def _federation(own: MemberSettings, terms: TrainingTerms, known: tuple[str, ...]) -> Federation:
    """A federation of this one member, over the classes that all agree on and those it brings."""
    source = _source(own)
    pool = PartitionRequest(
        source.train.y, source.test.y, source.classes, 1, source.shots, np.random.default_rng(0), ""
    )
    portion = of_classes(pool, names=own.classes)[0]
    model = parse_choice("model", own.model)
    if model.name == AUTO:
        (model,) = resolve_auto(model, source.model)
    held = {source.classes[label] for label in np.unique(source.train.y[portion.train])}
    kept = tuple(name for name in source.classes if name in held)
    if not words(own.classes):
        _refuse_unlisted(kept, known)
    return assemble(
        [_narrowed(source, kept)],
        [portion],
        [complete("model", model, {}, {})],
        dim=terms.dim or None,
        seed=terms.seed,
        device=device_of(own.device),
        dtype=torch.float32,
        known=known,
        weights=Path(own.weights) if own.weights else None,
    )


def _refuse_unlisted(names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """A name of the data's that neither the federation nor the member's file has does not leave the member."""
    unlisted = [name for name in names if name not in known]
    if unlisted:
        raise RefusedByMember(
            f"the data has the class {unlisted[0]!r}, which is not a class of the federation: "
            "name in `classes` those that this member takes part with"
        )


def _source(own: MemberSettings) -> Source:
    """The member's data. What a table's columns or a text's words mean is kept: files grow, and a model stays."""
    part, kept = (
        complete("dataset", parse_choice("dataset", own.data), {}, {}),
        Path(own.state) / ENCODING,
    )
    if kept.exists():
        part = replace(part, options=part.options | {"encoding": str(kept)})
    source = plugins.build("dataset", part, DataFolders(own.data_dir))
    if source.encoding is not None and not kept.exists():
        with explain_write_errors(kept):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(kept, json.dumps(to_json(source.encoding)).encode(), private=True)
    return source


def _narrowed(source: Source, classes: tuple[str, ...]) -> Source:
    """A source that speaks of these classes only; rows of others, which nobody asks for, are called the first."""
    new = np.array([classes.index(name) if name in classes else 0 for name in source.classes])
    splits = {
        part: replace(getattr(source, part), y=new[getattr(source, part).y])
        for part in ("train", "test")
    }
    return replace(source, classes=classes, **splits)


def _terms(header: dict[str, Any]) -> TrainingTerms:
    """What the server states, checked: it may be anybody."""
    for key, least in (("round", 1), ("number", 0)):
        value = header.get(key)
        if type(value) is not int or not least <= value < 2**31:
            raise MessageError(
                f"the server's message needs a whole number from {least} to 2147483647 as {key!r}"
            )
    for key in ("classes", "known"):
        names = header.get(key, [])
        are_names = isinstance(names, list) and all(
            isinstance(name, str) and is_plain(name) for name in names
        )
        if not are_names or len(set(names)) < len(names):
            raise MessageError(
                f"the server's message has {key!r} that are not a list of different names"
            )
    if "classes" not in header:
        raise MessageError("the server's message names no classes")
    if ":" in str(header.get("algorithm")):
        raise RefusedByMember(
            "the server names an algorithm of its own module, which a member never imports"
        )
    names = [field.name for field in fields(TrainingTerms)]
    missing = [name for name in names if name not in header]
    if missing:
        raise MessageError(f"the server's message lacks {missing[0]!r}")
    try:
        return checked(
            TrainingTerms, {name: header[name] for name in names}, "the server's message"
        )
    except ConfigError as error:
        raise MessageError(str(error)) from error


def _algorithm(terms: TrainingTerms) -> Algorithm:
    """The algorithm that the server names; an unknown one, or odd options, are the message's fault."""
    try:
        return terms.build()
    except ConfigError as error:
        raise MessageError(f"the server's message: {error}") from error
