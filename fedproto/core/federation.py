"""Who takes part: each member's data, model and classes, ready to train.

Members share nothing but class names: each may have its own source, input shape and architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core.dropout import Dropped
from fedproto.core.measurement import MeasuredClient, Metric, measure_scores
from fedproto.core.tensors import move_index
from fedproto.core.types import Recipient, State, Task, Tree

if TYPE_CHECKING:
    from fedproto.data.shared.preprocessing import Preprocessing


#: What a client can be evaluated on.
EvaluatedPart = Literal["test", "validation"]


#: Scores of all clients' rows (rows times classes) that are kept to be ranked together: 20 MB for
#: each named score.
MAX_KEPT_SCORES = 5_000_000


class Examples(NamedTuple):
    """Some rows of a pool of inputs that members of one source share."""

    x: Tensor  # all inputs of the pool, normalised, on the device
    y: Tensor  # the classes of all of them, numbered as in the federation
    rows: Tensor  # the numbers of the rows that are meant
    #: (n, D) the features of all inputs of the pool by the run's feature map, if it has one.
    fixed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self.rows)} rows of {len(self.x)}, each {tuple(self.x.shape[1:])}>"


class FrozenBody(NamedTuple):
    """What a member's module lacks because its body is not trained: see runs/frozen_bodies.py."""

    module: nn.Module  # the whole module
    state: Tree  # the body's parameters and buffers, by their names in the whole module
    shape: tuple[int, ...]  # of one input of the whole module


