"""What a member does with a message: train a round from where it stands, and remember that it did.

Flower starts a new process for every message, so everything a member is lies in one file, replaced atomically. A round
that is asked for twice, as by a server that was killed before it could keep the answers, is answered from that file and
not trained again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fedproto import registry
from fedproto.bank import Prototypes, read_tensors
from fedproto.client import evaluate, train
from fedproto.config import AUTO, complete, one_part, resolve_auto
from fedproto.data import Places, Source
from fedproto.deploy.parcels import Header, Parcel, of_upload, to_server
from fedproto.deploy.settings import MemberSettings, Terms, checked
from fedproto.encoding import ENCODING, to_json
from fedproto.errors import ConfigError, DataError, RunFolderError
from fedproto.experiment import device_of, settings
from fedproto.federation import Federation, Member, assemble, placed_by_class
from fedproto.files import write_atomically
from fedproto.partitions import Pool
from fedproto.partitions.classes import classes as of_classes
from fedproto.trained import Trained, made
from fedproto.trees import flat, parted
from fedproto.types import Algorithm, Task, Tree

STATE = "member.safetensors"


@dataclass(frozen=True)
class Kept:
    """What a member's file holds."""

    round: int
    classes: tuple[str, ...]  # of its head
    state: Tree
    server: Tree  # what it was sent last, over the same classes
    reply: Parcel

    def save(self, path: Path, fingerprint: str) -> None:
        reply = {name: torch.from_numpy(np.array(value)) for name, value in self.reply.arrays.items()}
        parts = flat({"state": self.state, "server": self.server, "reply": reply})
        tensors = {name: value.cpu().contiguous() for name, value in parts.items()}
        of = {"round": self.round, "classes": self.classes, "header": self.reply.header, "member": fingerprint}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save(tensors, {"of": json.dumps(of)}))

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Kept | None:
        if not path.exists():
            return None
        tensors, metadata = read_tensors(path, "a member's state")
        try:
            of = json.loads(metadata["of"])
            if of["member"] != fingerprint:
                raise RunFolderError(
                    f"{path} is of another member, or of other data or another model: name another state"
                )
            parts = parted(tensors)
            state, server, reply = (parts.pop(group, {}) for group in ("state", "server", "reply"))
            if parts:
                raise ValueError(f"it holds {min(parts)!r}, too")
            arrays = {name: value.numpy() for name, value in reply.items()}
            return cls(of["round"], tuple(of["classes"]), state, server, Parcel(of["header"], arrays))
        except (KeyError, ValueError, TypeError) as error:
            raise RunFolderError(f"{path} is no member's state: {error}") from error


def answer(parcel: Parcel, own: MemberSettings) -> Parcel:
    """Train the round that the server asks for, and say what it may know."""
    terms, round = _terms(parcel.header), parcel.header["round"]
    path = Path(own.state) / STATE
    kept = Kept.load(path, own.fingerprint())
    if kept is not None and kept.reply.header.get("federation") != parcel.header.get("federation"):
        raise RunFolderError(f"{path} is of another federation, or its server lost its state: name another state")
    if kept is not None and kept.round == round:
        return kept.reply
    if kept is not None and kept.round > round:
        raise RunFolderError(
            f"{own.name} has trained round {kept.round}, and the server asks for round {round}: is it new?"
        )
    with settings(own.threads, "float32"):
        found = _trained(parcel, own, terms, kept)
    found.save(path, own.fingerprint())
    return found.reply


def scored(parcel: Parcel, own: MemberSettings) -> Parcel:
    """How accurate the member is with the server's last state, which it keeps; nothing is trained."""
    path = Path(own.state) / STATE
    kept = Kept.load(path, own.fingerprint())
    with settings(own.threads, "float32"):
        seat = _seated(parcel, own, _terms(parcel.header), kept)
        found = Parcel({"member": own.name, "round": parcel.header["round"], **seat.accuracies()}, {})
    if kept is not None and "known" in seat.server:
        replace(kept, state=seat.state, classes=seat.federation.classes, server=seat.server).save(
            path, own.fingerprint()
        )
    return found


def trained(own: MemberSettings) -> Trained:
    """The member as it classifies: with the model it has, and the prototypes it was sent last."""
    kept = Kept.load(Path(own.state) / STATE, own.fingerprint())
    if kept is None:
        raise RunFolderError(f"{own.name} has not trained yet: {own.state} holds no {STATE}")
    dim = kept.server["prototypes"].shape[1] if "prototypes" in kept.server else 0
    federation = _federation(own, Terms(dim=dim), kept.classes)
    if federation.classes != kept.classes:
        raise RunFolderError(f"{own.name}'s data has other classes than when it trained")
    shared = Prototypes(kept.classes, kept.server["prototypes"], kept.server["known"]) if dim else None
    about = {"client": own.name, "dataset": federation.members[0].dataset, "model": federation.members[0].model}
    return made(federation.members[0], kept.state, kept.classes, shared, about | {"round": kept.round})


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


