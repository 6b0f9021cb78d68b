"""Trees of tensors between the processes of one run."""

from __future__ import annotations

import itertools
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

Layout = tuple[
    tuple[str, tuple[int, ...], torch.dtype, str], ...
]  # names, shapes, types and devices of a tree


Did = TypeVar("Did")


Said = TypeVar("Said")


#: One rank may train for hours while the others wait. Who dies is noticed at once, by the connection that closes.
PATIENCE = timedelta(days=7)


CUT_OFF = 3  # the exit code of a worker that lost the others: it was not the first to go


LOST = "processes of this run were lost, and the states of their clients with them: resume from the last checkpoint"


@contextmanager
def _in_plain_words() -> Iterator[None]:
    try:
        yield
    except KnownToAllError as failed:
        raise failed.error from failed.error.__cause__


class Order(NamedTuple):
    """What all ranks are to do next; trees of the given layouts follow."""

    method: str
    arguments: tuple[Any, ...]
    layouts: list[Layout]


def _layout(tree: Tree) -> Layout:
    return tuple(
        (name, tuple(value.shape), value.dtype, value.device.type) for name, value in tree.items()
    )


def _union(layouts: Sequence[Layout]) -> Layout:
    """Everything that any of the ranks has."""
    found: dict[str, Any] = {}
    for name, *rest in itertools.chain(*layouts):
        found.setdefault(name, (name, *rest))
    return tuple(found.values())


def _flatten(layout: Layout, tree: Tree) -> list[Tensor]:
    """The tree's values end to end, a buffer for each type and device; zeros for what the tree lacks."""
    parts: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    for name, shape, dtype, device in layout:
        value = tree[name] if name in tree else torch.zeros(shape, dtype=dtype, device=device)
        parts.setdefault((dtype, device), []).append(value.detach().reshape(-1))
    return [torch.cat(values) for values in parts.values()]


def _unflatten(layout: Layout, buffers: list[Tensor]) -> Tree:
    kinds = dict.fromkeys((dtype, device) for _, _, dtype, device in layout)
    rest, tree = dict(zip(kinds, buffers, strict=True)), {}
    for name, shape, dtype, device in layout:
        buffer, length = rest[dtype, device], math.prod(shape)
        tree[name], rest[dtype, device] = buffer[:length].view(shape), buffer[length:]
    return tree


@contextmanager
def _connected() -> Iterator[None]:
    """When another process is gone, torch says RuntimeError, with the address of a socket."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(LOST) from error


@_connected()
def _announce(order: Order | None) -> Order | None:
    """Rank 0's order, on all ranks; None: there will be no further."""
    box = [order]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@_connected()
def _exchange(mine: Any) -> list[Any]:
    """What every rank says, by rank."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, mine)
    return heard


@_connected()
def _send_to_all(layout: Layout, tree: Tree) -> Tree:
    """Rank 0's tree, on all ranks. As bytes, since not every backend knows every type."""
    buffers = _flatten(layout, tree)
    for buffer in buffers:
        dist.broadcast(buffer.view(torch.uint8), src=0)
    return _unflatten(layout, buffers)


@_connected()
def _add_up(layouts: Sequence[Layout], tree: Tree) -> Tree:
    """The sum of all ranks' trees; a rank that lacks something adds zeros."""
    layout = _union(layouts)
    buffers = _flatten(layout, tree)
    for buffer in buffers:
        dist.all_reduce(buffer)
    return _unflatten(layout, buffers)


@_connected()
def _bring_together(layouts: Sequence[Layout], tree: Tree) -> list[Tree]:
    """Every rank's tree, by rank, on rank 0; nothing elsewhere. Each sends as much as it has, to nobody else."""
    if dist.get_rank() == 0:
        return [tree, *(_receive(rank, layout) for rank, layout in enumerate(layouts) if rank)]
    for buffer in _flatten(layouts[dist.get_rank()], tree):
        dist.send(buffer.view(torch.uint8), dst=0)
    return []


def _stack_up(layouts: Sequence[Layout], tree: Tree) -> Tree:
    """The rows of every rank's tree, by rank, on rank 0."""
    return concatenate_rows(_bring_together(layouts, tree))


def _receive(rank: int, layout: Layout) -> Tree:
    buffers = _flatten(layout, {})
    for buffer in buffers:
        dist.recv(buffer.view(torch.uint8), src=rank)
    return _unflatten(layout, buffers)


def _in_step(work: Callable[[], Did], report: Callable[[Did], Said]) -> tuple[Did, list[Said]]:
    """Do one's share and hear every rank's report of its own; an error on any rank is raised on all."""
    said = own = None
    try:
        did = work()
        said = report(did)
    except Exception as error:
        own = error
    heard = _exchange((said, own and _portable(own)))
    errors = [error for _, error in heard if error]
    if errors:
        raise KnownToAllError(own or errors[0])
    return did, [said for said, _ in heard]


def _portable(error: Exception) -> Exception:
    """An error as it can be sent: itself, or, where it cannot be copied, its sentence."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainingError(f"{type(error).__name__}: {error}")
