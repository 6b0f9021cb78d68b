"""Small convolutions of a stack of clients on a GPU: kernels that gather windows as they multiply.

Written to memory, the columns of a small convolution are as many times larger than its input as
its window has pixels, and with a thousand clients moving them takes longer than multiplying them.
Here x is (n, b, c, h, w) and weight (n, o, c, kh, kw), at stride 1 and without padding, all
float32. A client's positions are the places of a window in all its images, b·oh·ow of them.

The convolution and the gradient of its input keep one position per lane and one channel per
register, and pad nothing. The gradient of the weights pads channels and taps to a matrix product
for the tensor cores. These multiply in TF32 where that is allowed, and else three times, for what
TF32 leaves out (the relative error is then that of float32, 1e-7). Nothing is added atomically, so
results can be repeated.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedproto.core.engine import even_size
from fedproto.engines.gpu.kernels import (
    Value,
    ceil_div,
    constexpr,
    jit,
    next_power_of_two,
    operation,
    tl,
    triton,
)

GPU_PROCESSORS = 132  # of an H200; a grid of a few times as many programs keeps them busy
LANES = 32  # per warp
MAX_SUMS_PER_LANE = 96  # that a lane holds in registers in a direct convolution
MAX_CHANNELS_PER_PROGRAM = 24  # that a program of a direct convolution computes
MAX_POSITIONS_PER_LANE = 8
MAX_WARPS = 4
#: Positions that are multiplied at a time for the gradient of the weights.
POSITIONS_PER_PRODUCT = 64


def usable(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels can convolve these.

    x       (n, b, c, h, w)
    weight  (n, o, c, kh, kw)
    """
    if triton is None or not x.is_cuda:
        return False
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    outputs, channels, rows, columns = weight.shape[1:]
    if channels * outputs > 1024 or rows * columns > 64:
        return False
    largest_size = x[:1].numel() * max(1, outputs / channels)
    return largest_size < 2**31  # addresses within a client are 32 bits wide


# --- the kernels


@jit
def _places(
    start: Value, places: Value, BLOCK: constexpr, HEIGHT: constexpr, WIDTH: constexpr
) -> Value:
    """Returns image, row and column of BLOCK positions from `start` on, and which of them exist.

    The others are clamped.
    """
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
    """target[o, p] = bias[o] + Σ_{c,i,j} W[o,c,i,j] source[c, p + (i,j)].

    A program computes CHANNELS of o and BLOCK positions p. ADJOINT is the gradient of the input,
    the same sum with W's channels exchanged and source[c, p − (i,j)], zero outside. A lane loads a
    source value once and a weight once, for CHANNELS · (BLOCK / lanes) multiplications.
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

    A product of gathered windows (TAPS, positions) and dy (positions, CHANNELS), BLOCK positions
    at a time. An additional tap is a window of ones, for db[o] = Σ_p dy[o, p].
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


# --- launching the kernels: block sizes depend on the shapes only


def _convolve(
    source: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, adjoint: bool
) -> None:
    """Fill target (n, b, co, ho, wo) from source (n, b, ci, hi, wi)."""
    clients, batch, outputs, height, width = target.shape
    places = batch * height * width
    if not places or not clients or not outputs:
        return
    has_bias = bias is not None
    tensors = (source, weight, bias if has_bias else target, target)
    shape = (*source.shape[2:], outputs, height, width, *weight.shape[3:])
    channels, block, warps = _choose_blocks(clients, places, outputs)
    constants = (*shape, adjoint, has_bias, channels, block)
    grid = (clients * ceil_div(places, block), ceil_div(outputs, channels))
    with torch.cuda.device_of(target):
        _convolution_kernel[grid](*tensors, batch, *constants, num_warps=warps, num_stages=1)


def _choose_blocks(clients: int, places: int, outputs: int) -> tuple[int, int, int]:
    """Return the channels and positions of a program, and its warps.

    A lane takes up to 8 positions, since a weight it loads serves them all; fewer, and then fewer
    channels, where there would be too few warps to fill the GPU. Warps share nothing, so there are
    as few as waste no positions.
    """

    def leaves_gpu_idle(channels: int, positions_per_lane: int) -> bool:
        warps_per_channels = ceil_div(places, LANES * positions_per_lane)
        return clients * ceil_div(outputs, channels) * warps_per_channels < 8 * GPU_PROCESSORS

    per_lane = MAX_POSITIONS_PER_LANE
    channels = even_size(outputs, MAX_CHANNELS_PER_PROGRAM)
    while per_lane > 1:
        if per_lane * channels <= MAX_SUMS_PER_LANE and not leaves_gpu_idle(channels, per_lane):
            break
        per_lane //= 2
    while channels > 4 and leaves_gpu_idle(channels, per_lane):
        channels = even_size(outputs, channels // 2)
    warps = MAX_WARPS
    while warps > 1:
        block = LANES * per_lane * warps
        if ceil_div(places, block) * block <= 1.125 * places:
            break
        warps //= 2
    return channels, LANES * per_lane * warps, warps


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.new_empty(_output_shape(x, weight))
    if bias is not None:
        bias = bias.contiguous()
    _convolve(x.contiguous(), weight.contiguous(), bias, y, adjoint=False)
    return y


def _input_gradient(dy: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    dx = dy.new_empty(_input_shape(dy, weight, height, width))
    _convolve(dy.contiguous(), weight.contiguous(), None, dx, adjoint=True)
    return dx


def _weight_gradient(
    dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    clients, batch, outputs, height, width = dy.shape
    inputs = x.shape[2]
    places = batch * height * width
    if not places or not clients:
        dw = dy.new_zeros((clients, outputs, inputs, rows, columns))
        return dw, dy.new_zeros((clients, outputs))
    all_taps = inputs * rows * columns + 1  # and one for the bias
    taps = min(64, max(16, next_power_of_two(all_taps)))
    channels = min(64, max(16, next_power_of_two(outputs)))
    tap_blocks = ceil_div(all_taps, taps)
    channel_blocks = ceil_div(outputs, channels)
    # A client's positions are split into chunks, so that there are enough programs.
    splits = min(batch, ceil_div(4 * GPU_PROCESSORS, clients * tap_blocks * channel_blocks))
    products_per_chunk = ceil_div(ceil_div(places, splits), POSITIONS_PER_PRODUCT)
    chunk = products_per_chunk * POSITIONS_PER_PRODUCT
    splits = ceil_div(places, chunk)
    dw = dy.new_empty((clients, splits, outputs, inputs, rows, columns))
    db = dy.new_empty((clients, splits, outputs))
    tensors = (dy.contiguous(), x.contiguous(), dw, db)
    shape = (*x.shape[2:], outputs, height, width, rows, columns)
    precision = "tf32" if tf32 else "tf32x3"
    constants = (*shape, channels, taps, POSITIONS_PER_PRODUCT, precision)
    grid = (clients * splits, tap_blocks, channel_blocks)
    with torch.cuda.device_of(dy):
        _weights_kernel[grid](*tensors, batch, splits, chunk, *constants, num_warps=4, num_stages=3)
    if splits == 1:
        return dw[:, 0], db[:, 0]
    return dw.sum(1), db.sum(1)


# --- the same on a CPU, by columns, for tests


def _make_windows(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the windows of each place: (n, b, c, oh, ow, kh, kw)."""
    return x.unfold(-2, rows, 1).unfold(-2, columns, 1)


