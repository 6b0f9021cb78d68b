"""Layers for a stack of clients: those that torch's vmap runs slowly, or cannot run correctly.

A model is an ordinary module, run for all clients of a stack by `vmap`; some of its layers are
replaced in a copy of it. The fastest form of each was found by measurement
(benchmarks/RESULTS.md). On a CPU the clients of a stack are side by side as channels of one
channels-last image, for convolutions (one group per client) and for pooling. On a GPU a small
convolution has its own kernels (`gpu/implicit_convolutions.py`), or is a batched matrix product
over its input's columns; a large one is a batched product of windows in the memory layout that
BatchNorm needs (`gpu/window_convolutions.py`). BatchNorm leaves padding out (`masked_norm.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedproto.engines.gpu import window_convolutions
from fedproto.engines.vectorised import layer_support
from fedproto.engines.vectorised.layer_support import StackedFunction
from fedproto.engines.vectorised.masked_norm import (
    ROWS,
    MaskedNorm,
    MaskedNorm1d,
    MaskedNorm2d,
    MaskedNorm3d,
)

#: Convolutions at stride 1 with at most this many weights are small: a GPU has kernels for them.
MAX_SMALL_WEIGHTS = 8192
#: From this many clients on, kernels without columns are faster than columns that a compiler fuses.
MIN_CLIENTS_WITHOUT_COLUMNS = 64


def make_stackable(module: nn.Module, tidy: bool = False) -> tuple[nn.Module, list[str]]:
    """Return a copy of a module with layers for a stack.

    Also returns the names of the buffers in which its BatchNorm layers expect the mask of a batch.

    tidy  layers leave each client's values contiguous, as `x.view` in a user's module needs them
    """
    module = copy.deepcopy(module)
    padding_buffers = []
    for name, layer in module.named_modules():
        stacked_type = STACKED_LAYERS.get(type(layer))
        if stacked_type is None:
            continue
        layer.__class__ = stacked_type
        layer.tidy = tidy
        if issubclass(stacked_type, MaskedNorm):
            layer.register_buffer(ROWS, None, persistent=False)
            padding_buffers.append(f"{name}.{ROWS}" if name else ROWS)
    return module, padding_buffers


# --- the layers


class _StackedConv2d(nn.Conv2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(x)
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        return _lay_out(_Convolution.call(x, self.weight, self.bias, *geometry), self.tidy)


class _StackedMaxPool2d(nn.MaxPool2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        return _lay_out(_PerChannel.call(x, super().forward), self.tidy)


class _StackedAvgPool2d(nn.AvgPool2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        return _lay_out(_PerChannel.call(x, super().forward), self.tidy)


class _StackedAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        return _lay_out(_PerChannel.call(x, super().forward), self.tidy)


def _lay_out(x: Tensor, tidy: bool) -> Tensor:
    """Return x, contiguous if `tidy`."""
    return x.clone(memory_format=torch.contiguous_format) if tidy else x


#: Each type of layer that has another form in a stack.
STACKED_LAYERS: dict[type, type] = {
    nn.Conv2d: _StackedConv2d,
    nn.MaxPool2d: _StackedMaxPool2d,
    nn.AvgPool2d: _StackedAvgPool2d,
    nn.AdaptiveAvgPool2d: _StackedAdaptiveAvgPool2d,
    nn.BatchNorm1d: MaskedNorm1d,
    nn.BatchNorm2d: MaskedNorm2d,
    nn.BatchNorm3d: MaskedNorm3d,
}


# --- what they do for all clients at once


class _PerChannel(StackedFunction):
    """Applies a function of each image and channel by itself."""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, function: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, int]:
        client_axis = in_dims[0]
        if x.device.type == "cpu" or client_axis == 1:  # as a grouped convolution leaves it
            out = function(_as_channels(x, client_axis))
            return out.unflatten(1, (info.batch_size, -1)), 1
        # As our own convolutions leave it: (clients, channels, batch, height, width) in memory.
        channels_first = x.movedim(client_axis, 0).transpose(1, 2)
        out = function(channels_first.flatten(0, 1))
        return out.unflatten(0, channels_first.shape[:2]).transpose(1, 2), 0


class _Convolution(StackedFunction):
    """A convolution of each client's images with its own kernels."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
    ) -> tuple[Tensor, int]:
        stride, padding, dilation, groups = geometry
        clients = info.batch_size
        client_axis = in_dims[0]
        if client_axis is None:
            x = x.expand(clients, *x.shape)
            client_axis = 0
        if layer_support.on_gpu(x) and groups == 1 and set(dilation) == {1}:
            is_small = weight[0].numel() <= MAX_SMALL_WEIGHTS and set(stride) == {1}
            function = convolve if is_small else window_convolutions.convolve
            return function(x.movedim(client_axis, 0), weight, bias, stride, padding), 0
        out = F.conv2d(
            _as_channels(x, client_axis),
            weight.flatten(0, 1),
            None if bias is None else bias.flatten(),
            stride,
            padding,
            dilation,
            groups * clients,
        )
        return out.unflatten(1, (clients, -1)), 1


