"""What a member does with a request: train a round from its saved state, and save the new one.

Flower starts a new process for every message, so everything a member needs is in one file, replaced
atomically. A round that is requested twice (by a server that was killed before it could save the
replies) is answered from that file and not trained again. A request that arrives while a round is
trained waits for its end: a lock lets one process at a time use the member's folder, which only its
owner can read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fedproto.config.options import words
from fedproto.core.architectures import within_architectures
from fedproto.core.class_names import is_plain
from fedproto.core.federation import Federation, Member, rearrange_head
from fedproto.core.local_training import evaluate, score, start_client, train
from fedproto.core.prototypes import Tau
from fedproto.core.tensors import (
    flatten_state,
    flatten_upload,
    join_client,
    split_client,
)
from fedproto.core.types import Algorithm, GroupLayout, State, Task, Tree
from fedproto.deploy import member_privacy
from fedproto.deploy.member_checkpoint import (
    STATE_FILE,
    MemberCheckpoint,
    find_state_file,
    hold_state,
)
from fedproto.deploy.member_data import build_federation, count_rows
from fedproto.deploy.member_record import TOLD_METRICS
from fedproto.deploy.messages import (
    Header,
    Message,
    keep_classes,
    pack_upload,
    unpack_download,
)
from fedproto.deploy.settings import MemberSettings, TrainingTerms, parse_settings
from fedproto.errors import (
    ConfigError,
    MessageError,
    RefusedByMember,
    RunFolderError,
    ServerBehind,
    TrainingError,
)
from fedproto.inference.trained_client import TrainedClient, calibrate_client
from fedproto.inference.training_rows import training_rows_of
from fedproto.runs.devices import torch_settings
from fedproto.runs.prototype_files import Prototypes, take_prototypes

#: The smallest accepted value of each whole number in a request's header; all are below 2**31.
_SMALLEST_NUMBERS = {"round": 1, "number": 0}


def check_request(request: Message, own: MemberSettings) -> None:
    """Raise an error unless a request of a secure sum is what the member's file allows."""
    refuse_what_is_not_allowed(_read_terms(request.header), own, hidden=True)


def train_round(request: Message, own: MemberSettings, hidden: bool = False) -> Message:
    """Train the round that the server requests, save the member's state, and return the reply.

    hidden  whether the upload leaves the member only in a secure sum; it is as the server would
            decode it, then
    """
    terms = _read_terms(request.header)
    refuse_what_is_not_allowed(terms, own, hidden)
    round = request.header["round"]
    with hold_state(own):
        saved = MemberCheckpoint.load(own)
        if saved is not None:
            _refuse_other_federation(saved, request, own)
            if saved.round == round and not saved.is_without_reply:
                _refuse_uncovering(saved, own, hidden)
                member_privacy.release_reply(own, request.header)
                return saved.reply
            if saved.round >= round:
                raise ServerBehind(
                    f"{own.name} has trained round {saved.round}, but the server requests round "
                    f"{round}: was the server or this member restored from a backup?",
                    saved.round,
                )
        with torch_settings(own.threads, "float32"):
            new = _train(request, own, terms, saved, hidden)
        new.save(own)
        member_privacy.release_reply(own, request.header)
        return new.reply


def _refuse_uncovering(saved: MemberCheckpoint, own: MemberSettings, hidden: bool) -> None:
    """Raise RefusedByMember if a round that was trained for a secure sum would leave otherwise."""
    if saved.reply.header.get("hidden", False) != hidden:
        raise RefusedByMember(
            f"{own.name} has trained round {saved.round} for "
            f"{'single uploads' if hidden else 'a secure sum'}, and does not send it otherwise"
        )


def _refuse_other_federation(
    saved: MemberCheckpoint, request: Message, own: MemberSettings
) -> None:
    if saved.reply.header.get("federation") != request.header.get("federation"):
        raise RunFolderError(
            f"{find_state_file(own)} belongs to another federation, or the server lost its state: "
            "name another state"
        )


