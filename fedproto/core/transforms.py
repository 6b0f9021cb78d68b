"""Transforms are to uploads what optax's transformations are to gradients.

The client part of a transform says what travels of an upload (clipped values, codes of eight bits,
the largest values and their places), and how the server gets values back. The server part, if there
is one, changes what all clients' uploads were combined to, and may keep a state. An algorithm gets
its transforms in core/transform_chains.py.

A client part works on the *values* of one group, sums / weight. Of a `relative` group (weights of a
model) these are the changes from what the client received. Tensors have the group's axis of rows
first, if it has one. A row without a weight has zeros, and whatever is made of it counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fedproto.core.types import GroupLayout, State, Task, Tree, Upload

#: Shapes of one row's values, by name.
Shapes = Mapping[str, tuple[int, ...]]


class Context(NamedTuple):
    """What the client part of a transform may know."""

    layout: GroupLayout  # of the group
    key: Tensor  # () randomness of (seed, round, client), of this group and this transform
    received: State  # what the server sent this client

    @property
    def row_axes(self) -> int:
        """The number of leading axes over rows: 1, or 0 if there is one weight per client."""
        return len(self.layout.weight_shape)


class ServerContext(NamedTuple):
    """What the server part of a transform may know."""

    layouts: Mapping[str, GroupLayout]  # of every group
    key: Tensor  # () randomness of (seed, number of aggregations so far), of this transform


class Encoded(NamedTuple):
    """What travels of a group's values."""

    values: Tree  # in the place of the values, by the same names
    #: What else `decode` needs, by `NAME/WORD`, such as `prototypes/scale`. It travels as it is.
    side: Tree


def _same_values(values: Tree, side: Tree, shapes: Shapes) -> Tree:
    return values


def _accept_all(values: Tree, side: Tree, shapes: Shapes) -> None:
    return None


@dataclass(frozen=True)
class Transform:
    """A change of what travels, at the client, at the server or at both.

    `encode` and `decode` are run for many clients at once by `torch.func.vmap`: they must not
    branch on the values of tensors, and draw only from `context.key`.

    name     as in `--transform`
    encode   (values, context) -> what travels; None: the values themselves
    decode   (values, side, shapes) -> values; `shapes` are those of one row of what `encode` was
             given
    check    (values, side, shapes) -> None; raises ValueError with the end of a sentence if
             `decode` must not be given this. It is called for uploads that may come from anybody,
             one at a time. Names, shapes and types have been checked before; a float may be
             anything

    A transform may have a server part:

    server   (state, uploads, context) -> the new state, and the uploads that are aggregated
    init     task -> the first state
    metrics  state -> numbers for this round's line of metrics.jsonl
    needs    "sum": `server` is given the sum over all clients, with a leading axis of 1;
             "each": it is given single uploads, with a leading axis over the clients
    """

    name: str
    encode: Callable[[Tree, Context], Encoded] | None = None
    decode: Callable[[Tree, Tree, Shapes], Tree] = _same_values
    check: Callable[[Tree, Tree, Shapes], None] = _accept_all
    server: Callable[[State, Upload, ServerContext], tuple[State, Upload]] | None = None
    init: Callable[[Task], State] = lambda task: {}
    metrics: Callable[[State], dict[str, float]] = lambda state: {}
    needs: Literal["sum", "each"] = "sum"