def _trained(parcel: Parcel, own: MemberSettings, terms: Terms, kept: Kept | None) -> Kept:
    seat, round = _seated(parcel, own, terms, kept), parcel.header["round"]
    received = seat.algorithm.send(seat.server, seat.federation.own_classes[0])
    told = seat.accuracies() if round > 1 else {}
    told.pop("accuracy.prototype", None)  # to train it gets the prototypes of its own classes only
    outcome = train(seat.member, seat.algorithm, seat.state, received, terms.training(), round)
    reply = of_upload(outcome.upload, seat.federation.classes)
    for name, value in (*outcome.state.items(), *outcome.upload.sums.items()):
        if not torch.isfinite(value).all():
            raise DataError(
                f"{own.name}'s training broke down in round {round}: {name} is not finite; the lr may be too high"
            )
    header = {"member": own.name, "round": round, "federation": parcel.header.get("federation"), **reply.header, **told}
    # Weights that travel are in the state already; prototypes are what it classifies by.
    sent = seat.server if "known" in seat.server else {}
    return Kept(round, seat.federation.classes, outcome.state, sent, Parcel(header, reply.arrays))


def _seated(parcel: Parcel, own: MemberSettings, terms: Terms, kept: Kept | None) -> _Seated:
    federation = _federation(own, terms, tuple(parcel.header["classes"]))
    member = replace(federation.members[0], id=parcel.header["number"])
    algorithm = terms.build()
    like = algorithm.init(member.initial, Task(len(federation.classes), federation.task.dim, 1, terms.seed))
    try:
        server = to_server(parcel, federation.classes, like)
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
        raise DataError(f"the server's message does not fit this member: {error}") from error
    for name, value in server.items():
        if not torch.isfinite(value).all() or value.shape != like[name].shape:
            raise DataError(
                f"the server sent {name} that is not finite, or of another shape than {tuple(like[name].shape)}"
            )
    state = member.initial
    if kept is not None:
        held = {name: value.to(member.initial[name]) for name, value in kept.state.items()}
        state = placed_by_class(held, member.initial, kept.classes, federation.classes)
    return _Seated(own, federation, member, algorithm, state, server)


def _federation(own: MemberSettings, terms: Terms, known: tuple[str, ...]) -> Federation:
    """A federation of this one member, over the classes that all agree on and those it brings."""
    source = _source(own)
    pool = Pool(source.train.y, source.test.y, source.classes, 1, source.shots, np.random.default_rng(0), "")
    portion = of_classes(pool, names=own.classes)[0]
    model = one_part("model", own.model)
    if model.name == AUTO:
        (model,) = resolve_auto(model, source.model)
    held = {source.classes[label] for label in np.unique(source.train.y[portion.train])}
    kept = tuple(name for name in source.classes if name in held)
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


def _source(own: MemberSettings) -> Source:
    """The member's data. What a table's columns or a text's words mean is kept: files grow, and a model stays."""
    part, kept = complete("dataset", one_part("dataset", own.data), {}, {}), Path(own.state) / ENCODING
    if kept.exists():
        part = replace(part, options=part.options | {"encoding": str(kept)})
    source = registry.build("dataset", part, Places(own.data_dir))
    if source.encoding is not None and not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(to_json(source.encoding)).encode())
    return source


def _narrowed(source: Source, classes: tuple[str, ...]) -> Source:
    """A source that speaks of these classes only; rows of others, which nobody asks for, are called the first."""
    new = np.array([classes.index(name) if name in classes else 0 for name in source.classes])
    splits = {part: replace(getattr(source, part), y=new[getattr(source, part).y]) for part in ("train", "test")}
    return replace(source, classes=classes, **splits)


def _terms(header: dict[str, Any]) -> Terms:
    """What the server states, checked: it may be anybody."""
    for key in ("round", "number"):
        if type(header.get(key)) is not int or not (key == "round") <= header[key] < 2**31:
            raise DataError(f"the server's message has no {key!r} that could be one")
    for key in ("classes", "known"):
        names = header.get(key, [])
        words = isinstance(names, list) and all(isinstance(name, str) and name for name in names)
        if not words or len(set(names)) < len(names):
            raise DataError(f"the server's message has {key!r} that are no list of different names")
    if "classes" not in header or ":" in str(header.get("algorithm")):
        raise DataError(
            "the server's message names no classes, or a method from outside, which a member does not import"
        )
    names = [field.name for field in fields(Terms)]
    missing = [name for name in names if name not in header]
    if missing:
        raise ConfigError(f"the server's message lacks {missing[0]!r}")
    return checked(Terms, {name: header[name] for name in names}, "the server's message")
