"""Clipping: what one record can move is bounded, whatever its values are."""

from __future__ import annotations

import torch
from torch import Tensor

#: Rounding errors of a norm over d values stay below (d + SPARE_ROUNDINGS) units of precision.
SPARE_ROUNDINGS = 16


def clip_rows(values: Tensor, bound: float) -> Tensor:
    """Return rows (..., n, d), each no longer than `bound` in L2: v · min(1, bound / ‖v‖).

    A row with a value that is not finite becomes zeros, and so does one whose norm overflows. The
    factor is smaller by a few roundings, so that the bound holds for the numbers as they are
    stored. It can be differentiated and run by `vmap`.
    """
    is_finite = values.isfinite().all(-1, keepdim=True)
    finite = torch.where(is_finite, values, 0)
    squares = finite.square().sum(-1, keepdim=True)
    norms = squares.clamp(min=bound**2).sqrt()  # the slope of the root is infinite at 0
    roundings = (values.shape[-1] + SPARE_ROUNDINGS) * torch.finfo(values.dtype).eps
    return finite * (bound * (1 - roundings) / norms)
