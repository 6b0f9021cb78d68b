"""Federations of several architectures: weights are shared within each, class means across all.

    within_architectures(methods, ...)  the algorithm of such a federation

It is made of the algorithm that each architecture would have if it were alone. The server keeps the
state of each as a tree `@NAME`, and what a client receives is such a tree, too. Groups with one
weight per client (or cluster) are called `GROUP@NAME`, and only clients of that architecture send
them. Groups with one weight per class, or marked `across`, have one name, and every architecture's
server sees those of all clients. What an algorithm declares `common` is kept once: all
architectures agree on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fedproto.core.tensors import (
    SEPARATOR,
    find_mismatch,
    flatten_state,
    map_group,
    split_group_name,
)
from fedproto.core.types import (
    Algorithm,
    Group,
    GroupLayout,
    Phase,
    Recipient,
    SentOnce,
    State,
    Step,
    Task,
    Tree,
    Upload,
)
from fedproto.errors import ConfigError


def name_architectures(models: Iterable[str]) -> list[str]:
    """Return a name for each architecture that fits into the names of groups and files.

    >>> name_architectures(["cnn", "mlp(hidden=8)", "cnn"])
    ['cnn', 'mlp-hidden-8', 'cnn-2']
    """
    names: list[str] = []
    for model in models:
        plain = re.sub("[^A-Za-z0-9]+", "-", model).strip("-") or "model"
        name = plain
        number = 1
        while name in names:
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return names


def describe_shared(
    module: nn.Module, params: Tree, shared: Callable[[str], bool]
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return what the models of two clients must have in common to be of one architecture.

    It is the layers and shapes of the model's parts (`body`, `head`) of which anything travels.
    """
    parts = {name.partition(".")[0] for name in params if shared(name)}
    layers = {name: repr(part) for name, part in module.named_children() if name in parts}
    shapes = {}
    for name, value in params.items():
        if name.partition(".")[0] in parts:
            shapes[name] = tuple(value.shape)
    return layers, shapes


def within_architectures(
    methods: Mapping[str, Algorithm],
    layouts: Mapping[str, Mapping[str, GroupLayout]],
    clients: Mapping[str, int],
) -> Algorithm:
    """Return the algorithm of a federation whose clients have several architectures.

    Its `init` and `declare` take one tree of initial parameters per architecture, by name.

    methods  each architecture's algorithm, with its transforms and combiner, by the same names
    layouts  what each declares
    clients  how many clients have each
    """
    first = next(iter(methods.values()))
    mixed = _Mixed(methods, layouts, clients, first.common)
    once = []
    for name in first.once:
        once += [mixed.name_group(name, architecture) for architecture in methods]
    lifted = replace(
        first,
        init=mixed.init,
        declare=mixed.declare,
        send=mixed.send,
        adopt=mixed.adopt,
        loss=lambda step: mixed.call("loss", step),
        phases=tuple(mixed.open_phase(number) for number in range(len(first.phases))),
        upload=mixed.upload,
        upload_once=mixed.open_upload_once(),
        aggregate=mixed.aggregate,
        aggregate_once=None if first.aggregate_once is None else mixed.aggregate_once,
        predict=lambda step: mixed.call("predict", step),
        client_start=mixed.client_start,
        client_update=lambda step: mixed.call("client_update", step),
        client_adopt=None if first.client_adopt is None else mixed.client_adopt,
        client_validate=mixed.open_validation(),
        once=tuple(dict.fromkeys(once)),
        notes=mixed.notes,
        metrics=mixed.metrics,
    )
    if first.encode is None:
        return lifted
    return replace(lifted, encode=mixed.encode, decode=mixed.decode, check=mixed.check)


