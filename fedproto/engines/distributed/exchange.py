"""Messages and trees of tensors between the processes of one run."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedproto.core.tensors import concatenate_rows
from fedproto.core.types import Tree
from fedproto.errors import KnownToAllError, LostProcessError, TrainingError

#: One rank may train for hours while the others wait. A process that dies is noticed at once, by
#: its closed connection.
COLLECTIVE_TIMEOUT = timedelta(days=7)
#: The exit code of a worker that ends because it lost the others, so it was not the first to end.
LOST_OTHERS_EXIT_CODE = 3
LOST_PROCESSES = (
    "processes of this run were lost, and the states of their clients with them: "
    "resume from the last checkpoint"
)

Result = TypeVar("Result")
Report = TypeVar("Report")


class TensorLayout(NamedTuple):
    """The name, shape, type and device of one tensor of a tree."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


Layout = tuple[TensorLayout, ...]


class Order(NamedTuple):
    """What all ranks are to do next; trees of the given layouts follow."""

    method: str
    arguments: tuple[Any, ...]
    layouts: list[Layout]


# --- errors


@contextmanager
def unwrap_known_errors() -> Iterator[None]:
    """Turn a KnownToAllError into the error that it carries."""
    try:
        yield
    except KnownToAllError as failed:
        raise failed.error from failed.error.__cause__


@contextmanager
def lost_connections_named() -> Iterator[None]:
    """Turn torch's RuntimeError about a closed connection into a LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(LOST_PROCESSES) from error


# --- trees as flat buffers: few messages, whatever the trees hold


def describe_tree(tree: Tree) -> Layout:
    """Return the layout of a tree."""
    layouts = []
    for name, value in tree.items():
        layouts.append(TensorLayout(name, tuple(value.shape), value.dtype, value.device.type))
    return tuple(layouts)


def _merge_layouts(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of everything that any of the ranks has."""
    merged: dict[str, TensorLayout] = {}
    for layout in layouts:
        for tensor in layout:
            merged.setdefault(tensor.name, tensor)
    return tuple(merged.values())


def _flatten(layout: Layout, tree: Tree) -> list[Tensor]:
    """Return the tree's values end to end, one buffer for each type and device.

    What the tree lacks is zero.
    """
    parts: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    for name, shape, dtype, device in layout:
        if name in tree:
            value = tree[name]
        else:
            value = torch.zeros(shape, dtype=dtype, device=device)
        parts.setdefault((dtype, device), []).append(value.detach().reshape(-1))
    return [torch.cat(values) for values in parts.values()]


def _unflatten(layout: Layout, buffers: list[Tensor]) -> Tree:
    """Return the tree that `_flatten` was given."""
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in layout)
    remaining = dict(zip(kinds, buffers, strict=True))
    tree = {}
    for name, shape, dtype, device in layout:
        buffer = remaining[dtype, device]
        length = math.prod(shape)
        tree[name] = buffer[:length].view(shape)
        remaining[dtype, device] = buffer[length:]
    return tree


# --- collectives, which all ranks enter together


@lost_connections_named()
def broadcast_order(order: Order | None) -> Order | None:
    """Return rank 0's order, on all ranks; None if there will be no further one."""
    box = [order]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@lost_connections_named()
def gather_from_all(value: Any) -> list[Any]:
    """Return every rank's value, by rank, on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@lost_connections_named()
def broadcast_tree(layout: Layout, tree: Tree) -> Tree:
    """Return rank 0's tree, on all ranks.

    It is sent as bytes, since not every backend knows every type.
    """
    buffers = _flatten(layout, tree)
    for buffer in buffers:
        dist.broadcast(buffer.view(torch.uint8), src=0)
    return _unflatten(layout, buffers)


@lost_connections_named()
def sum_trees(layouts: Sequence[Layout], tree: Tree) -> Tree:
    """Return the sum of all ranks' trees, on all ranks; what a rank lacks counts as zero."""
    layout = _merge_layouts(layouts)
    buffers = _flatten(layout, tree)
    for buffer in buffers:
        dist.all_reduce(buffer)
    return _unflatten(layout, buffers)


@lost_connections_named()
def gather_trees(layouts: Sequence[Layout], tree: Tree) -> list[Tree]:
    """Return every rank's tree, by rank, on rank 0; an empty list elsewhere.

    Each rank sends what it has to rank 0 only.
    """
    rank = dist.get_rank()
    if rank == 0:
        others = range(1, len(layouts))
        return [tree, *(_receive_tree(sender, layouts[sender]) for sender in others)]
    for buffer in _flatten(layouts[rank], tree):
        dist.send(buffer.view(torch.uint8), dst=0)
    return []


def _receive_tree(sender: int, layout: Layout) -> Tree:
    buffers = _flatten(layout, {})
    for buffer in buffers:
        dist.recv(buffer.view(torch.uint8), src=sender)
    return _unflatten(layout, buffers)


def gather_rows(layouts: Sequence[Layout], tree: Tree) -> Tree:
    """Return the rows of every rank's tree, by rank, on rank 0."""
    return concatenate_rows(gather_trees(layouts, tree))


def do_together(
    work: Callable[[], Result], make_report: Callable[[Result], Report]
) -> tuple[Result, list[Report]]:
    """Do this rank's part of the work; return its result, and every rank's report, by rank.

    If there is an error on any rank, a KnownToAllError is raised on all of them.
    """
    own_error = None
    report = None
    try:
        result = work()
        report = make_report(result)
    except Exception as error:
        own_error = error
    sent_error = None if own_error is None else _make_picklable(own_error)
    answers = gather_from_all((report, sent_error))
    errors = [error for _, error in answers if error is not None]
    if errors:
        raise KnownToAllError(own_error or errors[0])
    return result, [answer for answer, _ in answers]


def _make_picklable(error: Exception) -> Exception:
    """Return an error that can be sent: itself or, if it cannot be copied, its message."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainingError(f"{type(error).__name__}: {error}")
