"""Large convolutions of a stack of clients on a GPU, by windows and batched matrix products.

cuDNN runs a convolution with one group per client several times slower than the GPU could. Here
each client's windows are written as the rows of a matrix, which a batched product takes from there;
its gradients are two more such products, and a sum over the windows that contain a pixel. Images
are (clients, channels, batch, height, width) in memory: a matrix product leaves them so, BatchNorm
is then a sum over rows, and nothing is copied in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fedproto.engines.gpu.kernels import Value, ceil_div, constexpr, jit, operation, tl

VALUES_PER_PROGRAM = 1024  # that a program of either kernel writes
WARPS = 8
#: From this many values per client on, 32 bits cannot count their places.
MIN_FAR_PLACES = 2**31 - VALUES_PER_PROGRAM


class WindowLayout(NamedTuple):
    """The shape of an image, and where its windows are; operations get it as a list of numbers."""

    channels: int
    height: int
    width: int
    rows: int  # of places for the window
    columns: int  # of places for the window
    taps_down: int
    taps_right: int
    stride_down: int
    stride_right: int
    up: int  # how far the first window extends beyond the upper edge
    left: int  # how far it extends beyond the left edge


@jit
def _find_places(blocks: Value, FAR: constexpr, BLOCK: constexpr) -> Value:
    """Returns this program's client, and the places it writes among the client's values.

    FAR: 32 bits cannot count them.
    """
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
    client_stride: Value,
    image_stride: Value,
    channel_stride: Value,
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
    """target[place, (channel, i, j)] = source[channel, pixel (i, j) of the place's window].

    It is zero outside the image.
    """
    client, at = _find_places(blocks, FAR, BLOCK)
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
        + client * client_stride
        + (image * image_stride + channel * channel_stride + y * W + x),
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
    """target[channel, image, y, x] = the sum of source over the windows and taps at (y, x)."""
    client, at = _find_places(blocks, FAR, BLOCK)
    there = at < size
    # Neighbouring programs take an image's channels in turn: they share the rows of its windows.
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


# --- launching the kernels


def _unfold(x: Tensor, layout: list[int]) -> Tensor:
    windows = WindowLayout(*layout)
    clients, batch = x.shape[:2]
    if x.stride()[3:] != (windows.width, 1):
        x = x.contiguous()
    out = x.new_empty(_unfolded_shape(x, windows))
    count = out[0].numel()
    strides = x.stride()[:3]
    blocks = ceil_div(count, VALUES_PER_PROGRAM)
    source_extent = batch * strides[1] + windows.channels * strides[2]
    far = max(count, source_extent) >= MIN_FAR_PLACES
    grid = (blocks * clients,)
    with torch.cuda.device_of(x):
        _unfold_kernel[grid](
            x, out, count, blocks, *strides, *windows, far, VALUES_PER_PROGRAM, num_warps=WARPS
        )
    return out


def _fold(values: Tensor, batch: int, layout: list[int]) -> Tensor:
    windows = WindowLayout(*layout)
    out = values.new_empty(_folded_shape(values, batch, windows))
    count = values[0].numel()
    size = out[0].numel()
    blocks = ceil_div(size, VALUES_PER_PROGRAM)
    double = out.dtype == torch.float64
    far = count >= MIN_FAR_PLACES
    numbers = (batch, count, size, blocks)
    constants = (*windows, double, far, VALUES_PER_PROGRAM)
    grid = (blocks * len(out),)
    with torch.cuda.device_of(values):
        _fold_kernel[grid](values.contiguous(), out, *numbers, *constants, num_warps=WARPS)
    return out


def _unfolded_shape(x: Tensor, windows: WindowLayout) -> tuple[int, ...]:
    places = x.shape[1] * windows.rows * windows.columns
    values_per_window = windows.channels * windows.taps_down * windows.taps_right
    return len(x), places, values_per_window


def _folded_shape(values: Tensor, batch: int, windows: WindowLayout) -> tuple[int, ...]:
    return len(values), windows.channels, batch, windows.height, windows.width


# --- the same on a CPU, tap by tap, for tests


def _pixels_of_tap(windows: WindowLayout, i: int, j: int) -> tuple[slice, slice]:
    """Return the pixels of an image with its border that tap (i, j) of the windows is at."""
    rows_end = i + windows.rows * windows.stride_down
    columns_end = j + windows.columns * windows.stride_right
    return slice(i, rows_end, windows.stride_down), slice(j, columns_end, windows.stride_right)


def _make_border(like: Tensor, windows: WindowLayout, *leading: int) -> tuple[Tensor, Tensor]:
    """Return zeros large enough for an image and all its windows; and the part for the image."""
    last_row = (windows.rows - 1) * windows.stride_down
    last_column = (windows.columns - 1) * windows.stride_right
    bottom = windows.up + windows.height
    right = windows.left + windows.width
    height = max(bottom, last_row + windows.taps_down)
    width = max(right, last_column + windows.taps_right)
    zeros = like.new_zeros(*leading, height, width)
    return zeros, zeros[..., windows.up : bottom, windows.left : right]


def _unfold_plain(x: Tensor, layout: list[int]) -> Tensor:
    windows = WindowLayout(*layout)
    bordered, image = _make_border(x, windows, *x.shape[:3])
    image.copy_(x)
    taps = []
    for i in range(windows.taps_down):
        for j in range(windows.taps_right):
            rows, columns = _pixels_of_tap(windows, i, j)
            taps.append(bordered[..., rows, columns])
    by_place = torch.stack(taps, -1).permute(0, 1, 3, 4, 2, 5)
    return by_place.reshape(_unfolded_shape(x, windows))


def _fold_plain(values: Tensor, batch: int, layout: list[int]) -> Tensor:
    windows = WindowLayout(*layout)
    clients = len(values)
    bordered, image = _make_border(values, windows, clients, batch, windows.channels)
    places = (windows.rows, windows.columns)
    taps = (windows.taps_down, windows.taps_right)
    by_place = values.reshape(clients, batch, *places, windows.channels, *taps)
    by_tap = by_place.permute(0, 1, 4, 2, 3, 5, 6)
    for i in range(windows.taps_down):
        for j in range(windows.taps_right):
            rows, columns = _pixels_of_tap(windows, i, j)
            bordered[..., rows, columns] += by_tap[..., i, j]
    return image.transpose(1, 2).contiguous()


# --- as operations of torch


def _unfold_shapes(x: Tensor, layout: list[int]) -> Tensor:
    return x.new_empty(_unfolded_shape(x, WindowLayout(*layout)))


def _fold_shapes(values: Tensor, batch: int, layout: list[int]) -> Tensor:
    return values.new_empty(_folded_shape(values, batch, WindowLayout(*layout)))


unfold = operation(
    "unfold",
    "(Tensor x, int[] layout) -> Tensor",
    kernel=_unfold,
    plain=_unfold_plain,
    fake=_unfold_shapes,
)
fold = operation(
    "fold",
    "(Tensor values, int batch, int[] layout) -> Tensor",
    kernel=_fold,
    plain=_fold_plain,
    fake=_fold_shapes,
)


# --- the convolution


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
    """Return the convolutions of a stack's images, with each client's own kernels.

    x       (clients, batch, channels, height, width)
    weight  (clients, out, channels, rows, columns)
    """
    batch, channels, height, width = x.shape[1:]
    taps = weight.shape[3:]
    rows = (height + 2 * padding[0] - taps[0]) // stride[0] + 1
    columns = (width + 2 * padding[1] - taps[1]) // stride[1] + 1
    # A WindowLayout, as a list.
    layout = [channels, height, width, rows, columns, *taps, *stride, *padding]
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        weight = weight.to(dtype)
    product = _WindowProduct.apply(x, weight.flatten(2), layout)
    out = product.unflatten(2, (batch, rows, columns)).transpose(1, 2)
    if bias is None:
        return out
    return out + bias[:, None, :, None, None].to(out.dtype)


class _WindowProduct(Function):
    """y = W · windowsᵀ, (clients, out, batch·places); dW = dy · windows; dx = fold(dyᵀ · W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layout: list[int]) -> Tensor:
        windows = unfold(x, layout)
        ctx.save_for_backward(windows, weight)
        ctx.batch = x.shape[1]
        ctx.layout = layout
        return torch.bmm(weight, windows.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        windows, weight = ctx.saved_tensors
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:
            window_gradients = torch.bmm(dy.transpose(1, 2), weight)
            dx = fold(window_gradients, ctx.batch, ctx.layout).transpose(1, 2)
        if ctx.needs_input_grad[1]:
            dw = torch.bmm(dy, windows)
        return dx, dw, None
