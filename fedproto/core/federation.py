"""Who takes part: each member's data, model and classes, ready to train.

Members share nothing but class names: each may come from another source, with another input shape and architecture.
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
    from fedproto.data.shared.preprocessing import Preparation


class Examples(NamedTuple):
    """Rows of a pool of inputs that members of one source share: normalised, on the device, labels federation-wide."""

    x: Tensor
    y: Tensor
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Member:
    id: int
    dataset: str
    model: str  # its name, and the options that are not the defaults
    module: nn.Module  # one object for all members of an architecture; its own parameters are never used
    dropped: tuple[Dropped, ...]  # what the module's dropout layers want to be handed
    initial: Tree
    classes: tuple[int, ...]
    train: Examples
    test: Examples
    preparation: Preparation  # what was done to its inputs
    border: Tensor | None  # black, normalised, per channel: what random crops see beyond the edge; None: no crops


@dataclass(frozen=True)
class Federation:
    classes: tuple[str, ...]
    members: Sequence[Member]
    task: Task
    partition: dict[str, Any]  # the content of partition.json
    from_data: Mapping[str, Any] = field(default_factory=dict)  # options of the partition that the data filled in

    @property
    def device(self) -> torch.device:
        return self.members[0].train.x.device

    @cached_property
    def own_classes(self) -> Tensor:
        """(members, C), on the device, 1 where the member has training images of the class."""
        own = torch.zeros(len(self.members), len(self.classes), device=self.device)
        for member in self.members:
            own[member.id, list(member.classes)] = 1
        return own


def placed_by_class(own: Tree, fresh: Tree, before: tuple[str, ...], now: tuple[str, ...]) -> Tree:
    """Somebody's state where there are other classes now: each row of its head goes where its class is, or nowhere
    if that is gone; others are `fresh`, as drawn."""
    if before == now:
        return own
    stay = [row for row, name in enumerate(before) if name in now]
    places = torch.tensor([now.index(before[row]) for row in stay], dtype=torch.long)

    def placed(name: str, value: Tensor) -> Tensor:
        is_rows = name.startswith("head.") and value.dim() and len(value) == len(before)
        return fresh[name].clone().index_copy(0, places.to(value.device), value[stay]) if is_rows else value

    return {name: placed(name, value) for name, value in own.items()}
