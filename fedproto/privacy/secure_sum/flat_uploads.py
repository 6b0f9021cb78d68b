"""The groups of an upload as one vector, in which no row is left out.

A vector has every weight, sum and count of every class, also of those that a client does not have.
So neither its length nor its form tells which classes these are. Tensors are in the order of their
names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedproto.core.tensors import flatten_upload, unflatten_upload
from fedproto.core.types import GroupLayout, Upload


def count_values(layouts: Mapping[str, GroupLayout]) -> tuple[int, int]:
    """Return how many values a vector has, and how many of them are neither weights nor counts."""
    length = 0
    sums = 0
    for name, layout in layouts.items():
        for tensor, shape in layout.tensor_shapes(name).items():
            length += math.prod(shape)
            if tensor.startswith(f"{name}/sums/"):
                sums += math.prod(shape)
    return length, sums


def to_vectors(uploads: Upload) -> np.ndarray:
    """Return uploads with a leading axis over m clients as vectors, (m, length), in float64."""
    tensors = [_with_columns(value) for _, value in sorted(flatten_upload(uploads).items())]
    columns = [value.detach().cpu().double().flatten(1) for value in tensors]
    return torch.cat(columns, 1).numpy()


def _with_columns(value: Tensor) -> Tensor:
    """Return a tensor over clients with at least one further axis."""
    return value[:, None] if value.dim() == 1 else value


def from_vector(total: np.ndarray, like: Upload) -> Upload:
    """Return a vector as an upload with a leading axis of 1.

    like  uploads that give the names, shapes, types and devices, with a leading axis
    """
    flat = flatten_upload(like)
    start = 0
    for name in sorted(flat):
        value = flat[name]
        size = value[:1].numel()
        part = torch.from_numpy(total[start : start + size].copy())
        flat[name] = part.reshape(1, *value.shape[1:]).to(value)
        start += size
    return unflatten_upload(flat)


def make_zeros(layouts: Mapping[str, GroupLayout]) -> Upload:
    """Return an upload of zeros with a leading axis of 1, of what these layouts describe."""
    flat = {}
    for name, layout in layouts.items():
        for tensor, shape in layout.tensor_shapes(name).items():
            flat[tensor] = torch.zeros(1, *shape)
    return unflatten_upload(flat)
