"""The server's state before the first round, and what a member's upload looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fedproto.config import plugins
from fedproto.config.choices import complete, parse_choices
from fedproto.config.options import PositiveInt, convert, words
from fedproto.core.architectures import (
    describe_shared,
    name_architectures,
    within_architectures,
)
from fedproto.core.codec import split_trees
from fedproto.core.tensors import flatten_state, split_group_name, unflatten_state
from fedproto.core.types import (
    Algorithm,
    Batch,
    Group,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Upload,
    nothing,
)
from fedproto.deploy.member_privacy import refuse_unprotectable
from fedproto.deploy.server_privacy import SumPrivacy, plan_sum_privacy
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.deploy.validation import UploadLayout, describe_upload
from fedproto.errors import ConfigError
from fedproto.models import Fit
from fedproto.privacy.mechanism import protect
from fedproto.runs.client_modules import copy_state, draw_model


@dataclass(frozen=True)
class ServerStart:
    """What a server's algorithm starts from, for any number of classes."""

    algorithm: Algorithm
    #: Initial weights, by architecture if there are several; a stand-in where no weights travel.
    params: State
    task: Task  # without classes
    #: The architecture of each model that members may have; empty unless there are several.
    models: Mapping[str, str] = field(default_factory=dict)
    privacy: SumPrivacy | None = None  # the noise that the server adds, if any

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names of the architectures; one empty name if they are not told apart."""
        return tuple(dict.fromkeys(self.models.values())) or ("",)

    def task_of(self, classes: int) -> Task:
        """Return the task of a federation with this many classes."""
        return self.task._replace(classes=classes)

    def init(self, classes: int) -> State:
        """Return the server's state before the first round, over this many classes."""
        # There may be no classes yet, which no algorithm expects: it starts with one, which goes.
        state = self.algorithm.init(self.params, self.task_of(max(1, classes)))
        return state if classes else _without_rows(state, self.class_rows)

    @cached_property
    def class_rows(self) -> frozenset[str]:
        """The flat names of the server's tensors that have one row for each class."""
        smaller, larger = self._shapes_of_two_and_three
        return frozenset(name for name in smaller if smaller[name] != larger[name])

    @cached_property
    def _shapes_of_two_and_three(self) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
        """The shapes of the server's tensors, by their flat names, over two and three classes."""
        return self._shapes_of(2), self._shapes_of(3)

    def _shapes_of(self, classes: int) -> dict[str, torch.Size]:
        state = self.algorithm.init(self.params, self.task_of(classes))
        return {name: value.shape for name, value in flatten_state(state).items()}

    @cached_property
    def client_counts(self) -> frozenset[str]:
        """The flat names of the server's numbers that are the number of members."""
        clients = self.task.clients
        task = self.task_of(2)
        fewer = flatten_state(self.algorithm.init(self.params, task))
        more = flatten_state(self.algorithm.init(self.params, task._replace(clients=clients + 1)))
        names = set()
        for name, value in fewer.items():
            is_count = value.dim() == 0 and value == clients and more[name] == clients + 1
            if is_count:
                names.add(name)
        return frozenset(names)

    @cached_property
    def can_grow(self) -> bool:
        """Whether classes can be added: only the first axis of a tensor is over classes.

        A head that travels has one row per class, from the start. So have the class prototypes
        that are sent without `known`.
        """
        if any(map(self.algorithm.shared, self._names_of_heads())):
            return False
        if self._sent_for_all_classes(2) != self._sent_for_all_classes(3):
            return False
        smaller, larger = self._shapes_of_two_and_three
        rows_fit = all(smaller[name][1:] == larger[name][1:] for name in smaller)
        shapes = [layout.shapes for layout in self.declare(2).values()]
        return rows_fit and shapes == [layout.shapes for layout in self.declare(3).values()]

    def _sent_for_all_classes(self, classes: int) -> dict[str, list[torch.Size]]:
        """Return the shapes of the trees that are sent as a whole, whatever is known of classes."""
        received: State = {}
        for architecture in self.architectures:
            recipient = Recipient(torch.tensor(0), torch.ones(classes), architecture)
            received |= self.algorithm.send(self.init(classes), recipient)
        shapes = {}
        for name, tree in split_trees(received).items():
            if "known" not in tree:
                shapes[name] = [value.shape for value in tree.values()]
        return shapes

    def _names_of_heads(self) -> list[str]:
        """Return the names of the parameters of the models' heads."""
        trees = self.params.values() if self.models else [self.params]
        return [name for tree in trees for name in tree if name.startswith("head.")]

    def declare(self, classes: int) -> dict[str, GroupLayout]:
        """Return the layouts of an upload's groups."""
        return self.algorithm.declare(self.params, self.task_of(classes))

    def describe_messages(self, classes: int) -> UploadLayout:
        """Return what the messages of an upload look like."""
        layouts = self.declare(max(1, classes))
        if not layouts:
            raise ConfigError(f"{self.algorithm.name} sends nothing, so there is nothing to deploy")
        described: UploadLayout = {}
        for architecture in self.architectures:
            described |= self._describe_architecture(architecture, layouts, max(1, classes))
        return described

    def _describe_architecture(
        self, architecture: str, layouts: Mapping[str, GroupLayout], classes: int
    ) -> UploadLayout:
        """Return what the messages of an upload from a member of an architecture look like."""
        own = of_architecture(layouts, architecture)
        upload = make_template(own)
        if self.algorithm.encode is not None:
            recipient = Recipient(torch.tensor(0), torch.ones(classes), architecture)
            received = self.algorithm.send(self.init(classes), recipient)
            empty = torch.empty(0)
            batch = Batch(empty, torch.zeros(0, dtype=torch.long), empty)
            params = self.params[architecture] if architecture else self.params
            upload = self.algorithm.encode(upload, Step(params, empty, empty, batch, received))
        return describe_upload(upload, own)