def evaluate_member(request: Message, own: MemberSettings) -> Message:
    """Return the member's accuracies and metrics with the server's last state, which is saved.

    Nothing is trained.
    """
    terms = _read_terms(request.header)
    refuse_what_is_not_allowed(terms, own, hidden=True)  # no upload leaves the member
    with hold_state(own):
        saved = MemberCheckpoint.load(own)
        with torch_settings(own.threads, "float32"):
            participant = _prepare(request, own, terms, saved)
            accuracies = participant.measure_accuracies()
            metrics = participant.measure_metrics()
        prototypes = take_prototypes(participant.received)
        if saved is not None and prototypes:
            updated = replace(
                saved,
                state=participant.state,
                classes=participant.federation.classes,
                server=prototypes,
            )
            updated.save(own)
    header = {"member": own.name, "round": request.header["round"], **accuracies, **metrics}
    return Message(header, {})


def refuse_what_is_not_allowed(
    terms: TrainingTerms, own: MemberSettings, hidden: bool = False
) -> None:
    """Raise RefusedByMember unless the member's file allows algorithm and protection.

    hidden  whether no upload leaves the member but in a secure sum
    """
    part = terms.part()
    allowed = words(own.algorithms)
    if allowed and part.name not in allowed:
        raise RefusedByMember(
            f"the server requests {part.name}, but this member's `algorithms` are "
            f"{own.algorithms!r}"
        )
    member_privacy.refuse_weak_protection(terms, own, hidden)


def refuse_what_is_not_sent(
    terms: TrainingTerms, own: MemberSettings, layouts: Mapping[str, GroupLayout]
) -> None:
    """Raise RefusedByMember unless the member's file allows what the algorithm sends."""
    kinds = {"class": "prototypes", "client": "weights", "cluster": "weights"}
    needed = [kinds[layout.per] for layout in layouts.values()]
    if terms.part().options.get("weighting") != "uniform":  # with it, every member counts once
        needed.append("counts")
    for kind in needed:
        if kind not in words(own.sends):
            raise RefusedByMember(
                f"{terms.algorithm} sends {kind}, but this member's `sends` are {own.sends!r}"
            )


def load_trained_member(own: MemberSettings) -> TrainedClient:
    """Return the member as a classifier: its model, and the prototypes that it received last."""
    saved = MemberCheckpoint.load(own)
    if saved is None:
        raise RunFolderError(f"{own.name} has not trained yet: {own.state} holds no {STATE_FILE}")
    shared = None
    dim = saved.dim
    if "prototypes" in saved.server:
        values = saved.server["prototypes"]
        dim = values.shape[1]
        shared = Prototypes(saved.classes, values, saved.server["known"], tau=saved.tau)
    federation = build_federation(own, TrainingTerms(dim=dim), saved.classes)
    if federation.classes != saved.classes:
        raise RunFolderError(f"{own.name}'s data has other classes than when it trained")
    client = federation.members[0]
    about = {
        "client": own.name,
        "name": own.title,
        "dataset": client.dataset,
        "model": client.model,
        "round": saved.round,
    }
    params, _ = split_client(saved.state)
    trained = calibrate_client(client, params, saved.classes, shared, about)
    return replace(trained, training=training_rows_of(federation, client))


@dataclass(frozen=True)
class _Participant:
    """A member that is ready for a round: with its data, its state and the server's."""

    own: MemberSettings
    federation: Federation
    client: Member
    algorithm: Algorithm
    layouts: Mapping[str, GroupLayout]
    state: Tree  # the whole one: see `tensors.join_client`
    received: State

    def measure_accuracies(self) -> Header:
        """Return the accuracies for a reply's header; none if the member does not tell them."""
        if not self.own.tell_accuracy:
            return {}
        accuracies = evaluate(self.client, self.algorithm, self.state, self.received)
        return {f"accuracy.{name}": value for name, value in accuracies.items()}

    def measure_metrics(self) -> Header:
        """Return further metrics among all classes for a reply's header, as accuracies are told.

        A metric that is not defined for the member's test rows is left out.
        """
        if not self.own.tell_accuracy:
            return {}
        scores, y = score(self.client, self.algorithm, self.state, self.received)
        measured = self.federation.measure_client(0, scores, y, "test")  # it is alone here
        header: Header = {}
        for way in scores:
            for name, value in measured.ways[way].values.items():
                if name in TOLD_METRICS and math.isfinite(value):
                    header[f"metric.{name}.{way}"] = value
        return header


