"""Convolutions of a stack of clients without their columns: each kernel gathers the windows as it multiplies.

Written to memory, the columns of a small convolution are kernel-area times the size of its input, and at a thousand
clients moving them takes longer than multiplying them. Here x is (n, b, c, h, w), weight (n, o, c, kh, kw), at
stride 1 and without padding, all float32; a client's positions are its images' places, b·oh·ow of them in one row.

The convolution, and the gradient of its input, keep a position a lane and a register a channel, and pad nothing. The
gradient of the weights pads channels and taps to a matrix product for the tensor cores, which multiply in TF32 where
that is allowed, and else three times, for what TF32 leaves out (its relative error is then that of float32, 1e-7).
Nothing is added atomically: results repeat.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedproto.core.engine import even_size
from fedproto.engines.gpu.kernels import Value, constexpr, jit, operation, tl, triton

PROCESSORS = 132  # of an H200; a grid of a few times as many programs keeps them busy
REGISTERS = 96  # sums a lane holds in a direct convolution
TILE = 24  # channels a program of a direct convolution makes at most


def usable(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can serve these: x (n, b, c, h, w) and weight (n, o, c, kh, kw)."""
    outputs, channels, rows, columns = weight.shape[1:]
    return (
        triton is not None
        and x.is_cuda
        and x.dtype == weight.dtype == torch.float32
        and channels * outputs <= 1024
        and rows * columns <= 64
        and x[:1].numel() * max(1, outputs / channels)
        < 2**31  # addresses within a client are 32 bits wide
    )


# The kernels ----------------------------------------------------------------------------------------------------------


@jit
def _places(
    start: Value, places: Value, BLOCK: constexpr, HEIGHT: constexpr, WIDTH: constexpr
) -> Value:
    """Image, row and column of BLOCK positions from `start` on, and which of them there are; the others are clamped."""
    place = start + tl.arange(0, BLOCK)
    there = place < places
    place = tl.minimum(place, places - 1)
    image = place // (HEIGHT * WIDTH)
    spot = place % (HEIGHT * WIDTH)
    return image, spot // WIDTH, spot % WIDTH, there


