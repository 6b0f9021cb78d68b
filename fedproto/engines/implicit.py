"""Convolutions of a stack of clients without their columns: each kernel gathers the windows as it multiplies.

Written to memory, the columns of a small convolution are kernel-area times the size of its input, and at a thousand
clients moving them takes longer than multiplying them. Here x is (n, b, c, h, w), weight (n, o, c, kh, kw), at
stride 1 and without padding, all float32; a client's positions are its images' places, b·oh·ow of them in one row.

Every product has two forms. The direct one keeps a position a lane and a register a channel, multiplies in full
precision and pads nothing. The dot one pads channels and taps to a matrix product for the tensor cores, and serves
where TF32 is allowed and a gathered value meets enough channels. Nothing is added atomically: results repeat.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

PROCESSORS = 132  # of an H200; a grid of a few times as many programs keeps them busy
DOT_CHANNELS = 16  # with more output channels than these, and TF32 allowed, the tensor cores are used
REGISTERS = 96  # sums a lane holds in a direct convolution
SUMS = 64  # sums a lane holds in a direct weight gradient
TILE = 24  # channels a program of a direct convolution makes at most

triton: Any = None
tl: Any = None
if importlib.util.find_spec("triton") is not None:  # it is not there on machines without a GPU
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
if TYPE_CHECKING:
    Value: TypeAlias = Any  # what a kernel works on
    constexpr: TypeAlias = Any  # what is known when it is compiled
elif triton is not None:
    Value, constexpr = tl.tensor, tl.constexpr


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


def usable(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can serve these: x (n, b, c, h, w) and weight (n, o, c, kh, kw)."""
    outputs, channels, rows, columns = weight.shape[1:]
    return (
        triton is not None
        and x.is_cuda
        and x.dtype == weight.dtype == torch.float32
        and channels * outputs <= 1024
        and rows * columns <= 64
        and x[:1].numel() * max(1, outputs / channels) < 2**31  # addresses within a client are 32 bits wide
    )


# The kernels ----------------------------------------------------------------------------------------------------------


@_jit
def _places(start: Value, places: Value, BLOCK: constexpr, HEIGHT: constexpr, WIDTH: constexpr) -> Value:
    """Image, row and column of BLOCK positions from `start` on, and which of them there are; the others are clamped."""
    place = start + tl.arange(0, BLOCK)
    there = place < places
    place = tl.minimum(place, places - 1)
    image = place // (HEIGHT * WIDTH)
    spot = place % (HEIGHT * WIDTH)
    return image, spot // WIDTH, spot % WIDTH, there