def _train(
    request: Message,
    own: MemberSettings,
    terms: TrainingTerms,
    saved: MemberCheckpoint | None,
    hidden: bool,
) -> MemberCheckpoint:
    """Train a round, and return what the member's file will hold."""
    participant = _prepare(request, own, terms, saved)
    algorithm = participant.algorithm
    classes = participant.federation.classes
    round = request.header["round"]
    accuracies = participant.measure_accuracies() if round > 1 else {}
    received = participant.received
    if not algorithm.sends_all:
        received = keep_classes(received, participant.federation.own_classes[0])
        for name in ("prototype", "both", "both_own"):  # these need the prototypes of all classes
            accuracies.pop(f"accuracy.{name}", None)
            accuracies.pop(f"accuracy.{name}+teacher", None)
    delivered = request.header.get("delivered", [])
    told: Header = {}
    if terms.privacy != "none":
        releases = member_privacy.list_round_releases(
            terms, participant.client, participant.federation.task, delivered
        )
        member_privacy.reserve(own, request.header, releases)
        told = member_privacy.tell_epsilon(own, request.header)
    outcome = train(
        participant.client,
        algorithm,
        participant.state,
        received,
        terms.training(),
        round,
        once_due=not set(algorithm.once) <= set(delivered),
    )
    finite = outcome.state | flatten_upload(outcome.upload)
    for name, value in finite.items():
        if not torch.isfinite(value).all():
            raise TrainingError(
                f"{own.name}'s training broke down in round {round}: {name} is not finite; "
                "the lr may be too high"
            )
    travelling = outcome.upload if hidden else outcome.wire
    wire = {name: group for name, group in travelling.items() if name not in delivered}
    upload = pack_upload(wire, classes, participant.layouts)
    header = {
        "member": own.name,
        "round": round,
        "federation": request.header.get("federation"),
        **upload.header,
        **accuracies,
        **told,
    }
    if own.site:
        header["site"] = own.site
    if hidden:
        header["hidden"] = True
    # Weights that travel are in the state already; prototypes are needed to classify.
    prototypes = take_prototypes(participant.received)
    reply = Message(header, upload.arrays)
    tau = Tau.of(terms.part().options)
    return MemberCheckpoint(
        round,
        classes,
        outcome.state,
        prototypes,
        reply,
        terms.dim,
        tau,
        number=request.header["number"],
        rows=count_rows(participant.federation),
        history=[] if saved is None else saved.history,
    )


def _prepare(
    request: Message, own: MemberSettings, terms: TrainingTerms, saved: MemberCheckpoint | None
) -> _Participant:
    """Return the member with its saved state, or its initial one, and what the server sent."""
    federation = build_federation(own, terms, tuple(request.header["classes"]))
    client = federation.members[0]
    architecture = _find_architecture(request.header, client.model)
    client = replace(client, id=request.header["number"], architecture=architecture)
    task = federation.task._replace(clients=1, seed=terms.seed)
    algorithm, layouts = _build_algorithm(terms, client, task)
    refuse_what_is_not_sent(terms, own, layouts)
    recipient = federation.recipient(0, all_classes=True)._replace(architecture=architecture)
    initial: State = {architecture: client.initial} if architecture else client.initial
    like = algorithm.send(algorithm.init(initial, task), recipient)
    received = _read_received(request, federation, like)
    state = start_client(algorithm, client.initial, task)
    if saved is not None:
        state = _rearrange(saved, state, federation.classes)
    return _Participant(own, federation, client, algorithm, layouts, state, received)


def _find_architecture(header: Mapping[str, Any], model: str) -> str:
    """Return the name that the server gives the architecture of the member's model.

    It is empty if the server does not tell architectures apart. Raises RefusedByMember if the
    server has no weights of this model.
    """
    if "models" not in header and "architectures" not in header:
        return ""
    models: Any = header.get("models")
    names: Any = header.get("architectures")
    if not _is_list_of_names(models) or not _is_list_of_names(names) or len(models) != len(names):
        raise MessageError("the server's message has 'architectures' that are not names of models'")
    if model not in models:
        raise RefusedByMember(
            f"the server shares weights of the models {', '.join(models)}, but this member's model "
            f"is {model}"
        )
    return names[models.index(model)]


