"""Gaussian noise on sums, drawn from the operating system, on a grid.

A value x is rounded to a multiple of a step g, a power of two, and so is the noise: what is
returned is g · (round(x / g) + round(n / g)). Both terms are whole numbers that float64 adds
exactly, and round(x / g) + round(n / g) = round(round(x / g) + n / g): a rounded version of what
the Gaussian mechanism releases for the rounded x. So the lowest bits of a floating-point sum, from
which x could be read through the noise (Mironov 2012), are not there. The rounding of x may move a
vector of d values by up to g √d more, which `Grid` adds to the sensitivity.

What remains of floating point: the normal draws have 53 random bits and no value beyond 8.6
standard deviations.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.entropy import Entropy

#: The step of the grid is the sensitivity divided by about 2 to this power.
GRID_BITS = 20


class Grid(NamedTuple):
    """Noise for some values that one unit moves by a bounded amount."""

    deviation: float  # standard deviation of the noise
    step: float  # a power of two

    @classmethod
    def fit(cls, sensitivity: float, values: int, noise: float) -> Grid:
        """Return the grid for a number of values.

        noise  standard deviation / sensitivity, before the rounding is added to the latter
        """
        step = 2.0 ** (math.floor(math.log2(sensitivity)) - GRID_BITS)
        return cls(noise * (sensitivity + step * math.sqrt(values)), step)


def add_noise(values: Tensor, grid: Grid, key: Tensor, purpose: str, seeded: bool) -> Tensor:
    """Return values with noise, in float64.

    Under `vmap` every client has noise of its own.

    key     () of (seed, round, client); what the noise is drawn from if it is `seeded`
    """
    if seeded:
        normal = _draw_seeded(values.shape, rng.fold(key, purpose))
    else:
        normal = _SystemNormal.apply(values, key)
    rounded_values = (values.double() / grid.step).round()
    rounded_noise = (normal * (grid.deviation / grid.step)).round()
    return (rounded_values + rounded_noise) * grid.step


def _draw_seeded(shape: torch.Size, key: Tensor) -> Tensor:
    """Return standard normal float64 values that depend on the key alone (Box and Muller)."""
    count = shape.numel()
    draws = rng.uniform(key, 2 * count)
    radius = (-2 * (1 - draws[:count]).log()).sqrt()
    return (radius * (2 * math.pi * draws[count:]).cos()).reshape(shape)


class _SystemNormal(torch.autograd.Function):
    """Standard normal values of the operating system's entropy; a batch of clients draws apart."""

    @staticmethod
    def forward(like: Tensor, key: Tensor) -> Tensor:
        return Entropy().normal(like.shape, "noise").to(like.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], like: Tensor, key: Tensor
    ) -> tuple[Tensor, int]:
        """Return draws for all clients of the batch; one of the two arguments has its axis."""
        if in_dims[0] is None:
            shape = (info.batch_size, *like.shape)
        else:
            shape = tuple(like.movedim(in_dims[0], 0).shape)
        return Entropy().normal(shape, "noise").to(like.device), 0
