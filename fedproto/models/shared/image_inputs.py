"""Images as a backbone from elsewhere expects them: its number of channels, and its size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedproto.errors import ConfigError


class ImageInputs(nn.Module):
    """A backbone that is given images of its own size and number of channels.

    Grey images are repeated in all channels; others must have as many as the backbone. `size` is
    (height, width), to which images are scaled; None: they stay as they are.
    """

    def __init__(
        self, backbone: nn.Module, channels: int, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.channels = channels
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return what the backbone makes of the images (n, channels, height, width)."""
        if self.size is not None and x.shape[-2:] != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", align_corners=False)
        if x.shape[-3] != self.channels:
            x = x.expand(-1, self.channels, -1, -1)
        return self.backbone(x)


def check_channels(where: str, shape: tuple[int, ...], channels: int) -> None:
    """Refuse images with another number of channels than the backbone's, unless they are grey."""
    if shape[0] not in (1, channels):
        raise ConfigError(
            f"{where} takes images of {channels} channels, or grey ones, not inputs of shape "
            f"{shape}"
        )