def _is_list_of_names(names: Any) -> bool:
    """Return whether something is a list of plain texts."""
    if not isinstance(names, list):
        return False
    return all(isinstance(name, str) and is_plain(name) for name in names)


def _rearrange(saved: MemberCheckpoint, fresh: Tree, classes: tuple[str, ...]) -> Tree:
    """Return a saved state for a federation whose list of classes may have changed since.

    What the member keeps beside its model is arranged as the model's tensors of the same names.
    """
    missing = sorted(fresh.keys() ^ saved.state.keys())
    if missing:
        raise RunFolderError(
            f"the saved state is of another model or algorithm ({missing[0]}): name another `state`"
        )
    stored = {name: value.to(fresh[name]) for name, value in saved.state.items()}
    own_params, own_kept = split_client(stored)
    fresh_params, fresh_kept = split_client(fresh)
    params = rearrange_head(own_params, fresh_params, saved.classes, classes)
    kept = {}
    for name, tree in own_kept.items():
        kept[name] = rearrange_head(tree, fresh_kept[name], saved.classes, classes)
    return join_client(params, kept)


def _read_received(request: Message, federation: Federation, like: State) -> State:
    """Return what the server sent, in the shapes of `like`."""
    try:
        received = unpack_download(request, federation.classes, like)
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
        raise MessageError(f"the server's message does not fit this member: {error}") from error
    expected = flatten_state(like)
    for name, value in flatten_state(received).items():
        shape = expected[name].shape
        if not torch.isfinite(value).all() or value.shape != shape:
            raise MessageError(
                f"the server sent {name} that is not finite or not of shape {tuple(shape)}"
            )
    return received


def _read_terms(header: dict[str, Any]) -> TrainingTerms:
    """Return how the server wants members to train.

    Checks all of the header, which may come from anybody; raises MessageError or RefusedByMember.
    """
    for key, smallest in _SMALLEST_NUMBERS.items():
        value = header.get(key)
        if type(value) is not int or not smallest <= value < 2**31:
            raise MessageError(
                f"the server's message needs a whole number from {smallest} to 2147483647 "
                f"as {key!r}"
            )
    if "classes" not in header:
        raise MessageError("the server's message names no classes")
    for key in header:
        if key in ("classes", "delivered") or key.partition(".")[0] == "known":
            _check_names(header[key], key)
    if ":" in str(header.get("algorithm")):
        raise RefusedByMember(
            "the server names an algorithm of its own module, which a member never imports"
        )
    for kind in ("transform", "teacher", "feature_map"):
        if ":" in str(header.get(kind)):
            raise RefusedByMember(
                f"the server names a {kind} of its own module, which a member never imports"
            )
    stated = {}
    for field in fields(TrainingTerms):
        if field.name not in header:
            raise MessageError(f"the server's message lacks {field.name!r}")
        stated[field.name] = header[field.name]
    try:
        return parse_settings(TrainingTerms, stated, "the server's message")
    except ConfigError as error:
        raise MessageError(str(error)) from error


def _check_names(names: Any, key: str) -> None:
    """Refuse anything but a list of different, plain names."""
    if not _is_list_of_names(names):
        raise MessageError(f"the server's message has {key!r} that are not a list of names")
    if len(set(names)) < len(names):
        raise MessageError(f"the server's message has {key!r} with a name twice")


def _build_algorithm(
    terms: TrainingTerms, client: Member, task: Task
) -> tuple[Algorithm, dict[str, GroupLayout]]:
    """Return the algorithm that the server names, with its transforms, and what it declares.

    Raises MessageError if there is no such algorithm or transform.
    """
    try:
        algorithm = terms.build()
        layouts = algorithm.declare(client.initial, task)
        private = member_privacy.protect_uploads(terms, algorithm, layouts)
        transformed = terms.transform_uploads(private, layouts)
        name = client.architecture
        if not name:
            return transformed, layouts
        mixed = within_architectures({name: transformed}, {name: layouts}, {name: 1})
        initial: State = {name: client.initial}
        return mixed, mixed.declare(initial, task)
    except ConfigError as error:
        raise MessageError(f"the server's message: {error}") from error
