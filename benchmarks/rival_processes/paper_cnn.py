"""The paper's network for MNIST in the forms that other libraries take.

Only torch is needed, since the other library's Python imports this module.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 50  # of a prototype
CLASSES = 10


class Head(nn.Linear):
    """The last layer, which drops half of its inputs while it is trained."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.dropout(features, training=self.training))


def make_body(channels: int) -> nn.Sequential:
    """Return the layers up to the prototype; `channels` are those of the second convolution."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, channels, 5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * channels, WIDTH),
        nn.ReLU(),
    )


class BodyAndFc(nn.Module):
    """The network with a last layer `fc`, which PFLlib takes off."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = make_body(channels)
        self.fc: nn.Module = Head(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images))


class BaseAndHead(nn.Module):
    """The network as HtFLlib keeps it: `base` makes the prototype, `head` the logits."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.base = make_body(channels)
        self.head = Head(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.base(images))


def save_client_models(folder: Path, channels: list[int]) -> None:
    """Write one model per client, as files that HtFLlib starts from (`--models_folder_name`)."""
    folder.mkdir()
    for number, second in enumerate(channels):
        torch.save(BaseAndHead(second), folder / f"Client_{number}_model.pt")