@jit
def _convolution_kernel(
    source: Value,
    weight: Value,
    bias: Value,
    target: Value,
    batch: Value,
    CI: constexpr,
    HI: constexpr,
    WI: constexpr,
    CO: constexpr,
    HO: constexpr,
    WO: constexpr,
    KH: constexpr,
    KW: constexpr,
    ADJOINT: constexpr,
    BIAS: constexpr,
    CHANNELS: constexpr,
    BLOCK: constexpr,
) -> None:
    """target[o, p] = bias[o] + Σ_{c,i,j} W[o,c,i,j] source[c, p + (i,j)] for CHANNELS of o and BLOCK positions p.

    ADJOINT is the gradient of the input, the same sum with W's channels exchanged and source[c, p − (i,j)], zero
    outside. A lane loads a source value once and a weight once, for CHANNELS · (BLOCK / lanes) multiplications.
    """
    places = batch * (HO * WO)
    tiles = tl.cdiv(places, BLOCK)
    client = (tl.program_id(0) // tiles).to(tl.int64)
    image, row, column, there = _places((tl.program_id(0) % tiles) * BLOCK, places, BLOCK, HO, WO)
    first = tl.program_id(1) * CHANNELS
    lanes = source + client * batch * (CI * HI * WI) + (image * (CI * HI * WI) + row * WI + column)
    weight += client * (CO * CI * KH * KW)
    sums: Value = ()
    for _ in tl.static_range(CHANNELS):
        sums += (tl.zeros([BLOCK], tl.float32),)
    for line in range(CI * KH):  # a row of taps of one input channel
        channel = line // KH
        i = line % KH
        for j in tl.static_range(KW):
            if ADJOINT:
                inside = (row >= i) & (row < i + HI) & (column >= j) & (column < j + WI)
                value = tl.load(lanes + (channel * (HI * WI) - i * WI - j), mask=inside, other=0.0)
                taps = weight + (channel * (CO * KH * KW) + i * KW + j)
            else:
                value = tl.load(lanes + (channel * (HI * WI) + i * WI + j))
                taps = weight + (line * KW + j)
            more: Value = ()
            for t in tl.static_range(CHANNELS):
                o = first + t
                if CO % CHANNELS != 0:
                    o = tl.minimum(o, CO - 1)
                more += (
                    sums[t] + value * tl.load(taps + o * (KH * KW if ADJOINT else CI * KH * KW)),
                )
            sums = more
    lanes = target + client * batch * (CO * HO * WO) + (image * (CO * HO * WO) + row * WO + column)
    for t in tl.static_range(CHANNELS):
        o = first + t
        if BIAS:
            total = sums[t] + tl.load(bias + client * CO + tl.minimum(o, CO - 1))
        else:
            total = sums[t]
        tl.store(lanes + o * (HO * WO), total, mask=there & (o < CO))


@jit
def _weights_kernel(
    dy: Value,
    source: Value,
    dw: Value,
    db: Value,
    batch: Value,
    splits: Value,
    chunk: Value,
    CI: constexpr,
    HI: constexpr,
    WI: constexpr,
    CO: constexpr,
    HO: constexpr,
    WO: constexpr,
    KH: constexpr,
    KW: constexpr,
    CHANNELS: constexpr,
    TAPS: constexpr,
    BLOCK: constexpr,
    PRECISION: constexpr,
) -> None:
    """dW[o,c,i,j] = Σ_p dy[o, p] source[c, p + (i,j)] over `chunk` positions p.

    A product of gathered windows (TAPS, positions) and dy (positions, CHANNELS), BLOCK positions at a time. One tap
    more than there are is a window of ones, for db[o] = Σ_p dy[o, p].
    """
    part = tl.program_id(0).to(tl.int64)
    client = part // splits
    places = batch * (HO * WO)
    start = (part % splits).to(tl.int32) * chunk
    end = tl.minimum(start + chunk, places)
    tap = tl.program_id(1) * TAPS + tl.arange(0, TAPS)
    taps = ((tap // (KH * KW)) * (HI * WI) + ((tap % (KH * KW)) // KW) * WI + tap % KW)[None, :]
    o = (tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    source += client * batch * (CI * HI * WI)
    dy += client * batch * (CO * HO * WO)
    sums = tl.zeros([TAPS, CHANNELS], tl.float32)
    for p in range(start, end, BLOCK):
        image, row, column, there = _places(p, end, BLOCK, HO, WO)
        at = (image * (CI * HI * WI) + row * WI + column)[:, None]
        real = (tap < CI * KH * KW)[None, :] & there[:, None]
        windows = tl.load(source + (at + taps), mask=real, other=1.0)
        at = (image * (CO * HO * WO) + row * WO + column)[:, None]
        slopes = tl.load(dy + (at + o * (HO * WO)), mask=there[:, None] & (o < CO), other=0.0)
        sums = tl.dot(tl.trans(windows), slopes, sums, input_precision=PRECISION)
    dw += part * (CO * CI * KH * KW)
    tap = tap[:, None]
    tl.store(dw + (tap + o * (CI * KH * KW)), sums, mask=(tap < CI * KH * KW) & (o < CO))
    tl.store(db + part * CO + (o + tl.zeros_like(tap)), sums, mask=(tap == CI * KH * KW) & (o < CO))


# Their launches: the block sizes are a plain rule of the shapes -------------------------------------------------------


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(a: int) -> int:
    return 1 << (a - 1).bit_length()


def _convolve(
    source: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, adjoint: bool
) -> None:
    """Fills target (n, b, co, ho, wo) from source (n, b, ci, hi, wi)."""
    n, batch, outputs, height, width = target.shape
    places = batch * height * width
    if not places or not n or not outputs:
        return
    shape = (*source.shape[2:], outputs, height, width, *weight.shape[3:])
    arguments = (
        source,
        weight,
        target if bias is None else bias,
        target,
        batch,
        *shape,
        adjoint,
        bias is not None,
    )
    channels, block, warps = _blocks(n, places, outputs)
    grid = n * _cdiv(places, block), _cdiv(outputs, channels)
    with torch.cuda.device_of(target):
        _convolution_kernel[grid](*arguments, channels, block, num_warps=warps, num_stages=1)


def _blocks(n: int, places: int, outputs: int) -> tuple[int, int, int]:
    """Channels and positions of a program, and its warps.

    A lane takes up to 8 positions, since a weight it loads serves them all; fewer, and then fewer channels, where
    there would be too few warps to fill the GPU. Warps share nothing, so there are as few as waste no positions.
    """

    def few() -> bool:
        return n * _cdiv(outputs, channels) * _cdiv(places, 32 * each) < 8 * PROCESSORS

    each, channels = 8, even_size(outputs, TILE)
    while each > 1 and (each * channels > REGISTERS or few()):
        each //= 2
    while channels > 4 and few():
        channels = even_size(outputs, channels // 2)
    warps = 4
    while warps > 1 and _cdiv(places, 32 * each * warps) * 32 * each * warps > 1.125 * places:
        warps //= 2
    return channels, 32 * each * warps, warps


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.new_empty(_output_shape(x, weight))
    _convolve(
        x.contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        adjoint=False,
    )
    return y


def _input_gradient(dy: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    dx = dy.new_empty((*dy.shape[:2], weight.shape[2], height, width))
    _convolve(dy.contiguous(), weight.contiguous(), None, dx, adjoint=True)
    return dx


def _weight_gradient(
    dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    n, batch, outputs, height, width = dy.shape
    inputs = x.shape[2]
    places = batch * height * width
    if not places or not n:
        return dy.new_zeros((n, outputs, inputs, rows, columns)), dy.new_zeros((n, outputs))
    taps = min(64, max(16, _power(inputs * rows * columns + 1)))
    channels = min(64, max(16, _power(outputs)))
    blocks = _cdiv(inputs * rows * columns + 1, taps), _cdiv(outputs, channels)
    splits = min(batch, _cdiv(4 * PROCESSORS, n * blocks[0] * blocks[1]))
    chunk = _cdiv(_cdiv(places, splits), 64) * 64
    splits = _cdiv(places, chunk)
    dw = dy.new_empty((n, splits, outputs, inputs, rows, columns))
    db = dy.new_empty((n, splits, outputs))
    grid = (n * splits, *blocks)
    shape = (*x.shape[2:], outputs, height, width, rows, columns)
    arguments = (
        dy.contiguous(),
        x.contiguous(),
        dw,
        db,
        batch,
        splits,
        chunk,
        *shape,
        channels,
        taps,
    )
    with torch.cuda.device_of(dy):
        _weights_kernel[grid](
            *arguments, 64, "tf32" if tf32 else "tf32x3", num_warps=4, num_stages=3
        )
    return (dw[:, 0], db[:, 0]) if splits == 1 else (dw.sum(1), db.sum(1))


# The same on a CPU, by columns, for tests -----------------------------------------------------------------------------


def _columns(x: Tensor, rows: int, columns: int) -> Tensor:
    """(n, b, c, oh, ow, kh, kw): the windows of each place."""
    return x.unfold(-2, rows, 1).unfold(-2, columns, 1)


def _forward_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("nbcyxij,nocij->nboyx", _columns(x, *weight.shape[3:]), weight)
    return (y if bias is None else y + bias[:, None, :, None, None]).contiguous()


def _input_gradient_plain(dy: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    rows, columns = weight.shape[3:]
    padded = torch.nn.functional.pad(dy, (columns - 1, columns - 1, rows - 1, rows - 1))
    return torch.einsum(
        "nboyxij,nocij->nbcyx", _columns(padded, rows, columns), weight.flip(3, 4)
    ).contiguous()


def _weight_gradient_plain(
    dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    dw = torch.einsum("nbcyxij,nboyx->nocij", _columns(x, rows, columns), dy)
    return dw.contiguous(), dy.sum((1, 3, 4))


# As operations of torch -----------------------------------------------------------------------------------------------


def _output_shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    return (
        *x.shape[:2],
        weight.shape[1],
        x.shape[3] - weight.shape[3] + 1,
        x.shape[4] - weight.shape[4] + 1,
    )


def _register() -> SimpleNamespace:
    """The three as operations that a tracer records and a compiler leaves alone."""
    return SimpleNamespace(
        forward=operation(
            "convolution",
            "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
            _forward,
            _forward_plain,
            lambda x, weight, bias: x.new_empty(_output_shape(x, weight)),
        ),
        weight_gradient=operation(
            "convolution_weight_gradient",
            "(Tensor dy, Tensor x, int rows, int columns, bool tf32) -> (Tensor, Tensor)",
            _weight_gradient,
            _weight_gradient_plain,
            lambda dy, x, rows, columns, tf32: (
                dy.new_empty((dy.shape[0], dy.shape[2], x.shape[2], rows, columns)),
                dy.new_empty((dy.shape[0], dy.shape[2])),
            ),
        ),
        input_gradient=operation(
            "convolution_input_gradient",
            "(Tensor dy, Tensor weight, int height, int width) -> Tensor",
            _input_gradient,
            _input_gradient_plain,
            lambda dy, weight, height, width: dy.new_empty(
                (*dy.shape[:2], weight.shape[2], height, width)
            ),
        ),
    )


operations = _register()  # takes 5 ms


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y[n,b,o,y,x] = bias[n,o] + Σ_{c,i,j} weight[n,o,c,i,j] x[n,b,c,y+i,x+j]."""
    return operations.forward(x, weight, bias)


def weight_gradient(
    dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    """dW[n,o,c,i,j] = Σ_{b,y,x} dy[n,b,o,y,x] x[n,b,c,y+i,x+j], and db[n,o] = Σ_{b,y,x} dy[n,b,o,y,x]."""
    return operations.weight_gradient(dy, x, rows, columns, tf32)


def input_gradient(dy: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """dx[n,b,c,y,x] = Σ_{o,i,j} weight[n,o,c,i,j] dy[n,b,o,y−i,x−j], with dy zero outside."""
    return operations.input_gradient(dy, weight, height, width)


class StackedConvolution(Function):
    """x (n, b, c, h, w) with each client's own weight (n, o, c, kh, kw) and bias (n, o): (n, b, o, oh, ow)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dy, weight, x.shape[3], x.shape[4])
        if ctx.needs_input_grad[1]:
            allowed = torch.backends.cuda.matmul.allow_tf32
            dw, db = weight_gradient(dy, x, weight.shape[3], weight.shape[4], allowed)
        elif ctx.needs_input_grad[2]:
            db = dy.sum((1, 3, 4))
        return dx, dw, db if ctx.needs_input_grad[2] else None
