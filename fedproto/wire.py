"""What really travels: a safetensors message that holds only the rows somebody has something to say about."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedproto.types import Tree, Upload


class Size(NamedTuple):
    values: int  # numbers of the payload; weights and row numbers are not counted, as in the paper
    bytes: int  # length of the message


def pack(values: Tree, extras: Tree, rows: Tensor | None) -> bytes:
    """Values and extras (weights), reduced to the given rows, whose numbers travel along; None: all of them, whole."""
    if rows is not None:
        values = {name: value[rows] for name, value in values.items()}
        extras = {name: value[rows] for name, value in extras.items()} | {"rows": rows.to(torch.int32)}
    return save(
        {f"value.{n}": v.contiguous() for n, v in values.items()} | {f"extra.{n}": v for n, v in extras.items()}
    )


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


def spoken(weight: Tensor) -> Tensor | None:
    """The rows a weight speaks of; None where there is one weight for everything."""
    return weight.nonzero().flatten() if weight.dim() else None


def of_upload(upload: Upload) -> bytes:
    return pack(upload.sums, upload.weights, spoken(upload.weights["weight"]))


def of_download(received: Tree) -> bytes:
    values = {name: value for name, value in received.items() if name != "known"}
    return pack(values, {}, spoken(received["known"]) if "known" in received else None)


def upload_size(upload: Upload) -> Size:
    """The size of `of_upload(upload)`, without building it."""
    if not upload.sums:
        return Size(0, 0)
    return _size(upload.sums, upload.weights, upload.weights["weight"])


def download_size(received: Tree) -> Size:
    """The size of `of_download(received)`, without building it."""
    values = {name: value for name, value in received.items() if name != "known"}
    if not values:
        return Size(0, 0)
    return _size(values, {}, received.get("known", torch.ones(())))


def _size(values: Tree, extras: Tree, weight: Tensor) -> Size:
    rows = int((weight > 0).sum()) if weight.dim() else None
    if rows == 0:
        return Size(0, 0)
    return _measured(_layout(values), _layout(extras), rows)


Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def _layout(tree: Tree) -> Layout:
    return tuple((name, tuple(value.shape), value.dtype) for name, value in tree.items())


@lru_cache(maxsize=4096)
def _measured(values: Layout, extras: Layout, rows: int | None) -> Size:
    """A message's length depends on names, shapes and types alone, so each kind of message is built once, of zeros."""
    payload, beside = (
        {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in part} for part in (values, extras)
    )
    which = None if rows is None else torch.arange(rows)
    count = sum(value.numel() if rows is None else value[:rows].numel() for value in payload.values())
    return Size(count, len(pack(payload, beside, which)))