@_jit
def _convolve_direct(
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
    sums = ()
    for _ in tl.static_range(CHANNELS):
        sums = sums + (tl.zeros([BLOCK], tl.float32),)
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
            more = ()
            for t in tl.static_range(CHANNELS):
                o = first + t
                if CO % CHANNELS != 0:
                    o = tl.minimum(o, CO - 1)
                more = more + (sums[t] + value * tl.load(taps + o * (KH * KW if ADJOINT else CI * KH * KW)),)
            sums = more
    lanes = target + client * batch * (CO * HO * WO) + (image * (CO * HO * WO) + row * WO + column)
    for t in tl.static_range(CHANNELS):
        o = first + t
        total = sums[t]
        if BIAS:
            total += tl.load(bias + client * CO + tl.minimum(o, CO - 1))
        tl.store(lanes + o * (HO * WO), total, mask=there & (o < CO))


@_jit
def _convolve_dot(
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
    TAPS: constexpr,
    PRECISION: constexpr,
) -> None:
    """The same sum as a product of weights (CHANNELS, taps) and gathered windows (taps, BLOCK), TAPS at a time."""
    places = batch * (HO * WO)
    tiles = tl.cdiv(places, BLOCK)
    client = (tl.program_id(0) // tiles).to(tl.int64)
    image, row, column, there = _places((tl.program_id(0) % tiles) * BLOCK, places, BLOCK, HO, WO)
    o = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    source += client * batch * (CI * HI * WI)
    weight += client * (CO * CI * KH * KW)
    at = image * (CI * HI * WI) + row * WI + column
    sums = tl.zeros([CHANNELS, BLOCK], tl.float32)
    for start in range(0, CI * KH * KW, TAPS):
        tap = start + tl.arange(0, TAPS)
        real = tap < CI * KH * KW
        channel = tap // (KH * KW)
        i = (tap % (KH * KW)) // KW
        j = tap % KW
        if ADJOINT:
            y = row[None, :] - i[:, None]
            x = column[None, :] - j[:, None]
            inside = real[:, None] & (y >= 0) & (y < HI) & (x >= 0) & (x < WI)
            windows = tl.load(source + ((channel * (HI * WI) - i * WI - j)[:, None] + at[None, :]), inside, other=0.0)
            where = (channel * (CO * KH * KW) + i * KW + j)[None, :] + o[:, None] * (KH * KW)
        else:
            windows = tl.load(
                source + ((channel * (HI * WI) + i * WI + j)[:, None] + at[None, :]), mask=real[:, None], other=0.0
            )
            where = tap[None, :] + o[:, None] * (CI * KH * KW)
        weights = tl.load(weight + where, mask=real[None, :] & (o < CO)[:, None], other=0.0)
        sums = tl.dot(weights, windows, sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + client * CO + o, mask=o < CO, other=0.0)[:, None]
    target += client * batch * (CO * HO * WO)
    where = (image * (CO * HO * WO) + row * WO + column)[None, :] + o[:, None] * (HO * WO)
    tl.store(target + where, sums, mask=there[None, :] & (o < CO)[:, None])


@_jit
def _weights_direct(
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
    LINES: constexpr,
) -> None:
    """dW[o,c,i,j] = Σ_p dy[o, p] source[c, p + (i,j)] over `chunk` positions p: a warp a row (c, i), a lane a position.

    LINES rows share the dy they read. One row more than there are reads ones, and so sums db[o] = Σ_p dy[o, p].
    """
    part = tl.program_id(0).to(tl.int64)  # client · splits + split
    client = part // splits
    places = batch * (HO * WO)
    start = (part % splits).to(tl.int32) * chunk
    end = tl.minimum(start + chunk, places)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    taps = ((line // KH) * (HI * WI) + (line % KH) * WI)[:, None]
    real = (line < CI * KH)[:, None]
    first = tl.program_id(2) * CHANNELS
    source += client * batch * (CI * HI * WI)
    dy += client * batch * (CO * HO * WO)
    sums = ()
    for _ in tl.static_range(CHANNELS * KW):
        sums = sums + (tl.zeros([LINES, 32], tl.float32),)
    for p in range(start, end, 32):
        image, row, column, there = _places(p, end, 32, HO, WO)
        at = (image * (CI * HI * WI) + row * WI + column)[None, :] + taps
        slopes = (image * (CO * HO * WO) + row * WO + column)[None, :] + tl.zeros_like(taps)
        values = ()
        for j in tl.static_range(KW):
            values = values + (tl.load(source + at + j, mask=real & there[None, :], other=1.0),)
        more = ()
        for t in tl.static_range(CHANNELS):
            o = first + t
            slope = tl.load(dy + slopes + o * (HO * WO), mask=there[None, :] & (o < CO), other=0.0)
            for j in tl.static_range(KW):
                more = more + (sums[t * KW + j] + slope * values[j],)
        sums = more
    dw += part * (CO * CI * KH * KW)
    db += part * CO
    lane = tl.arange(0, 32)[None, :]
    for group in tl.static_range((CHANNELS * KW + 31) // 32):  # lane l keeps the l-th sum of 32, for one store of all
        totals = tl.zeros([LINES, 32], tl.float32)
        for s in tl.static_range(32):
            if group * 32 + s < CHANNELS * KW:
                totals = tl.where(lane == s, tl.sum(sums[group * 32 + s], axis=1, keep_dims=True), totals)
        which = group * 32 + lane
        o = first + which // KW
        j = which % KW
        fits = (which < CHANNELS * KW) & (o < CO)
        tl.store(dw + (o * (CI * KH * KW) + j + line[:, None] * KW), totals, mask=fits & real)
        last = (line == CI * KH)[:, None]
        tl.store(db + (o + tl.zeros_like(line)[:, None]), totals, mask=fits & (j == 0) & last)


@_jit
def _weights_dot(
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
    """The same sum as a product of gathered windows (TAPS, positions) and dy (positions, CHANNELS), BLOCK at a time.

    One tap more than there are is a window of ones, for db.
    """
    part = tl.program_id(0).to(tl.int64)
    client = part // splits
    places = batch * (HO * WO)
    start = (part % splits).to(tl.int32) * chunk
    end = tl.minimum(start + chunk, places)
    tap = tl.program_id(1) * TAPS + tl.arange(0, TAPS)
    real = (tap < CI * KH * KW)[:, None]
    taps = ((tap // (KH * KW)) * (HI * WI) + ((tap % (KH * KW)) // KW) * WI + tap % KW)[:, None]
    o = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    source += client * batch * (CI * HI * WI)
    dy += client * batch * (CO * HO * WO)
    sums = tl.zeros([TAPS, CHANNELS], tl.float32)
    for p in range(start, end, BLOCK):
        image, row, column, there = _places(p, end, BLOCK, HO, WO)
        windows = tl.load(
            source + ((image * (CI * HI * WI) + row * WI + column)[None, :] + taps),
            mask=real & there[None, :],
            other=1.0,
        )
        slopes = tl.load(
            dy + ((image * (CO * HO * WO) + row * WO + column)[None, :] + (o * (HO * WO))[:, None]),
            mask=there[None, :] & (o < CO)[:, None],
            other=0.0,
        )
        sums = tl.dot(windows, tl.trans(slopes), sums, input_precision=PRECISION)
    dw += part * (CO * CI * KH * KW)
    tl.store(dw + (tap[:, None] + (o * (CI * KH * KW))[None, :]), sums, mask=real & (o < CO)[None, :])
    tl.store(
        db + part * CO + o[None, :] + tap[:, None] * 0, sums, mask=(tap == CI * KH * KW)[:, None] & (o < CO)[None, :]
    )


# Their launches: the block sizes are a plain rule of the shapes -------------------------------------------------------


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(a: int) -> int:
    return 1 << (a - 1).bit_length()


def _even(channels: int, most: int) -> int:
    """The channels of a tile, when as few tiles as possible of at most `most` are made as equal as possible."""
    return _cdiv(channels, _cdiv(channels, most))


def _convolve(source: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tf32: bool, adjoint: bool) -> None:
    """Fills target (n, b, co, ho, wo) from source (n, b, ci, hi, wi)."""
    n, batch, outputs, height, width = target.shape
    places = batch * height * width
    if not places or not n or not outputs:
        return
    shape = (*source.shape[2:], outputs, height, width, *weight.shape[3:])
    dot = tf32 and outputs > DOT_CHANNELS
    channels = min(64, max(16, _power(outputs))) if dot else _even(outputs, TILE)
    tiles = _cdiv(outputs, channels)
    block, least = (128, 64) if dot else (1024, 128)
    while block > least and (
        block >= 2 * places
        or n * tiles * _cdiv(places, block) < 2 * PROCESSORS
        or (not dot and block * channels > 128 * REGISTERS)
    ):
        block //= 2
    grid = (n * _cdiv(places, block), tiles)
    arguments = (source, weight, target if bias is None else bias, target, batch, *shape, adjoint, bias is not None)
    with torch.cuda.device_of(target):
        if dot:
            _convolve_dot[grid](*arguments, channels, block, 32, "tf32", num_warps=4, num_stages=3)
        else:
            _convolve_direct[grid](*arguments, channels, block, num_warps=4, num_stages=1)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    y = x.new_empty(_output_shape(x, weight))
    _convolve(x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), y, tf32, False)
    return y


def _input_gradient(dy: Tensor, weight: Tensor, height: int, width: int, tf32: bool) -> Tensor:
    dx = dy.new_empty((*dy.shape[:2], weight.shape[2], height, width))
    _convolve(dy.contiguous(), weight.contiguous(), None, dx, tf32, True)
    return dx


def _weight_gradient(dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool) -> tuple[Tensor, Tensor]:
    n, batch, outputs, height, width = dy.shape
    inputs = x.shape[2]
    places = batch * height * width
    if not places or not n:
        return dy.new_zeros((n, outputs, inputs, rows, columns)), dy.new_zeros((n, outputs))
    if tf32:
        taps = min(64, max(16, _power(inputs * rows * columns + 1)))
        channels = min(64, max(16, _power(outputs)))
        blocks = _cdiv(inputs * rows * columns + 1, taps), _cdiv(outputs, channels)
    else:
        taps = min(8, _power(inputs * rows + 1))
        channels = _even(outputs, max(1, SUMS // columns))
        blocks = _cdiv(inputs * rows + 1, taps), _cdiv(outputs, channels)
    splits = min(batch, _cdiv(4 * PROCESSORS, n * blocks[0] * blocks[1]))
    chunk = _cdiv(_cdiv(places, splits), 64) * 64
    splits = _cdiv(places, chunk)
    dw = dy.new_empty((n, splits, outputs, inputs, rows, columns))
    db = dy.new_empty((n, splits, outputs))
    grid = (n * splits, *blocks)
    shape = (*x.shape[2:], outputs, height, width, rows, columns)
    arguments = (dy.contiguous(), x.contiguous(), dw, db, batch, splits, chunk, *shape, channels, taps)
    with torch.cuda.device_of(dy):
        if tf32:
            _weights_dot[grid](*arguments, 64, "tf32", num_warps=4, num_stages=3)
        else:
            _weights_direct[grid](*arguments, num_warps=taps, num_stages=1)
    return (dw[:, 0], db[:, 0]) if splits == 1 else (dw.sum(1), db.sum(1))


# The same on a CPU, by columns, for tests -----------------------------------------------------------------------------


def _columns(x: Tensor, rows: int, columns: int) -> Tensor:
    """(n, b, c, oh, ow, kh, kw): the windows of each place."""
    return x.unfold(-2, rows, 1).unfold(-2, columns, 1)


def _forward_plain(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    y = torch.einsum("nbcyxij,nocij->nboyx", _columns(x, *weight.shape[3:]), weight)
    return (y if bias is None else y + bias[:, None, :, None, None]).contiguous()


def _input_gradient_plain(dy: Tensor, weight: Tensor, height: int, width: int, tf32: bool) -> Tensor:
    rows, columns = weight.shape[3:]
    padded = torch.nn.functional.pad(dy, (columns - 1, columns - 1, rows - 1, rows - 1))
    return torch.einsum("nboyxij,nocij->nbcyx", _columns(padded, rows, columns), weight.flip(3, 4)).contiguous()


def _weight_gradient_plain(dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool) -> tuple[Tensor, Tensor]:
    dw = torch.einsum("nbcyxij,nboyx->nocij", _columns(x, rows, columns), dy)
    return dw.contiguous(), dy.sum((1, 3, 4))


# As operations of torch -----------------------------------------------------------------------------------------------


def _output_shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], weight.shape[1], x.shape[3] - weight.shape[3] + 1, x.shape[4] - weight.shape[4] + 1)


@functools.cache
def operations() -> SimpleNamespace:
    """The three as operations that a tracer records and a compiler leaves alone; registered at the first use."""

    def register(name: str, schema: str, kernel: Any, plain: Any, fake: Any) -> Any:
        operation = torch.library.custom_op(
            f"fedproto::{name}", kernel, mutates_args=(), device_types="cuda", schema=schema
        )
        operation.register_kernel("cpu")(plain)
        operation.register_fake(fake)
        return operation

    return SimpleNamespace(
        forward=register(
            "convolution",
            "(Tensor x, Tensor weight, Tensor? bias, bool tf32) -> Tensor",
            _forward,
            _forward_plain,
            lambda x, weight, bias, tf32: x.new_empty(_output_shape(x, weight)),
        ),
        weight_gradient=register(
            "convolution_weight_gradient",
            "(Tensor dy, Tensor x, int rows, int columns, bool tf32) -> (Tensor, Tensor)",
            _weight_gradient,
            _weight_gradient_plain,
            lambda dy, x, rows, columns, tf32: (
                dy.new_empty((dy.shape[0], dy.shape[2], x.shape[2], rows, columns)),
                dy.new_empty((dy.shape[0], dy.shape[2])),
            ),
        ),
        input_gradient=register(
            "convolution_input_gradient",
            "(Tensor dy, Tensor weight, int height, int width, bool tf32) -> Tensor",
            _input_gradient,
            _input_gradient_plain,
            lambda dy, weight, height, width, tf32: dy.new_empty((*dy.shape[:2], weight.shape[2], height, width)),
        ),
    )


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    """y[n,b,o,y,x] = bias[n,o] + Σ_{c,i,j} weight[n,o,c,i,j] x[n,b,c,y+i,x+j]."""
    return operations().forward(x, weight, bias, tf32)


def weight_gradient(dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool) -> tuple[Tensor, Tensor]:
    """dW[n,o,c,i,j] = Σ_{b,y,x} dy[n,b,o,y,x] x[n,b,c,y+i,x+j], and db[n,o] = Σ_{b,y,x} dy[n,b,o,y,x]."""
    return operations().weight_gradient(dy, x, rows, columns, tf32)


def input_gradient(dy: Tensor, weight: Tensor, height: int, width: int, tf32: bool) -> Tensor:
    """dx[n,b,c,y,x] = Σ_{o,i,j} weight[n,o,c,i,j] dy[n,b,o,y−i,x−j], with dy zero outside."""
    return operations().input_gradient(dy, weight, height, width, tf32)


class StackedConvolution(Function):
    """x (n, b, c, h, w) with each client's own weight (n, o, c, kh, kw) and bias (n, o): (n, b, o, oh, ow)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward(x, weight, bias, torch.backends.cuda.matmul.allow_tf32)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        tf32 = torch.backends.cuda.matmul.allow_tf32
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dy, weight, *x.shape[3:], tf32)
        if ctx.needs_input_grad[1]:
            dw, db = weight_gradient(dy, x, *weight.shape[3:], tf32)
        elif ctx.needs_input_grad[2]:
            db = dy.sum((1, 3, 4))
        return dx, dw, db if ctx.needs_input_grad[2] else None