def _as_channels(x: Tensor, client_axis: int) -> Tensor:
    """Return the clients' images side by side: (batch, clients·channels, height, width).

    On a CPU they are channels-last in memory, which its kernels are fastest with.
    """
    x = x.movedim(client_axis, 1).flatten(1, 2)
    if x.device.type != "cpu":
        return x
    return x.contiguous(memory_format=torch.channels_last)


# --- small convolutions on a GPU


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
    """Return the convolutions of a stack's images, with each client's own kernels.

    x       (clients, batch, channels, height, width)
    weight  (clients, out, channels, rows, columns)

    Either a kernel computes them, or one matrix product per image.
    """
    padded = x
    if any(padding):
        padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    is_fusing = layer_support.is_fusing()
    stride_is_one = set(stride) == {1}
    if x.is_cuda and stride_is_one and (len(x) >= MIN_CLIENTS_WITHOUT_COLUMNS or not is_fusing):
        from fedproto.engines.gpu import implicit_convolutions

        if implicit_convolutions.usable(padded, weight):
            return implicit_convolutions.StackedConvolution.apply(
                padded.contiguous(), weight.contiguous(), bias
            )
    kernel = tuple(weight.shape[-2:])
    height = (padded.shape[-2] - kernel[0]) // stride[0] + 1
    width = (padded.shape[-1] - kernel[1]) // stride[1] + 1
    if is_fusing and stride_is_one:
        columns = _Columns.apply(padded, kernel)
    else:
        columns = _make_columns(padded, kernel, stride)
    out = torch.matmul(weight.flatten(2)[:, None], columns)
    if bias is not None:
        out = out + bias[:, None, :, None]
    return out.unflatten(-1, (height, width))


def _make_columns(x: Tensor, kernel: tuple[int, ...], stride: Sequence[int]) -> Tensor:
    """Return each image's windows side by side.

    (…, channels, height, width) becomes (…, channels·kernel, places).
    """
    windows = x.unfold(-2, kernel[0], stride[0]).unfold(-2, kernel[1], stride[1])
    return windows.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)


class _Columns(Function):
    """`_make_columns` at stride 1, with a backward pass that a compiler turns into one loop.

    It is a sum of shifted windows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int]) -> Tensor:
        ctx.shape = x.shape
        ctx.kernel = kernel
        return _make_columns(x, kernel, (1, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        channels, height, width = ctx.shape[-3:]
        rows, columns = ctx.kernel
        places = (height - rows + 1, width - columns + 1)
        windows = gradient.unflatten(-1, places).unflatten(-3, (channels, rows, columns))
        shifted = []
        for row in range(rows):
            for column in range(columns):
                border = (column, columns - 1 - column, row, rows - 1 - row)
                shifted.append(F.pad(windows[..., row, column, :, :], border))
        return sum(shifted[1:], shifted[0]), None
