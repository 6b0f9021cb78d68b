"""The messages that travel, in safetensors format; they hold only the rows that have a weight.

The simulator's ledger counts these messages, and a deployed federation sends them: one for each
group of an upload, and one for each tree of what a client receives. In a message, `value.NAME` are
the values, `extra.NAME` the weights, and `extra.rows` the numbers of the rows if only some of them
travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedproto.core.tensors import flatten_state, map_upload, unflatten_state
from fedproto.core.types import Group, State, Tree, Upload

LARGEST_DESCRIPTION_BYTES = 2**20  # of a message's names and shapes


class Size(NamedTuple):
    """The size of a message."""

    values: int  # without weights and row numbers, which the paper does not count either
    bytes: int  # the length of the whole message


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the message of these arrays; it is empty if there are none."""
    if not arrays:
        return b""
    contiguous = {}
    for name, value in arrays.items():
        # `ascontiguousarray` makes a single number an array of one, hence the `reshape`.
        contiguous[name] = np.ascontiguousarray(value).reshape(value.shape)
    return safetensors.numpy.save(contiguous)


def count_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the length of the message of these arrays, without building it."""
    return _count_bytes(tuple((name, each.shape, each.dtype) for name, each in arrays.items()))


@lru_cache(maxsize=4096)
def _count_bytes(layout: tuple[tuple[str, tuple[int, ...], np.dtype], ...]) -> int:
    return len(encode({name: np.zeros(shape, dtype) for name, shape, dtype in layout}))


def decode(message: bytes) -> dict[str, np.ndarray]:
    """Return the arrays of a message, which may come from anybody.

    Raises ValueError if it is not a valid message. Needs about as much memory as the message.
    """
    if not message:
        return {}
    if int.from_bytes(message[:8], "little") > LARGEST_DESCRIPTION_BYTES:
        raise ValueError(f"its names and shapes take more than {LARGEST_DESCRIPTION_BYTES} bytes")
    try:
        return safetensors.numpy.load(message)
    except (SafetensorError, KeyError, TypeError) as error:  # also for a type numpy lacks
        raise ValueError(f"it is not a safetensors message: {error}") from error


def encode_parts(values: Tree, extras: Tree, rows: Tensor | None) -> bytes:
    """Return the message of the tensors that `parts` returns."""
    return save(parts(values, extras, rows))


def parts(values: Tree, extras: Tree, rows: Tensor | None) -> Tree:
    """Return the tensors of a message: values and extras (weights), by their names in it.

    With `rows`, only these rows of each tensor travel, and their numbers with them.
    """
    if rows is not None:
        values = {name: value[rows] for name, value in values.items()}
        extras = {name: value[rows] for name, value in extras.items()}
        extras["rows"] = rows.to(torch.int32)
    named_values = {f"value.{name}": value.contiguous() for name, value in values.items()}
    named_extras = {f"extra.{name}": value for name, value in extras.items()}
    return named_values | named_extras


def unpack(message: bytes, rows: int | None) -> tuple[Tree, Tree]:
    """Return the values and the extras of a message.

    If only some rows travelled, the tensors have `rows` rows, zero where none travelled.
    """
    tensors = load(message)
    places = tensors.pop("extra.rows", None)
    if places is not None:
        for name, value in tensors.items():
            zeros = value.new_zeros(rows or 0, *value.shape[1:])
            tensors[name] = zeros.index_copy(0, places.long(), value)
    split: dict[str, Tree] = {"value": {}, "extra": {}}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        split[kind][rest] = value
    return split["value"], split["extra"]


def rows_with_weight(weight: Tensor) -> Tensor | None:
    """Return the numbers of the rows with a weight, or None if one weight is for everything."""
    return weight.nonzero().flatten() if weight.dim() else None


def encode_upload(upload: Upload) -> dict[str, bytes]:
    """Return the messages in which a client sends its upload, one for each group."""
    return {name: save(group_parts(group)) for name, group in upload.items()}


def group_parts(group: Group) -> Tree:
    """Return the tensors of the message of one group of an upload."""
    extras = {"weight": group.weight, **group.counts}
    return parts(group.sums, extras, rows_with_weight(group.weight))


def encode_download(received: State) -> dict[str, bytes]:
    """Return the messages in which the server sends what a client receives, one for each tree.

    A tree of which no row is known is not sent.
    """
    messages = {}
    for name, tree in split_trees(received).items():
        is_empty = "known" in tree and not tree["known"].any()
        if not is_empty:
            messages[name] = save(tree_parts(tree))
    return messages


def split_trees(received: State) -> dict[str, Tree]:
    """Return the trees of what a client receives; tensors that are in none are the tree ``.

    >>> split_trees({"known": 1, "body": {"weight": 2}})
    {'': {'known': 1}, 'body': {'weight': 2}}
    """
    trees: dict[str, Tree] = {}
    for path, value in flatten_state(received).items():
        tree, _, name = path.rpartition("/")
        trees.setdefault(tree, {})[name] = value
    return trees


def tree_parts(tree: Tree) -> Tree:
    """Return the tensors of one tree's message; `known` only says which rows travel."""
    values = {name: value for name, value in tree.items() if name != "known"}
    rows = rows_with_weight(tree["known"]) if "known" in tree else None
    return parts(values, {}, rows)