def start_server(
    algorithm: Algorithm, terms: TrainingTerms, settings: ServerSettings, classes: tuple[str, ...]
) -> ServerStart:
    """Return what the server starts from; its algorithm transforms uploads as the terms say.

    Raises ConfigError if the settings say too little, or if the algorithm sends nothing.
    """
    members = len(words(settings.members)) or settings.quorum
    task = Task(0, terms.dim, members, terms.seed, terms.count_fixed(algorithm))
    models: dict[str, str] = {}
    params: State
    if algorithm.shared is not nothing:
        params, models = _draw_weights(algorithm, terms, settings, len(classes))
    elif terms.dim:
        params = {"any": torch.zeros(1)}
    else:
        raise ConfigError(
            "dim, the number of values of a prototype, must be set: "
            "the server does not take it from a member"
        )
    start = ServerStart(algorithm, params, task, models)
    _refuse_rows_of_members(start)
    of_one = next(iter(params.values())) if models else params
    refuse_unprotectable(terms, algorithm, algorithm.declare(of_one, start.task_of(2)))
    if models and terms.privacy == "client":
        raise ConfigError("privacy=client needs members of one model, but `model` lists several")
    if models:
        return _tell_architectures_apart(start, terms, max(1, len(classes)))
    layouts = start.declare(max(1, len(classes)))
    privacy = plan_sum_privacy(terms, settings, algorithm, layouts)
    transformed = terms.transform_uploads(algorithm, layouts)
    if privacy is not None:
        transformed = protect(algorithm, privacy.protection, layouts)
    return replace(start, algorithm=transformed, privacy=privacy)


def _refuse_rows_of_members(start: ServerStart) -> None:
    """Raise ConfigError if the server would keep something for each member: they come and go."""
    params = next(iter(start.params.values())) if start.models else start.params
    task = start.task_of(2)
    one_more = task._replace(clients=task.clients + 1)
    fewer = flatten_state(start.algorithm.init(params, task))
    more = flatten_state(start.algorithm.init(params, one_more))
    for name, value in fewer.items():
        if value.shape != more[name].shape:
            raise ConfigError(
                f"the server of {start.algorithm.name} keeps {name} for each member, but their "
                "number may change, so it cannot be deployed; closed forms can, with individual=0"
            )


def _tell_architectures_apart(
    start: ServerStart, terms: TrainingTerms, classes: int
) -> ServerStart:
    """Return what the server starts from if members have several architectures."""
    algorithm = start.algorithm
    methods = {}
    layouts = {}
    for name, params in start.params.items():
        if ServerStart(algorithm, params, start.task).client_counts:
            raise ConfigError(
                f"{algorithm.name} divides by the number of members of an architecture, which a "
                "server does not know beforehand: deploy it with one `model`"
            )
        layouts[name] = algorithm.declare(params, start.task_of(classes))
        methods[name] = terms.transform_uploads(algorithm, layouts[name])
    clients = dict.fromkeys(methods, start.task.clients)
    return replace(start, algorithm=within_architectures(methods, layouts, clients))


def of_architecture(groups: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return those of an upload's groups, or of what belongs to each, that a member sends."""
    accepted = ("", architecture)
    return {name: each for name, each in groups.items() if split_group_name(name)[1] in accepted}


def make_template(layouts: Mapping[str, GroupLayout]) -> Upload:
    """Return an upload of zeros, with a weight of 1 everywhere."""
    upload = {}
    for name, layout in layouts.items():
        rows = layout.weight_shape
        sums = {key: torch.zeros(rows + shape) for key, shape in layout.shapes.items()}
        counts = {key: torch.ones(rows) for key in layout.counts}
        upload[name] = Group(sums, torch.ones(rows), counts)
    return upload


def _without_rows(state: State, names: frozenset[str]) -> State:
    """Return a state in which the named tensors have no rows."""
    flat = flatten_state(state)
    for name in names:
        flat[name] = flat[name][:0]
    return unflatten_state(flat)


def _draw_weights(
    algorithm: Algorithm, terms: TrainingTerms, settings: ServerSettings, classes: int
) -> tuple[State, dict[str, str]]:
    """Return the initial weights, which all members draw as well, where weights travel.

    If the models that the settings name are of several architectures, they are one tree for each,
    and the names of the models' architectures come with them.
    """
    if not settings.model or not settings.shape:
        raise ConfigError(
            f"{terms.algorithm} shares weights: the server needs `model` and `shape`, "
            "such as '1,28,28'"
        )
    shape = tuple(convert("shape", settings.shape, tuple[PositiveInt, ...]))
    fit = Fit(shape, classes, terms.dim or None)
    drawn: dict[str, nn.Module] = {}
    for part in parse_choices("model", settings.model):
        model = complete("model", part, {}, {})
        drawn[plugins.short("model", model)] = draw_model(model, fit, terms.seed)
    first_of: dict[str, str] = {}  # the first model of the same architecture
    for model_name, module in drawn.items():
        wanted = describe_shared(module, copy_state(module), algorithm.shared)
        for other, other_module in drawn.items():
            if describe_shared(other_module, copy_state(other_module), algorithm.shared) == wanted:
                first_of[model_name] = other
                break
    firsts = list(dict.fromkeys(first_of.values()))
    if len(firsts) == 1:
        return copy_state(drawn[firsts[0]]), {}
    names = dict(zip(firsts, name_architectures(firsts), strict=True))
    params = {names[first]: copy_state(drawn[first]) for first in firsts}
    return params, {model_name: names[first] for model_name, first in first_of.items()}
