"""Transforms of uploads, one file each; what they are is said in core/transforms.py.

| | what travels | of d values per row and tensor (float32) |
|---|---|---|
| clip | the values, no longer than `norm` | 4 d bytes |
| quantise | codes of 8 or 4 bits, and a scale | d + 4, or d / 2 + 4 bytes |
| top-k | the k largest values, and their places | 8 k bytes |
"""

from __future__ import annotations

from torch import Tensor


def flatten_rows(value: Tensor, rows: int) -> Tensor:
    """Return a tensor with its axes behind the first `rows` ones made one."""
    return value.flatten(rows) if value.dim() > rows else value[..., None]