def _forward_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    windows = _make_windows(x, *weight.shape[3:])
    y = torch.einsum("nbcyxij,nocij->nboyx", windows, weight)
    if bias is not None:
        y = y + bias[:, None, :, None, None]
    return y.contiguous()


def _input_gradient_plain(dy: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    rows, columns = weight.shape[3:]
    padded = F.pad(dy, (columns - 1, columns - 1, rows - 1, rows - 1))
    windows = _make_windows(padded, rows, columns)
    return torch.einsum("nboyxij,nocij->nbcyx", windows, weight.flip(3, 4)).contiguous()


def _weight_gradient_plain(
    dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    windows = _make_windows(x, rows, columns)
    dw = torch.einsum("nbcyxij,nboyx->nocij", windows, dy)
    return dw.contiguous(), dy.sum((1, 3, 4))


# --- as operations of torch


def _output_shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    clients, batch, _, height, width = x.shape
    outputs, _, rows, columns = weight.shape[1:]
    return clients, batch, outputs, height - rows + 1, width - columns + 1


def _input_shape(dy: Tensor, weight: Tensor, height: int, width: int) -> tuple[int, ...]:
    return (*dy.shape[:2], weight.shape[2], height, width)


def _forward_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(_output_shape(x, weight))


def _input_gradient_shapes(dy: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    return dy.new_empty(_input_shape(dy, weight, height, width))


def _weight_gradient_shapes(
    dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    clients, _, outputs = dy.shape[:3]
    dw = dy.new_empty((clients, outputs, x.shape[2], rows, columns))
    return dw, dy.new_empty((clients, outputs))


def _register() -> SimpleNamespace:
    """Return the three as operations that a tracer records and a compiler leaves alone."""
    return SimpleNamespace(
        forward=operation(
            "convolution",
            "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
            kernel=_forward,
            plain=_forward_plain,
            fake=_forward_shapes,
        ),
        weight_gradient=operation(
            "convolution_weight_gradient",
            "(Tensor dy, Tensor x, int rows, int columns, bool tf32) -> (Tensor, Tensor)",
            kernel=_weight_gradient,
            plain=_weight_gradient_plain,
            fake=_weight_gradient_shapes,
        ),
        input_gradient=operation(
            "convolution_input_gradient",
            "(Tensor dy, Tensor weight, int height, int width) -> Tensor",
            kernel=_input_gradient,
            plain=_input_gradient_plain,
            fake=_input_gradient_shapes,
        ),
    )


operations = _register()  # takes 5 ms


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return y[n,b,o,y,x] = bias[n,o] + Σ_{c,i,j} weight[n,o,c,i,j] x[n,b,c,y+i,x+j]."""
    return operations.forward(x, weight, bias)


def weight_gradient(
    dy: Tensor, x: Tensor, rows: int, columns: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weights and of the bias.

    dW[n,o,c,i,j] = Σ_{b,y,x} dy[n,b,o,y,x] x[n,b,c,y+i,x+j]
    db[n,o] = Σ_{b,y,x} dy[n,b,o,y,x]
    """
    return operations.weight_gradient(dy, x, rows, columns, tf32)


def input_gradient(dy: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """Return dx[n,b,c,y,x] = Σ_{o,i,j} weight[n,o,c,i,j] dy[n,b,o,y−i,x−j], dy zero outside."""
    return operations.input_gradient(dy, weight, height, width)


class StackedConvolution(Function):
    """A convolution of each client's images with its own weight and bias.

    x (n, b, c, h, w), weight (n, o, c, kh, kw) and bias (n, o) give (n, b, o, oh, ow).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        dx = dw = db = None
        if needs_dx:
            dx = input_gradient(dy, weight, x.shape[3], x.shape[4])
        if needs_dw:
            allow_tf32 = torch.backends.cuda.matmul.allow_tf32
            dw, db = weight_gradient(dy, x, weight.shape[3], weight.shape[4], allow_tf32)
        elif needs_db:
            db = dy.sum((1, 3, 4))
        return dx, dw, db if needs_db else None