@dataclass(frozen=True)
class _Mixed:
    """The functions of `within_architectures`."""

    methods: Mapping[str, Algorithm]
    layouts: Mapping[str, Mapping[str, GroupLayout]]
    clients: Mapping[str, int]
    common: tuple[str, ...]

    # --- states and names

    def pack(self, architecture: str, state: State) -> State:
        """Return a state or a download of one architecture: what is common, and a tree."""
        common = {name: value for name, value in state.items() if name in self.common}
        own = {name: value for name, value in state.items() if name not in common}
        return common | {SEPARATOR + architecture: own}

    def unpack(self, state: State, architecture: str) -> State:
        """Return what one architecture's algorithm knows of a state."""
        common = {name: value for name, value in state.items() if name in self.common}
        return common | state.get(SEPARATOR + architecture, {})

    def open(self, received: State) -> tuple[str, State]:
        """Return the architecture of whoever received this, and what its algorithm sent."""
        for name in received:
            if name.startswith(SEPARATOR):
                architecture = name.removeprefix(SEPARATOR)
                return architecture, self.unpack(received, architecture)
        return next(iter(self.methods)), received  # no weights are sent: all are alike

    def open_step(self, step: Step) -> tuple[str, Step]:
        """Return the architecture of the client, and the step as its algorithm knows it."""
        architecture, received = self.open(step.received)
        return architecture, step._replace(received=received)

    def name_group(self, group: str, architecture: str) -> str:
        """Return what a group of an architecture's algorithm is called among those of all."""
        layout = self.layouts[architecture].get(group)
        if layout is None or layout.per == "class" or layout.across:
            return group
        return f"{group}{SEPARATOR}{architecture}"

    def name_groups(self, upload: Mapping[str, Any], architecture: str) -> dict[str, Any]:
        """Return groups, or their layouts, by their names among those of all architectures."""
        return {self.name_group(name, architecture): group for name, group in upload.items()}

    # --- the server

    def init(self, params: Mapping[str, Any], task: Task) -> State:
        state: State = {}
        for architecture, method in self.methods.items():
            own_task = task._replace(clients=self.clients[architecture], everybody=task.numbers)
            packed = self.pack(architecture, method.init(params[architecture], own_task))
            found = {name: packed[name] for name in self.common if name in packed}
            wanted = {name: state[name] for name in self.common if name in state}
            mismatch = find_mismatch(flatten_state(wanted), flatten_state(found))
            if state and mismatch is not None:
                raise ConfigError(
                    f"{method.name} starts from different values for architecture {architecture} "
                    f"and for the others: {mismatch}"
                )
            state = packed | state
        return state

    def declare(self, params: Mapping[str, Any], task: Task) -> dict[str, GroupLayout]:
        declared: dict[str, GroupLayout] = {}
        for architecture, method in self.methods.items():
            own = self.name_groups(method.declare(params[architecture], task), architecture)
            for name, layout in own.items():
                if declared.setdefault(name, layout) != layout:
                    raise ConfigError(
                        f"{method.name} declares the group {name} differently for architecture "
                        f"{architecture}, but all architectures share it"
                    )
        return declared

    def send(self, server: State, recipient: Recipient) -> State:
        architecture = recipient.architecture
        state = self.unpack(server, architecture)
        return self.pack(architecture, self.methods[architecture].send(state, recipient))

    def aggregate(self, server: State, uploads: Upload) -> State:
        state = dict(server)
        for architecture, method in self.methods.items():
            own_uploads = self._select(uploads, architecture)
            if own_uploads:
                own_state = method.aggregate(self.unpack(server, architecture), own_uploads)
                state |= self.pack(architecture, own_state)
        return state

    def aggregate_once(self, server: State, sent_once: SentOnce) -> State:
        """Groups that all architectures share are aggregated by the first one for all.

        What is made of them is `common`.
        """
        state = dict(server)
        for place, (architecture, method) in enumerate(self.methods.items()):
            own = [name for name in method.once if self.name_group(name, architecture) != name]
            if place and not own:
                continue
            groups = {}
            for name in method.once:
                groups[name] = sent_once.groups[self.name_group(name, architecture)]
            assert method.aggregate_once is not None
            own_state = method.aggregate_once(
                self.unpack(state, architecture), sent_once._replace(groups=groups)
            )
            state |= self.pack(architecture, own_state)
        return state

    def _select(self, uploads: Upload, architecture: str) -> Upload:
        """Return the groups that one architecture's server sees; none if none of its clients spoke.

        Uploads that are stacked have rows without a weight for clients of other architectures.
        """
        selected: Upload = {}
        has_own_groups = False
        speakers = 0
        for group in self.layouts[architecture]:
            name = self.name_group(group, architecture)
            is_own = name != group
            has_own_groups = has_own_groups or is_own
            if name in uploads:
                selected[group] = _leave_out_silent(uploads[name]) if is_own else uploads[name]
                speakers += len(selected[group].weight) if is_own else 0
        return selected if speakers or not has_own_groups else {}

    def notes(self, server: State) -> list[str]:
        said: dict[str, list[str]] = {}
        for architecture, method in self.methods.items():
            for sentence in method.notes(self.unpack(server, architecture)):
                said.setdefault(sentence, []).append(architecture)
        sentences = []
        for sentence, architectures in said.items():
            is_common = len(architectures) == len(self.methods)
            where = "" if is_common else f" ({', '.join(architectures)})"
            sentences.append(sentence + where)
        return sentences

    def metrics(self, server: State) -> dict[str, float]:
        found = {}
        for architecture, method in self.methods.items():
            for name, value in method.metrics(self.unpack(server, architecture)).items():
                found[f"{name}{SEPARATOR}{architecture}"] = value
        return found

    # --- the client

    def call(self, function: str, step: Step) -> Any:
        """Return what a function of the client's algorithm makes of a step."""
        architecture, own_step = self.open_step(step)
        return getattr(self.methods[architecture], function)(own_step)

    def open_phase(self, number: int) -> Phase:
        """Return a phase of local training, whose loss sees what the algorithm sent."""
        phase = next(iter(self.methods.values())).phases[number]
        loss = phase.loss
        if loss is None:
            return phase
        return replace(phase, loss=lambda step: loss(self.open_step(step)[1]))

    def open_validation(self) -> Callable[[Step], State] | None:
        """Return `client_validate`, if clients choose anything by their validation rows."""
        if next(iter(self.methods.values())).client_validate is None:
            return None
        return lambda step: self.call("client_validate", step)

    def adopt(self, own: Tree, received: State) -> Tree:
        architecture, inner = self.open(received)
        return self.methods[architecture].adopt(own, inner)

    def client_adopt(self, own: Tree, received: State, kept: State) -> Tree:
        architecture, inner = self.open(received)
        return self.methods[architecture].start_from(own, inner, kept)

    def client_start(self, state: State, received: State) -> State:
        architecture, inner = self.open(received)
        return self.methods[architecture].client_start(state, inner)

    def upload(self, step: Step) -> Upload:
        architecture, own_step = self.open_step(step)
        return self.name_groups(self.methods[architecture].upload(own_step), architecture)

    def open_upload_once(self) -> Callable[[Step], Upload] | None:
        """Return `upload_once`, if there are groups that it computes."""
        if next(iter(self.methods.values())).upload_once is None:
            return None
        return self._upload_once

    def _upload_once(self, step: Step) -> Upload:
        architecture, own_step = self.open_step(step)
        compute = self.methods[architecture].upload_once
        assert compute is not None
        return self.name_groups(compute(own_step), architecture)

    def encode(self, upload: Upload, step: Step) -> Upload:
        architecture, own_step = self.open_step(step)
        encode = self.methods[architecture].encode
        assert encode is not None
        return self.name_groups(encode(_inner_names(upload), own_step), architecture)

    def decode(self, wire: Upload, received: State) -> Upload:
        architecture, inner = self.open(received)
        decode = self.methods[architecture].decode
        assert decode is not None
        return self.name_groups(decode(_inner_names(wire), inner), architecture)

    def check(self, wire: Upload) -> None:
        named = {split_group_name(name)[1] for name in wire} - {""}
        architecture = min(named, default=next(iter(self.methods)))
        if len(named) > 1 or architecture not in self.methods:
            accepted = ", ".join(self.methods)
            raise ValueError(f"its groups are not those of one architecture: {accepted}")
        check = self.methods[architecture].check
        if check is not None:
            check(_inner_names(wire))


def _inner_names(upload: Upload) -> Upload:
    """Return the groups of one client by their names within its architecture."""
    return {split_group_name(name)[0]: group for name, group in upload.items()}


def _leave_out_silent(group: Group) -> Group:
    """Return a stacked group without the speakers that have no weight in it."""
    speaks = (group.weight > 0).reshape(len(group.weight), -1).any(1)
    if speaks.all():
        return group
    rows = speaks.nonzero().flatten()
    return map_group(group, lambda value: value[rows])
