"""Large convolutions of a stack of clients on a GPU: windows written out, one batched matrix product, windows added up.

cuDNN runs a convolution with a group a client several times slower than the card could. Here each client's windows are
written as the rows of a matrix, which the batched product of a well-kept library takes from there; its gradients are
two more such products, and the sum over the windows in which a pixel stood. Images lie channel by channel in memory,
(clients, channels, batch, height, width): a matrix product leaves them so, BatchNorm is then a sum over a row, and
nothing is copied in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fedproto.engines.gpu.kernels import Value, constexpr, jit, operation, tl

BLOCK = 1024  # values a program of either kernel writes
NEAR = 2**31 - BLOCK  # places of a client that 32 bits can count


class Shape(NamedTuple):
    """How windows lie on an image."""

    channels: int
    height: int
    width: int
    rows: int  # places of the window, downwards
    columns: int
    taps_down: int
    taps_right: int
    stride_down: int
    stride_right: int
    up: int  # how far the first window reaches over the image's edges
    left: int


@jit
def _spot(blocks: Value, FAR: constexpr, BLOCK: constexpr) -> Value:
    """The client of this program, and the places it writes among the client's; FAR: more than 32 bits can count."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if FAR:
        block = block.to(tl.int64)
    return client, block * BLOCK + tl.arange(0, BLOCK)


