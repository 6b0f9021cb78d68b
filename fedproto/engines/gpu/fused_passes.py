"""BatchNorm and the SGD step of a stack on a GPU, each in as few passes over memory as there can be.

torch's own are written for hundreds of channels; a stack has thousands, of few values each. A row is all values of one
client's channel, as `windows.py` leaves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedproto.engines.gpu.kernels import Value, constexpr, jit, operation, tl

VALUES = 1024  # a program works on at a time


@jit
def _row_tile(rows: Value, start: Value, M: constexpr, ROWS: constexpr, BLOCK: constexpr) -> Value:
    """Rows of this program, where their values from column `start` on are, and which of those there are."""
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
    """y = weight · (x − mean) / √(variance + eps) + bias, with mean and variance over a row of M values."""
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
    """db = Σ dy, dw = Σ dy x̂, dx = weight / √(variance + eps) · (dy − db/M − x̂ dw/M), with x̂ before weight and bias."""
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
    """speed ← momentum · speed + gradient, value ← value − rate · speed, with each client's own momentum and rate."""
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


def _tile(rows: int, values: int) -> tuple[int, int]:
    """Rows and columns a program takes at a time."""
    columns = min(VALUES, 1 << (values - 1).bit_length())
    return max(1, VALUES // columns), columns


def _wide(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _normalise(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, values = x.shape
    y, mean, variance = torch.empty_like(x), weight.new_empty(rows), weight.new_empty(rows)
    tile = _tile(rows, values)
    with torch.cuda.device_of(x):
        _normalise_kernel[(-(-rows // tile[0]),)](
            x, weight, bias, y, mean, variance, rows, eps, values, _wide(x), *tile, num_warps=4
        )
    return y, mean, variance


def _normalise_back(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, values = x.shape
    dx, dw, db = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    tile = _tile(rows, values)
    with torch.cuda.device_of(x):
        _normalise_back_kernel[(-(-rows // tile[0]),)](
            dy.contiguous(),
            x,
            weight,
            mean,
            variance,
            dx,
            dw,
            db,
            rows,
            eps,
            values,
            _wide(x),
            *tile,
            num_warps=4,
        )
    return dx, dw, db


def descend(value: Tensor, speed: Tensor, gradient: Tensor, momentum: Tensor, rate: Tensor) -> None:
    """One step of SGD for each client of a stack (clients, …), in place; CUDA only."""
    size = value[0].numel()
    blocks = -(-size // VALUES)
    with torch.cuda.device_of(value):
        _descend_kernel[(blocks * len(value),)](
            value, speed, gradient.contiguous(), momentum, rate, size, blocks, VALUES, num_warps=4
        )


# The same on a CPU, for tests -----------------------------------------------------------------------------------------


def _normalise_plain(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    variance, mean = torch.var_mean(x, 1, correction=0)
    return (
        (x - mean[:, None]) * (weight / (variance + eps).sqrt())[:, None] + bias[:, None],
        mean,
        variance,
    )


def _normalise_back_plain(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    factor = (variance + eps).rsqrt()
    normal = (x - mean[:, None]) * factor[:, None]
    dw, db = (dy * normal).sum(1), dy.sum(1)
    dx = (weight * factor)[:, None] * (
        dy - dy.mean(1, keepdim=True) - normal * (dw / x.shape[1])[:, None]
    )
    return dx, dw, db


normalise = operation(
    "normalise",
    "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _normalise,
    _normalise_plain,
    lambda x, weight, bias, eps: (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(weight),
    ),
)
normalise_back = operation(
    "normalise_back",
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor variance, float eps) -> (Tensor, Tensor, Tensor)",
    _normalise_back,
    _normalise_back_plain,
    lambda dy, x, weight, mean, variance, eps: (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(weight),
    ),
)


class Normalised(Function):
    """BatchNorm of each row of x (rows, values) in training, and the rows' means and variances, without a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()  # a row's values are read one after the other
        y, mean, variance = normalise(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        return (*normalise_back(dy, *ctx.saved_tensors, ctx.eps), None)
