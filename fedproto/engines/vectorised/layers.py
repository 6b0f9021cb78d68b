"""Layers for a stack of clients: the one table of what torch's vmap does slowly, or cannot know.

A model is an ordinary module, run for all clients of a stack by `vmap`; some layers are replaced in a copy of it.
Which way is fastest was measured (benchmarks/RESULTS.md). On a CPU the clients of a stack stand side by side as
channels of one channels-last image, for convolutions (with a group a client) and pooling alike. On a GPU a small
convolution has kernels of its own (`implicit.py`), or is one batched matrix product over its input's columns; a large
one is a batched product, too, of windows that lie as BatchNorm likes them (`windows.py`). BatchNorm learns to leave
padding out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from fedproto.engines.gpu import window_convolutions
from fedproto.engines.gpu.fused_passes import Normalised

ROWS = "rows"
SMALL = 8192  # weights up to which a GPU has kernels of its own for a convolution at stride 1
MANY = 64  # clients from which on kernels without columns beat columns that a compiler has fused with their neighbours
_fusing = False  # whether the backward pass is being traced for a compiler, which fuses many small additions into one


@contextmanager
def fusing() -> Iterator[None]:
    global _fusing
    _fusing = True
    try:
        yield
    finally:
        _fusing = False


def whether_fusing() -> bool:
    return _fusing


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def stackable(module: nn.Module, tidy: bool = False) -> tuple[nn.Module, list[str]]:
    """A copy whose layers fit a stack, and the names of the buffers in which it wants to be told what is padding.

    `tidy`: its layers leave each client's values in one piece, as `x.view` in a module of somebody's own wants them.
    """
    module = copy.deepcopy(module)
    told = []
    for name, layer in module.named_modules():
        stacked = TABLE.get(type(layer))
        if stacked is not None:
            layer.__class__, layer.tidy = stacked, tidy
            if issubclass(stacked, _MaskedNorm):
                layer.register_buffer(ROWS, None, persistent=False)
                told.append(f"{name}.{ROWS}" if name else ROWS)
    return module, told


class _StackedConv2d(nn.Conv2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(x)
        how = self.stride, self.padding, self.dilation, self.groups
        return _laid_out(_Convolution.apply(x, self.weight, self.bias, *how), self.tidy)


class _StackedMaxPool2d(nn.MaxPool2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        return _laid_out(_PerChannel.apply(x, super().forward), self.tidy)


class _StackedAvgPool2d(nn.AvgPool2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        return _laid_out(_PerChannel.apply(x, super().forward), self.tidy)


class _StackedAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    tidy: bool

    def forward(self, x: Tensor) -> Tensor:
        return _laid_out(_PerChannel.apply(x, super().forward), self.tidy)


def _laid_out(x: Tensor, tidy: bool) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if tidy else x


class _Stacked(Function):
    """What vmap asks how to do for a stack. It is differentiated there, so no backward is needed here."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class _PerChannel(_Stacked):
    """A function of each image and channel by itself."""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, function: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, int]:
        if x.device.type == "cpu" or in_dims[0] == 1:  # as a grouped convolution leaves it
            return function(_as_channels(x, in_dims[0])).unflatten(1, (info.batch_size, -1)), 1
        rows = x.movedim(in_dims[0], 0).transpose(1, 2)  # as our own convolutions leave it
        return function(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]).transpose(1, 2), 0


class _Convolution(_Stacked):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        return F.conv2d(x, weight, bias, *how)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any
    ) -> tuple[Tensor, int]:
        stride, padding, dilation, groups = how
        if in_dims[0] is None:
            x, in_dims = x.expand(info.batch_size, *x.shape), (0, *in_dims[1:])
        if on_gpu(x) and groups == 1 and set(dilation) == {1}:
            small = weight[0].numel() <= SMALL and set(stride) == {1}
            way = convolve if small else window_convolutions.convolve
            return way(x.movedim(in_dims[0], 0), weight, bias, stride, padding), 0
        flat = None if bias is None else bias.flatten()
        x = _as_channels(x, in_dims[0])
        out = F.conv2d(
            x, weight.flatten(0, 1), flat, stride, padding, dilation, groups * info.batch_size
        )
        return out.unflatten(1, (info.batch_size, -1)), 1