@jit
def _unfold_kernel(
    source: Value,
    target: Value,
    count: Value,
    blocks: Value,
    client_apart: Value,
    image_apart: Value,
    channel_apart: Value,
    C: constexpr,
    H: constexpr,
    W: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    TI: constexpr,
    TJ: constexpr,
    SI: constexpr,
    SJ: constexpr,
    UP: constexpr,
    LEFT: constexpr,
    FAR: constexpr,
    BLOCK: constexpr,
) -> None:
    """target[place, (channel, i, j)] = source[channel, window of the place at (i, j)], zero outside the image."""
    client, at = _spot(blocks, FAR, BLOCK)
    there = at < count
    tap = at % (TI * TJ)
    channel = (at // (TI * TJ)) % C
    place = at // (C * TI * TJ)
    y = (place // COLUMNS) % ROWS * SI + tap // TJ - UP
    x = place % COLUMNS * SJ + tap % TJ - LEFT
    inside = there & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    image = place // (ROWS * COLUMNS)
    value = tl.load(
        source
        + client * client_apart
        + (image * image_apart + channel * channel_apart + y * W + x),
        mask=inside,
        other=0,
    )
    tl.store(target + client * count + at, value, mask=there)


@jit
def _fold_kernel(
    source: Value,
    target: Value,
    batch: Value,
    count: Value,
    size: Value,
    blocks: Value,
    C: constexpr,
    H: constexpr,
    W: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    TI: constexpr,
    TJ: constexpr,
    SI: constexpr,
    SJ: constexpr,
    UP: constexpr,
    LEFT: constexpr,
    DOUBLE: constexpr,
    FAR: constexpr,
    BLOCK: constexpr,
) -> None:
    """target[channel, image, y, x] = the sum of source over the windows and taps that look at (y, x)."""
    client, at = _spot(blocks, FAR, BLOCK)
    there = at < size
    # Neighbouring programs take an image's channels one after the other: they share the rows of its windows.
    x = at % W
    y = (at // W) % H
    channel = (at // (W * H)) % C
    image = at // (W * H * C)
    source += client * count
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    for i in tl.static_range(TI):
        row = y + UP - i
        fits_down = there & (row >= 0) & (row % SI == 0) & (row < ROWS * SI)
        for j in tl.static_range(TJ):
            column = x + LEFT - j
            fits = fits_down & (column >= 0) & (column % SJ == 0) & (column < COLUMNS * SJ)
            place = (image * ROWS + row // SI) * COLUMNS + column // SJ
            window = source + (place * (C * TI * TJ) + channel * (TI * TJ) + i * TJ + j)
            total += tl.load(window, mask=fits, other=0).to(total.dtype)
    target += client * size
    tl.store(target + ((channel * batch + image) * (H * W) + y * W + x), total, mask=there)


def _unfold(x: Tensor, shape: list[int]) -> Tensor:
    how, (clients, batch) = Shape(*shape), x.shape[:2]
    x = x if x.stride()[3:] == (how.width, 1) else x.contiguous()
    out = x.new_empty(_unfolded(x, how))
    count, strides = out[0].numel(), x.stride()[:3]
    blocks = -(-count // BLOCK)
    far = max(count, batch * strides[1] + how.channels * strides[2]) >= NEAR
    with torch.cuda.device_of(x):
        _unfold_kernel[(blocks * clients,)](
            x, out, count, blocks, *strides, *how, far, BLOCK, num_warps=8
        )
    return out


def _fold(windows: Tensor, batch: int, shape: list[int]) -> Tensor:
    how = Shape(*shape)
    out = windows.new_empty(_folded(windows, batch, how))
    count, size = windows[0].numel(), out[0].numel()
    blocks = -(-size // BLOCK)
    kinds = out.dtype == torch.float64, count >= NEAR
    with torch.cuda.device_of(windows):
        _fold_kernel[(blocks * len(out),)](
            windows.contiguous(), out, batch, count, size, blocks, *how, *kinds, BLOCK, num_warps=8
        )
    return out


def _unfolded(x: Tensor, how: Shape) -> tuple[int, ...]:
    return (
        len(x),
        x.shape[1] * how.rows * how.columns,
        how.channels * how.taps_down * how.taps_right,
    )


def _folded(windows: Tensor, batch: int, how: Shape) -> tuple[int, ...]:
    return len(windows), how.channels, batch, how.height, how.width


# The same on a CPU, tap by tap, for tests -----------------------------------------------------------------------------


def _seen(how: Shape, i: int, j: int) -> tuple[slice, slice]:
    """The pixels of an image with its border that tap (i, j) of the windows looks at."""
    return (
        slice(i, i + how.rows * how.stride_down, how.stride_down),
        slice(j, j + how.columns * how.stride_right, how.stride_right),
    )


def _bordered(like: Tensor, how: Shape, *leading: int) -> tuple[Tensor, Tensor]:
    """Zeros, with room around the image for every window; and the image in them."""
    height = max(how.up + how.height, (how.rows - 1) * how.stride_down + how.taps_down)
    width = max(how.left + how.width, (how.columns - 1) * how.stride_right + how.taps_right)
    zeros = like.new_zeros(*leading, height, width)
    return zeros, zeros[..., how.up : how.up + how.height, how.left : how.left + how.width]


def _unfold_plain(x: Tensor, shape: list[int]) -> Tensor:
    how = Shape(*shape)
    bordered, image = _bordered(x, how, *x.shape[:3])
    image.copy_(x)
    taps = [
        bordered[..., *_seen(how, i, j)]
        for i in range(how.taps_down)
        for j in range(how.taps_right)
    ]
    return torch.stack(taps, -1).permute(0, 1, 3, 4, 2, 5).reshape(_unfolded(x, how))


def _fold_plain(windows: Tensor, batch: int, shape: list[int]) -> Tensor:
    how = Shape(*shape)
    bordered, image = _bordered(windows, how, len(windows), batch, how.channels)
    parts = windows.reshape(
        len(windows), batch, how.rows, how.columns, how.channels, how.taps_down, how.taps_right
    ).permute(0, 1, 4, 2, 3, 5, 6)
    for i in range(how.taps_down):
        for j in range(how.taps_right):
            bordered[..., *_seen(how, i, j)] += parts[..., i, j]
    return image.transpose(1, 2).contiguous()


unfold = operation(
    "unfold",
    "(Tensor x, int[] shape) -> Tensor",
    _unfold,
    _unfold_plain,
    lambda x, shape: x.new_empty(_unfolded(x, Shape(*shape))),
)
fold = operation(
    "fold",
    "(Tensor windows, int batch, int[] shape) -> Tensor",
    _fold,
    _fold_plain,
    lambda windows, batch, shape: windows.new_empty(_folded(windows, batch, Shape(*shape))),
)


# A convolution of them ------------------------------------------------------------------------------------------------


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
    """(clients, batch, channels, height, width) with each client's own kernels (clients, out, channels, …)."""
    height, width = x.shape[3:]
    taps = weight.shape[3:]
    rows, columns = ((x.shape[3 + a] + 2 * padding[a] - taps[a]) // stride[a] + 1 for a in (0, 1))
    how = [weight.shape[2], height, width, rows, columns, *taps, *stride, *padding]  # a Shape
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (value.to(torch.get_autocast_dtype(x.device.type)) for value in (x, weight))
    out = (
        _Product.apply(x, weight.flatten(2), how)
        .unflatten(2, (x.shape[1], rows, columns))
        .transpose(1, 2)
    )
    return out if bias is None else out + bias[:, None, :, None, None].to(out.dtype)


class _Product(Function):
    """y = W · windowsᵀ, (clients, out, batch·places); dW = dy · windows; dx = fold(dyᵀ · W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: list[int]) -> Tensor:
        windows = unfold(x, shape)
        ctx.save_for_backward(windows, weight)
        ctx.batch, ctx.shape = x.shape[1], shape
        return torch.bmm(weight, windows.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        windows, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = fold(torch.bmm(dy.transpose(1, 2), weight), ctx.batch, ctx.shape).transpose(1, 2)
        if ctx.needs_input_grad[1]:
            dw = torch.bmm(dy, windows)
        return dx, dw, None