@dataclass(frozen=True)
class Member:
    """A client of the federation: its data, its model and its classes."""

    id: int
    dataset: str
    model: str  # its name, and the options that are not the defaults
    module: nn.Module  # shared by all members of an architecture; its own parameters are never used
    dropped: tuple[Dropped, ...]  # the module's dropout layers, whose draws are handed in
    initial: Tree  # the parameters and buffers it starts from
    classes: tuple[int, ...]
    train: Examples
    test: Examples
    preprocessing: Preprocessing  # what was done to its inputs
    border: Tensor | None  # (channels,) black, normalised, which pads random crops; None: no crops
    #: Rows to choose the best round by, perhaps none; None: the federation has no validation.
    validation: Examples | None = None
    name: str = ""  # what people call it; its number where nothing else is said
    #: The body whose features are the member's inputs; None: inputs are what the data set has.
    frozen: FrozenBody | None = None
    #: Whose weights the algorithm averages with its own; empty: everybody's, or nobody's.
    architecture: str = ""
    #: Where a row of its source's training set was read, by its number; None: nobody knows.
    place: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", str(self.id))  # frozen for everybody else

    def __repr__(self) -> str:
        rows = f"{len(self.train)} training and {len(self.test)} test rows"
        return f"<client {self.name}: {self.model} on {self.dataset}, {rows}>"

    @property
    def whole_module(self) -> nn.Module:
        """The module with its body, if that is frozen."""
        return self.module if self.frozen is None else self.frozen.module

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input of the whole module."""
        return tuple(self.train.x.shape[1:]) if self.frozen is None else self.frozen.shape

    def whole_state(self, state: Tree) -> Tree:
        """Return a state of the module with that of its body, if that is frozen."""
        return state if self.frozen is None else self.frozen.state | state

    def examples_of(self, part: EvaluatedPart) -> Examples:
        """Return the rows that the client is evaluated on."""
        if part == "test":
            return self.test
        assert self.validation is not None, "the federation has no validation rows"
        return self.validation


@dataclass(frozen=True)
class Federation:
    """The members, the names of all their classes, and how the data was divided among them."""

    classes: tuple[str, ...]
    members: Sequence[Member]
    task: Task
    partition: dict[str, Any]  # the content of partition.json
    from_data: Mapping[str, Any] = field(default_factory=dict)  # partition options set by the data
    #: How many rows are `used`, and how many are `there`, by part: see runs/row_counts.py.
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()  # beside those that are always measured
    notices: tuple[str, ...] = ()  # of the sources, what the user should know about the data

    def __repr__(self) -> str:
        return f"<federation of {len(self.members)} clients and {len(self.classes)} classes>"

    @property
    def device(self) -> torch.device:
        """The device on which all members' data lies."""
        return self.members[0].train.x.device

    @property
    def has_validation(self) -> bool:
        """Whether the best round is chosen by validation rows."""
        return self.members[0].validation is not None

    @cached_property
    def own_classes(self) -> Tensor:
        """(members, C), on the device, 1 where the member has training images of the class."""
        own = torch.zeros(len(self.members), len(self.classes), device=self.device)
        for member in self.members:
            own[member.id, list(member.classes)] = 1
        return own

    def recipient(
        self, client: int, all_classes: bool = False, heard: int | Tensor = 0
    ) -> Recipient:
        """Return one client as a recipient, of its own classes or, to be evaluated, of all."""
        own_classes = self.own_classes[client]
        classes = torch.ones_like(own_classes) if all_classes else own_classes
        number = torch.tensor(client, device=self.device)
        architecture = self.members[client].architecture
        last_heard = torch.as_tensor(heard, device=self.device)
        return Recipient(number, classes, architecture, last_heard)

    @cached_property
    def architectures(self) -> dict[str, list[Member]]:
        """The members of each architecture, by its name, if the algorithm tells them apart."""
        groups: dict[str, list[Member]] = {}
        for member in self.members:
            groups.setdefault(member.architecture, []).append(member)
        return groups if len(groups) > 1 else {}

    @property
    def initial(self) -> State:
        """What an algorithm's `init` and `declare` are given: one tree for each architecture."""
        if not self.architectures:
            return self.members[0].initial
        return {name: members[0].initial for name, members in self.architectures.items()}

    @cached_property
    def _recipients(self) -> Recipient:
        """All clients, each with its own classes."""
        numbers = torch.arange(len(self.members), device=self.device)
        return Recipient(numbers, self.own_classes, "", torch.zeros_like(numbers))

    def recipients(
        self, clients: Tensor, architecture: str = "", heard: Tensor | None = None
    ) -> Recipient:
        """Return some clients, each with its own classes, with a leading axis over them.

        They are recipients of an architecture, whether it is theirs or not.

        heard  (members,) of all clients; see `Recipient`
        """
        number, classes, _, last_heard = self._recipients
        if heard is not None:
            last_heard = heard.to(self.device)
        if len(clients) < len(self.members):
            rows = move_index(clients, self.device)
            number = number[rows]
            classes = classes[rows]
            last_heard = last_heard[rows]
        return Recipient(number, classes, architecture, last_heard)

    def measure_client(
        self, client: int, scores: Tree, y: Tensor, part: EvaluatedPart
    ) -> MeasuredClient:
        """Return the metrics of a client's rows of a part of its data.

        scores  (n, C) each, what the algorithm's `predict` gives
        y       (n,) the classes of the rows
        """
        if not len(y):
            return MeasuredClient({}, None, None)
        arrays = {name: values.detach().cpu().numpy() for name, values in scores.items()}
        labels = y.cpu().numpy()
        own_classes = self.members[client].classes
        ways = measure_scores(arrays, labels, own_classes, self.classes, self.metrics)
        if not self._keeps_scores(part):
            return MeasuredClient(ways, None, None)
        return MeasuredClient(ways, arrays, labels)

    def _keeps_scores(self, part: EvaluatedPart) -> bool:
        """Return whether the scores of all clients' rows are few enough to be kept."""
        rows = sum(len(member.examples_of(part)) for member in self.members)
        return rows * len(self.classes) <= MAX_KEPT_SCORES


def rearrange_head(own: Tree, fresh: Tree, before: tuple[str, ...], now: tuple[str, ...]) -> Tree:
    """Return a member's state for a federation whose classes were `before` and are `now`.

    Each row of the head moves to the new place of its class, or is dropped if the class is gone.
    The rows of new classes are those of `fresh`, a newly drawn state.
    """
    if before == now:
        return own
    kept_rows = [row for row, name in enumerate(before) if name in now]
    new_rows = torch.tensor([now.index(before[row]) for row in kept_rows], dtype=torch.long)
    state = {}
    for name, value in own.items():
        has_class_rows = name.startswith("head.") and value.dim() and len(value) == len(before)
        if has_class_rows:
            places = new_rows.to(value.device)
            state[name] = fresh[name].clone().index_copy(0, places, value[kept_rows])
        else:
            state[name] = value
    return state