class _Normalisation(_Stacked):
    """BatchNorm in training on a GPU: the output, and mean and variance of each channel."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.transpose(0, 1)
        out, mean, variance = Normalised.apply(rows.reshape(len(rows), -1), weight, bias, eps)
        return out.view_as(rows).transpose(0, 1), mean, variance

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Any, Any]:
        rows = x.movedim(in_dims[0], 0).transpose(1, 2)
        flat = weight.flatten(), bias.flatten()
        out, mean, variance = Normalised.apply(
            rows.reshape(rows.shape[0] * rows.shape[1], -1), *flat, eps
        )
        return (
            out.view_as(rows).transpose(1, 2),
            mean.view_as(weight),
            variance.view_as(weight),
        ), (0, 0, 0)


def _as_channels(x: Tensor, clients: int) -> Tensor:
    """(batch, clients·channels, height, width), on a CPU in the layout its kernels like."""
    x = x.movedim(clients, 1).flatten(1, 2)
    return x.contiguous(memory_format=torch.channels_last) if x.device.type == "cpu" else x


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
    """(clients, batch, channels, height, width) with each client's own kernels, by one matrix product an image."""
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    if x.is_cuda and set(stride) == {1} and (len(x) >= MANY or not _fusing):
        from fedproto.engines.gpu import implicit_convolutions

        if implicit_convolutions.usable(padded, weight):
            return implicit_convolutions.StackedConvolution.apply(
                padded.contiguous(), weight.contiguous(), bias
            )
    kernel = tuple(weight.shape[-2:])
    height, width = (
        (size - k) // s + 1 for size, k, s in zip(padded.shape[-2:], kernel, stride, strict=True)
    )
    columns = (
        _Columns.apply(padded, kernel)
        if _fusing and set(stride) == {1}
        else _columns(padded, kernel, stride)
    )
    out = torch.matmul(weight.flatten(2)[:, None], columns)
    if bias is not None:
        out = out + bias[:, None, :, None]
    return out.unflatten(-1, (height, width))


def _columns(x: Tensor, kernel: tuple[int, ...], stride: Sequence[int]) -> Tensor:
    """Each image's windows side by side: (…, channels, height, width) -> (…, channels·kernel, places)."""
    windows = x.unfold(-2, kernel[0], stride[0]).unfold(-2, kernel[1], stride[1])
    return windows.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)


class _Columns(Function):
    """The same at stride 1, with a backward pass that a compiler makes one loop of: a sum of shifted windows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.kernel = x.shape, kernel
        return _columns(x, kernel, (1, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (height, width), (rows, columns) = ctx.shape[-2:], ctx.kernel
        places = height - rows + 1, width - columns + 1
        windows = gradient.unflatten(-1, places).unflatten(-3, (ctx.shape[-3], rows, columns))
        shifted = [
            F.pad(
                windows[..., row, column, :, :], (column, columns - 1 - column, row, rows - 1 - row)
            )
            for row in range(rows)
            for column in range(columns)
        ]
        return sum(shifted[1:], shifted[0]), None


class _MaskedNorm(_BatchNorm):
    """BatchNorm over the rows that are not padding; where `rows` is not told, over all of them."""

    rows: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if (
            self.affine
            and x.dim() == 4
            and on_gpu(x)
            and not (self.training and self.rows is not None)
        ):
            return self._by_row(x) if self.training else self._by_statistics(x)
        counting = (
            self.momentum is None and self.running_mean is not None
        )  # torch's would ask for the count's value
        if not self.training or (self.rows is None and not counting):
            return super().forward(x)
        given, x = (
            x.dtype,
            x.float() if x.dtype == torch.bfloat16 else x,
        )  # counts and means want more digits
        axes = [axis for axis in range(x.dim()) if axis != 1]
        rows = x.new_ones(len(x)) if self.rows is None else self.rows
        weight = rows.reshape(-1, *(1 for _ in x.shape[1:])).expand_as(x[:, :1]).to(x.dtype)
        count = weight.sum().clamp(min=1)
        mean = (x * weight).sum(axes, keepdim=True) / count
        variance = ((x - mean).square() * weight).sum(axes, keepdim=True) / count
        self._remember(mean.flatten(), variance.flatten() * count / (count - 1).clamp(min=1))
        out = (x - mean) * (variance + self.eps).rsqrt()
        if self.affine:
            shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
            out = out * self.weight.reshape(shape) + self.bias.reshape(shape)
        return out.to(given)

    def _by_row(self, x: Tensor) -> Tensor:
        """The same in the layout that a large convolution leaves on a GPU, and by kernels for many channels."""
        out, mean, variance = _Normalisation.apply(x, self.weight, self.bias, self.eps)
        count = x.numel() // x.shape[1]
        self._remember(mean, variance * (count / max(1, count - 1)))
        return out

    def _by_statistics(self, x: Tensor) -> Tensor:
        """In evaluation: one multiplication and one addition a value, in whatever layout."""
        if self.running_mean is None or self.running_var is None:
            return super().forward(x)
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return torch.addcmul(shift[:, None, None], x, scale[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        share = (
            1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        )  # type: ignore[union-attr]
        self.running_mean.mul_(1 - share).add_(mean * share)
        self.running_var.mul_(1 - share).add_(variance * share)


class _MaskedNorm1d(_MaskedNorm, nn.BatchNorm1d):
    pass


class _MaskedNorm2d(_MaskedNorm, nn.BatchNorm2d):
    pass


class _MaskedNorm3d(_MaskedNorm, nn.BatchNorm3d):
    pass


#: layer type -> its form in a stack
TABLE: dict[type, type] = {
    nn.Conv2d: _StackedConv2d,
    nn.MaxPool2d: _StackedMaxPool2d,
    nn.AvgPool2d: _StackedAvgPool2d,
    nn.AdaptiveAvgPool2d: _StackedAdaptiveAvgPool2d,
    nn.BatchNorm1d: _MaskedNorm1d,
    nn.BatchNorm2d: _MaskedNorm2d,
    nn.BatchNorm3d: _MaskedNorm3d,
}
