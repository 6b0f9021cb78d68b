"""BatchNorm for a stack of clients: it leaves out what pads a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedproto.engines.gpu.fused_passes import NormalisedRows
from fedproto.engines.vectorised import layer_support
from fedproto.engines.vectorised.layer_support import StackedFunction

#: The buffer that says which samples of a batch are not padding: 1 for those, 0 for padding.
ROWS = "rows"


class _Normalisation(StackedFunction):
    """BatchNorm in training on a GPU.

    Returns the output, and the mean and variance of each channel.
    """

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        channels_first = x.transpose(0, 1)
        rows = channels_first.reshape(len(channels_first), -1)
        out, mean, variance = NormalisedRows.apply(rows, weight, bias, eps)
        return out.view_as(channels_first).transpose(0, 1), mean, variance

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Any, Any]:
        channels_first = x.movedim(in_dims[0], 0).transpose(1, 2)
        clients, channels = channels_first.shape[:2]
        rows = channels_first.reshape(clients * channels, -1)
        out, mean, variance = NormalisedRows.apply(rows, weight.flatten(), bias.flatten(), eps)
        batch_first = out.view_as(channels_first).transpose(1, 2)
        results = (batch_first, mean.view_as(weight), variance.view_as(weight))
        return results, (0, 0, 0)


class MaskedNorm(_BatchNorm):
    """BatchNorm over the samples that are not padding, or over all if `rows` is None."""

    rows: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        is_masked = self.training and self.rows is not None
        if self.affine and x.dim() == 4 and layer_support.on_gpu(x) and not is_masked:
            if self.training:
                return self._normalise_rows(x)
            return self._apply_statistics(x)
        if not self.training:
            return super().forward(x)
        # torch's own layer would read the count's value, which vmap does not allow.
        needs_count = self.momentum is None and self.running_mean is not None
        if self.rows is None and not needs_count:
            return super().forward(x)
        return self._normalise_masked(x)

    def _normalise_masked(self, x: Tensor) -> Tensor:
        """Normalise by the mean and variance of the samples that are not padding."""
        given_dtype = x.dtype
        if x.dtype == torch.bfloat16:  # too few digits for counts and means
            x = x.float()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        rows = x.new_ones(len(x)) if self.rows is None else self.rows
        rows_shape = [-1] + [1] * (x.dim() - 1)
        weight = rows.reshape(rows_shape).expand_as(x[:, :1]).to(x.dtype)
        count = weight.sum().clamp(min=1)
        mean = (x * weight).sum(axes, keepdim=True) / count
        variance = ((x - mean).square() * weight).sum(axes, keepdim=True) / count
        unbiased_variance = variance.flatten() * count / (count - 1).clamp(min=1)
        self._update_statistics(mean.flatten(), unbiased_variance)
        out = (x - mean) * (variance + self.eps).rsqrt()
        if self.affine:
            channel_shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
            out = out * self.weight.reshape(channel_shape) + self.bias.reshape(channel_shape)
        return out.to(given_dtype)

    def _normalise_rows(self, x: Tensor) -> Tensor:
        """Normalise all samples on a GPU.

        Large convolutions leave a channel's values contiguous, which this takes as they are.
        """
        out, mean, variance = _Normalisation.apply(x, self.weight, self.bias, self.eps)
        count = x.numel() // x.shape[1]
        self._update_statistics(mean, variance * (count / max(1, count - 1)))
        return out

    def _apply_statistics(self, x: Tensor) -> Tensor:
        """Normalise in evaluation: one multiplication and one addition per value, in any layout."""
        if self.running_mean is None or self.running_var is None:
            return super().forward(x)
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return torch.addcmul(shift[:, None, None], x, scale[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of a batch."""
        batches = self.num_batches_tracked
        if self.running_mean is None or self.running_var is None or batches is None:
            return
        batches.add_(1)
        fraction = 1 / batches.to(mean.dtype) if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - fraction).add_(mean * fraction)
        self.running_var.mul_(1 - fraction).add_(variance * fraction)


class MaskedNorm1d(MaskedNorm, nn.BatchNorm1d):
    """BatchNorm1d for a stack."""


class MaskedNorm2d(MaskedNorm, nn.BatchNorm2d):
    """BatchNorm2d for a stack."""


class MaskedNorm3d(MaskedNorm, nn.BatchNorm3d):
    """BatchNorm3d for a stack."""
