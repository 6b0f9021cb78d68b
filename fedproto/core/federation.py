"""Who takes part: each member's data, model and classes, ready to train.

Members share nothing but class names: each may have its own source, input shape and architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core.dropout import Dropped
from fedproto.core.types import Task, Tree

if TYPE_CHECKING:
    from fedproto.data.shared.preprocessing import Preprocessing


class Examples(NamedTuple):
    """Some rows of a pool of inputs that members of one source share."""

    x: Tensor  # all inputs of the pool, normalised, on the device
    y: Tensor  # the classes of all of them, numbered as in the federation
    rows: Tensor  # the numbers of the rows that are meant

    def __len__(self) -> int:
        return len(self.rows)


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


@dataclass(frozen=True)
class Federation:
    """The members, the names of all their classes, and how the data was divided among them."""

    classes: tuple[str, ...]
    members: Sequence[Member]
    task: Task
    partition: dict[str, Any]  # the content of partition.json
    from_data: Mapping[str, Any] = field(default_factory=dict)  # partition options set by the data
    notices: tuple[str, ...] = ()  # what the user should know about the data

    @property
    def device(self) -> torch.device:
        """The device on which all members' data lies."""
        return self.members[0].train.x.device

    @cached_property
    def own_classes(self) -> Tensor:
        """(members, C), on the device, 1 where the member has training images of the class."""
        own = torch.zeros(len(self.members), len(self.classes), device=self.device)
        for member in self.members:
            own[member.id, list(member.classes)] = 1
        return own


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
