"""What really travels: a safetensors message that holds only the rows somebody has something to say about.

The simulator's ledger counts these messages, and a deployed federation sends them. In a message `value.NAME` are the
values, `extra.NAME` the weights, and `extra.rows` the numbers of the rows, where only some travel.
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

from fedproto.core.types import Tree, Upload

LARGEST_DESCRIPTION = 2**20  # bytes of a message's names and shapes


class Size(NamedTuple):
    values: int  # numbers of the payload; weights and row numbers are not counted, as in the paper
    bytes: int  # length of the message


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The message of these arrays; no arrays are no message."""
    contiguous = {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in arrays.items()}
    return safetensors.numpy.save(contiguous) if contiguous else b""


def decode(message: bytes) -> dict[str, np.ndarray]:
    """The arrays of a message that may come from anybody; ValueError where it is none.

    It takes about as much memory as the message has bytes.
    """
    if not message:
        return {}
    if int.from_bytes(message[:8], "little") > LARGEST_DESCRIPTION:
        raise ValueError(f"its names and shapes take more than {LARGEST_DESCRIPTION} bytes")
    try:
        return safetensors.numpy.load(message)
    except (SafetensorError, KeyError, TypeError) as error:  # of a type that numpy does not have, too
        raise ValueError(f"it is not a safetensors message: {error}") from error


def encode_parts(values: Tree, extras: Tree, rows: Tensor | None) -> bytes:
    """The message of `parts`."""
    return save(parts(values, extras, rows))


def parts(values: Tree, extras: Tree, rows: Tensor | None) -> Tree:
    """Values and extras (weights), reduced to the given rows, whose numbers travel along; None: all of them, whole."""
    if rows is not None:
        values = {name: value[rows] for name, value in values.items()}
        extras = {name: value[rows] for name, value in extras.items()} | {"rows": rows.to(torch.int32)}
    named_values = {f"value.{name}": value.contiguous() for name, value in values.items()}
    return named_values | {f"extra.{name}": value for name, value in extras.items()}


def unpack(message: bytes, rows: int | None) -> tuple[Tree, Tree]:
    """The values and extras of a message; where it is of rows, zeros for those of the `rows` that did not travel."""
    tensors = load(message)
    where = tensors.pop("extra.rows", None)
    if where is not None:
        for name, value in tensors.items():
            tensors[name] = value.new_zeros(rows or 0, *value.shape[1:]).index_copy(0, where.long(), value)
    split: dict[str, Tree] = {"value": {}, "extra": {}}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        split[kind][rest] = value
    return split["value"], split["extra"]


def rows_with_weight(weight: Tensor) -> Tensor | None:
    """The rows a weight speaks of; None where there is one weight for everything."""
    return weight.nonzero().flatten() if weight.dim() else None


def encode_upload(upload: Upload) -> bytes:
    return save(upload_parts(upload))


def upload_parts(upload: Upload) -> Tree:
    """The tensors of an upload's message."""
    return parts(upload.sums, upload.weights, rows_with_weight(upload.weights["weight"]))


def encode_download(received: Tree) -> bytes:
    return save(download_parts(received))


def download_parts(received: Tree) -> Tree:
    """The tensors of the message that brings a client what it receives."""
    values = {name: value for name, value in received.items() if name != "known"}
    return parts(values, {}, rows_with_weight(received["known"]) if "known" in received else None)


def upload_size(upload: Upload) -> Size:
    """The size of `of_upload(upload)`, without building it."""
    one = Upload(*({name: value[None] for name, value in tree.items()} for tree in upload))
    return Size(*upload_sizes(one, 1)[0].tolist())


def download_size(received: Tree) -> Size:
    """The size of `of_download(received)`, without building it."""
    return Size(*download_sizes({name: value[None] for name, value in received.items()}, 1)[0].tolist())


def upload_sizes(uploads: Upload, clients: int) -> Tensor:
    """The sizes of many clients' uploads, which have a leading axis over them: (clients, 2)."""
    return _sizes(uploads.sums, uploads.weights, uploads.weights.get("weight"), clients)


def download_sizes(received: Tree, clients: int) -> Tensor:
    """The sizes of what many clients receive: (clients, 2)."""
    values = {name: value for name, value in received.items() if name != "known"}
    return _sizes(values, {}, received.get("known"), clients)


def _sizes(values: Tree, extras: Tree, weight: Tensor | None, clients: int) -> Tensor:
    """Read from a table of all sizes there can be, on the device where the values are: nobody waits for it."""
    if not values or not clients:
        return torch.zeros(clients, 2, dtype=torch.int64)
    layouts = _layout(values), _layout(extras)
    if weight is None or weight.dim() < 2:
        return _table(*layouts, None, next(iter(values.values())).device).expand(clients, 2)
    return _table(*layouts, weight.shape[1], weight.device)[(weight > 0).sum(1)]


@lru_cache(maxsize=1024)
def _table(values: Layout, extras: Layout, rows: int | None, device: torch.device) -> Tensor:
    """The sizes of messages of 0 to `rows` rows; a message of no row is not sent."""
    if rows is None:
        return torch.tensor([_measured(values, extras, None)]).to(device)
    return torch.tensor([Size(0, 0), *(_measured(values, extras, count) for count in range(1, rows + 1))]).to(device)


Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def _layout(tree: Tree) -> Layout:
    """Names, shapes and types of one client's tensors out of a stack."""
    return tuple((name, tuple(value.shape[1:]), value.dtype) for name, value in tree.items())


@lru_cache(maxsize=4096)
def _measured(values: Layout, extras: Layout, rows: int | None) -> Size:
    """A message's length depends on names, shapes and types alone, so each kind of message is built once, of zeros."""
    payload, beside = (
        {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in part} for part in (values, extras)
    )
    which = None if rows is None else torch.arange(rows)
    count = sum(value.numel() if rows is None else value[:rows].numel() for value in payload.values())
    return Size(count, len(encode_parts(payload, beside, which)))