def upload_size(upload: Upload) -> Size:
    """Return the size of `encode_upload(upload)`, without building it."""
    sizes = upload_sizes(map_upload(upload, lambda value: value[None]), clients=1)
    return Size(*sizes.sum(1)[0].tolist())


def download_size(received: State) -> Size:
    """Return the size of `encode_download(received)`, without building it."""
    flat = {name: value[None] for name, value in flatten_state(received).items()}
    sizes = download_sizes(unflatten_state(flat), clients=1)
    return Size(*sizes[0].tolist())


def upload_sizes(uploads: Upload, clients: int) -> Tensor:
    """Return the sizes of uploads with a leading axis over clients: (clients, groups, 2)."""
    sizes = []
    for group in uploads.values():
        extras = {"weight": group.weight, **group.counts}
        sizes.append(_sizes(group.sums, extras, group.weight, clients))
    return torch.stack(sizes, 1) if sizes else torch.zeros(clients, 0, 2, dtype=torch.int64)


def download_sizes(received: State, clients: int) -> Tensor:
    """Return the sizes of downloads with a leading axis over clients: (clients, 2)."""
    sizes = []
    for tree in split_trees(received).values():
        values = {name: value for name, value in tree.items() if name != "known"}
        if values:
            sizes.append(_sizes(values, {}, tree.get("known"), clients))
    if not sizes:
        return torch.zeros(clients, 2, dtype=torch.int64)
    return sizes[0] if len(sizes) == 1 else torch.stack(sizes).sum(0)


def _sizes(values: Tree, extras: Tree, weight: Tensor | None, clients: int) -> Tensor:
    """Return the sizes of many messages, looked up in a table of all possible sizes.

    The table is on the device where the values are, so that nothing waits for the device.
    """
    if not values or not clients:
        return torch.zeros(clients, 2, dtype=torch.int64)
    value_layout = _layout(values)
    extra_layout = _layout(extras)
    if weight is None or weight.dim() < 2:
        device = next(iter(values.values())).device
        return _size_table(value_layout, extra_layout, None, device).expand(clients, 2)
    table = _size_table(value_layout, extra_layout, weight.shape[1], weight.device)
    row_counts = (weight > 0).sum(1)
    return table[row_counts]


@lru_cache(maxsize=1024)
def _size_table(
    values: Layout,
    extras: Layout,
    rows: int | None,
    device: torch.device,
) -> Tensor:
    """Return the sizes of messages of 0 to `rows` rows; a message without rows is not sent.

    With `rows` None, all of a tensor travels, and the table has one line.
    """
    if rows is None:
        sizes = [_measure(values, extras, None)]
    else:
        sizes = [_measure(values, extras, count) for count in range(1, rows + 1)]
        sizes.insert(0, Size(0, 0))
    return torch.tensor(sizes).to(device)


#: Name, shape and type of each tensor.
Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def _layout(tree: Tree) -> Layout:
    """Return names, shapes and types of one client's tensors, given those of many clients."""
    return tuple((name, tuple(value.shape[1:]), value.dtype) for name, value in tree.items())


@lru_cache(maxsize=4096)
def _measure(values: Layout, extras: Layout, rows: int | None) -> Size:
    """Return the size of a message with `rows` rows of each tensor, or with all of them (None).

    It depends on names, shapes and types alone, so each kind of message is built once, of zeros.
    """
    zero_values = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in values}
    zero_extras = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in extras}
    which = None if rows is None else torch.arange(rows)
    count = 0
    for value in zero_values.values():
        count += value.numel() if rows is None else value[:rows].numel()
    return Size(count, len(encode_parts(zero_values, zero_extras, which)))
