"""The server's state before the first round, and what a member's upload looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fedproto.config.choices import complete, parse_choice
from fedproto.config.options import PositiveInt, convert, words
from fedproto.core.codec import split_trees
from fedproto.core.tensors import flatten_state, unflatten_state
from fedproto.core.types import (
    Algorithm,
    Batch,
    Group,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    nothing,
)
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.deploy.validation import UploadLayout, describe_upload
from fedproto.errors import ConfigError
from fedproto.models import Fit
from fedproto.runs.client_modules import copy_state, draw_model


@dataclass(frozen=True)
class ServerStart:
    """What a server's algorithm starts from, for any number of classes."""

    algorithm: Algorithm
    params: Tree  # initial weights; a stand-in where no weights travel
    task: Task  # without classes

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
        if any(map(self.algorithm.shared, _names_of_head(self.params))):
            return False
        if self._sent_for_all_classes(2) != self._sent_for_all_classes(3):
            return False
        smaller, larger = self._shapes_of_two_and_three
        rows_fit = all(smaller[name][1:] == larger[name][1:] for name in smaller)
        shapes = [layout.shapes for layout in self.declare(2).values()]
        return rows_fit and shapes == [layout.shapes for layout in self.declare(3).values()]

    def _sent_for_all_classes(self, classes: int) -> dict[str, list[torch.Size]]:
        """Return the shapes of the trees that are sent as a whole, whatever is known of classes."""
        recipient = Recipient(torch.tensor(0), torch.ones(classes))
        received = self.algorithm.send(self.init(classes), recipient)
        shapes = {}
        for name, tree in split_trees(received).items():
            if "known" not in tree:
                shapes[name] = [value.shape for value in tree.values()]
        return shapes

    def declare(self, classes: int) -> dict[str, GroupLayout]:
        """Return the layouts of an upload's groups."""
        return self.algorithm.declare(self.params, self.task_of(classes))

    def describe_messages(self, classes: int) -> UploadLayout:
        """Return what the messages of an upload look like."""
        layouts = self.declare(max(1, classes))
        if not layouts:
            raise ConfigError(f"{self.algorithm.name} sends nothing, so there is nothing to deploy")
        upload = make_template(layouts)
        if self.algorithm.encode is not None:
            server = self.init(max(1, classes))
            recipient = Recipient(torch.tensor(0), torch.ones(max(1, classes)))
            received = self.algorithm.send(server, recipient)
            empty = torch.empty(0)
            batch = Batch(empty, torch.zeros(0, dtype=torch.long), empty)
            upload = self.algorithm.encode(upload, Step(self.params, empty, empty, batch, received))
        return describe_upload(upload, layouts)


def start_server(
    algorithm: Algorithm, terms: TrainingTerms, settings: ServerSettings, classes: tuple[str, ...]
) -> ServerStart:
    """Return what the server starts from; its algorithm transforms uploads as the terms say.

    Raises ConfigError if the settings say too little, or if the algorithm sends nothing.
    """
    members = len(words(settings.members)) or settings.quorum
    task = Task(0, terms.dim, members, terms.seed, terms.count_fixed(algorithm))
    if algorithm.shared is not nothing:
        params = _draw_weights(terms, settings, len(classes))
    elif terms.dim:
        params = {"any": torch.zeros(1)}
    else:
        raise ConfigError(
            "dim, the number of values of a prototype, must be set: "
            "the server does not take it from a member"
        )
    start = ServerStart(algorithm, params, task)
    layouts = start.declare(max(1, len(classes)))
    return replace(start, algorithm=terms.transform_uploads(algorithm, layouts))


def _names_of_head(params: Tree) -> list[str]:
    """Return the names of the parameters of a model's head."""
    return [name for name in params if name.startswith("head.")]


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


def _draw_weights(terms: TrainingTerms, settings: ServerSettings, classes: int) -> Tree:
    """Return the initial weights, which all members draw as well, where weights travel."""
    if not settings.model or not settings.shape:
        raise ConfigError(
            f"{terms.algorithm} shares weights: the server needs `model` and `shape`, "
            "such as '1,28,28'"
        )
    model = complete("model", parse_choice("model", settings.model), {}, {})
    shape = tuple(convert("shape", settings.shape, tuple[PositiveInt, ...]))
    fit = Fit(shape, classes, terms.dim or None)
    return copy_state(draw_model(model, fit, terms.seed))
