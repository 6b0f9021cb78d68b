"""BatchNorm and the SGD step of a stack on a GPU, each in as few passes over memory as possible.

torch's own are written for hundreds of channels; a stack has thousands, of few values each. A row
is all values of one client's channel, as `window_convolutions.py` leaves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedproto.engines.gpu.kernels import (
    Value,
    ceil_div,
    constexpr,
    jit,
    next_power_of_two,
    operation,
    tl,
)

VALUES_PER_PROGRAM = 1024  # that a program of a kernel works on at a time
WARPS = 4


@jit
def _row_tile(rows: Value, start: Value, M: constexpr, ROWS: constexpr, BLOCK: constexpr) -> Value:
    """Returns this program's rows, and its values from column `start` on: offsets, which exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = start + tl.arange(0, BLOCK)[None, :]
    there = (row < rows)[:, None] & (column < M)
    return row, row.to(tl.int64)[:, None] * M + column, there


@jit
def _normalise_kernel(
    x: Value,
    weight: Value,
    bias: Value,
    y: Value,
    means: Value,
    variances: Value,
    rows: Value,
    EPS: constexpr,
    M: constexpr,
    WIDE: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> None:
    """y = weight · (x − mean) / √(variance + eps) + bias, with mean and variance of a row.

    A row has M values.
    """
    total = tl.zeros([ROWS, BLOCK], WIDE)
    for start in range(0, M, BLOCK):
        row, at, there = _row_tile(rows, start, M, ROWS, BLOCK)
        total += tl.load(x + at, mask=there, other=0).to(WIDE)
    mean = tl.sum(total, 1) / M
    total = tl.zeros([ROWS, BLOCK], WIDE)
    for start in range(0, M, BLOCK):
        row, at, there = _row_tile(rows, start, M, ROWS, BLOCK)
        apart = tl.where(there, tl.load(x + at, mask=there, other=0).to(WIDE) - mean[:, None], 0)
        total += apart * apart
    variance = tl.sum(total, 1) / M
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(variances + row, variance, mask=row < rows)
    scale = tl.load(weight + row, mask=row < rows, other=0).to(WIDE) / tl.sqrt(variance + EPS)
    shift = tl.load(bias + row, mask=row < rows, other=0).to(WIDE)
    for start in range(0, M, BLOCK):
        row, at, there = _row_tile(rows, start, M, ROWS, BLOCK)
        apart = tl.load(x + at, mask=there, other=0).to(WIDE) - mean[:, None]
        tl.store(y + at, apart * scale[:, None] + shift[:, None], mask=there)


@jit
def _normalise_back_kernel(
    dy: Value,
    x: Value,
    weight: Value,
    means: Value,
    variances: Value,
    dx: Value,
    dw: Value,
    db: Value,
    rows: Value,
    EPS: constexpr,
    M: constexpr,
    WIDE: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> None:
    """The gradients of `_normalise_kernel`, with x̂ = (x − mean) / √(variance + eps):

    db = Σ dy, dw = Σ dy x̂, dx = weight / √(variance + eps) · (dy − db/M − x̂ dw/M)
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mean = tl.load(means + row, mask=row < rows, other=0).to(WIDE)
    factor = 1 / tl.sqrt(tl.load(variances + row, mask=row < rows, other=1).to(WIDE) + EPS)
    plain = tl.zeros([ROWS, BLOCK], WIDE)
    scaled = tl.zeros([ROWS, BLOCK], WIDE)
    for start in range(0, M, BLOCK):
        row, at, there = _row_tile(rows, start, M, ROWS, BLOCK)
        slope = tl.load(dy + at, mask=there, other=0).to(WIDE)
        plain += slope
        scaled += (
            slope
            * (tl.load(x + at, mask=there, other=0).to(WIDE) - mean[:, None])
            * factor[:, None]
        )
    shift = tl.sum(plain, 1)
    scale = tl.sum(scaled, 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(db + row, shift, mask=row < rows)
    tl.store(dw + row, scale, mask=row < rows)
    steep = tl.load(weight + row, mask=row < rows, other=0).to(WIDE) * factor
    for start in range(0, M, BLOCK):
        row, at, there = _row_tile(rows, start, M, ROWS, BLOCK)
        slope = tl.load(dy + at, mask=there, other=0).to(WIDE)
        normal = (tl.load(x + at, mask=there, other=0).to(WIDE) - mean[:, None]) * factor[:, None]
        slope = slope - shift[:, None] / M - normal * (scale[:, None] / M)
        tl.store(dx + at, slope * steep[:, None], mask=there)


@jit
def _descend_kernel(
    value: Value,
    speed: Value,
    gradient: Value,
    momentum: Value,
    rate: Value,
    size: Value,
    blocks: Value,
    BLOCK: constexpr,
) -> None:
    """speed ← momentum · speed + gradient, value ← value − rate · speed.

    Each client has its own momentum and rate.
    """
    client = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    place = client * size + at
    new = tl.load(momentum + client) * tl.load(speed + place, mask=there) + tl.load(
        gradient + place, mask=there
    )
    tl.store(speed + place, new, mask=there)
    tl.store(
        value + place, tl.load(value + place, mask=there) - tl.load(rate + client) * new, mask=there
    )


# --- launching the kernels


def _choose_tile(values: int) -> tuple[int, int]:
    """Return how many rows, and values of each, a program takes at a time."""
    columns = min(VALUES_PER_PROGRAM, next_power_of_two(values))
    return max(1, VALUES_PER_PROGRAM // columns), columns


def _sum_type(x: Tensor) -> Any:
    """Return the type in which sums over x are computed."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _normalise(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, values = x.shape
    y = torch.empty_like(x)
    mean = weight.new_empty(rows)
    variance = weight.new_empty(rows)
    tile = _choose_tile(values)
    grid = (ceil_div(rows, tile[0]),)
    tensors = (x, weight, bias, y, mean, variance)
    with torch.cuda.device_of(x):
        _normalise_kernel[grid](*tensors, rows, eps, values, _sum_type(x), *tile, num_warps=WARPS)
    return y, mean, variance


def _normalise_back(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, values = x.shape
    dx = torch.empty_like(x)
    dw = torch.empty_like(weight)
    db = torch.empty_like(weight)
    tile = _choose_tile(values)
    grid = (ceil_div(rows, tile[0]),)
    tensors = (dy.contiguous(), x, weight, mean, variance, dx, dw, db)
    with torch.cuda.device_of(x):
        _normalise_back_kernel[grid](
            *tensors, rows, eps, values, _sum_type(x), *tile, num_warps=WARPS
        )
    return dx, dw, db


def descend(value: Tensor, speed: Tensor, gradient: Tensor, momentum: Tensor, rate: Tensor) -> None:
    """Do one step of SGD for each client of a stack, in place; on CUDA only.

    value, speed, gradient  (clients, …)
    momentum, rate          (clients,)
    """
    size = value[0].numel()
    blocks = ceil_div(size, VALUES_PER_PROGRAM)
    grid = (blocks * len(value),)
    tensors = (value, speed, gradient.contiguous(), momentum, rate)
    with torch.cuda.device_of(value):
        _descend_kernel[grid](*tensors, size, blocks, VALUES_PER_PROGRAM, num_warps=WARPS)


# --- the same on a CPU, for tests


def _normalise_plain(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    variance, mean = torch.var_mean(x, 1, correction=0)
    scale = weight / (variance + eps).sqrt()
    y = (x - mean[:, None]) * scale[:, None] + bias[:, None]
    return y, mean, variance


def _normalise_back_plain(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    factor = (variance + eps).rsqrt()
    normal = (x - mean[:, None]) * factor[:, None]
    dw = (dy * normal).sum(1)
    db = dy.sum(1)
    slope = dy - dy.mean(1, keepdim=True) - normal * (dw / x.shape[1])[:, None]
    dx = (weight * factor)[:, None] * slope
    return dx, dw, db


# --- as operations of torch


def _normalise_shapes(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _normalise_back_shapes(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


normalise = operation(
    "normalise",
    "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    kernel=_normalise,
    plain=_normalise_plain,
    fake=_normalise_shapes,
)
normalise_back = operation(
    "normalise_back",
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor variance, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    kernel=_normalise_back,
    plain=_normalise_back_plain,
    fake=_normalise_back_shapes,
)


class NormalisedRows(Function):
    """BatchNorm of each row of x (rows, values) in training.

    Also returns the rows' means and variances, which have no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()  # the kernel reads a row's values one after the other
        y, mean, variance = normalise(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        dx, dw, db = normalise_back(dy, *ctx.saved_tensors, ctx.eps)
        return dx, dw, db, None
