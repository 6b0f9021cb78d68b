"""A decoder from embeddings back to images, trained on images of the same kind.

With the client's own model the attacker embeds other people's images by it. Without, it uses the
model of another member, and accounts for the difference between two members' models by noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedproto.audit.threats import ThreatModel
from fedproto.core import rng

THREAT = ThreatModel(
    "server",
    "all clients' prototypes, the model of another member that colludes, and images of the same "
    "kind that no client has",
    "images that look like the victim's",
)
HIDDEN = 256
EPOCHS = 30
BATCH = 64
STEP_SIZE = 1e-3  # of Adam


class Decoder(nn.Module):
    """The mean image of the class, plus what a small network reads from the embedding.

    It begins as the mean image of the class, which is what the class's name alone gives away.
    """

    class_means: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, embeddings: Tensor, labels: Tensor, pixels: Tensor, classes: int) -> None:
        super().__init__()
        means = []
        for label in range(classes):
            of_class = pixels[labels == label]
            means.append(of_class.mean(0) if len(of_class) else pixels.mean(0))
        self.register_buffer("class_means", torch.stack(means))
        self.register_buffer("mean", embeddings.mean(0))
        self.register_buffer("std", embeddings.std(0).clamp(min=1e-3))
        self.hidden = nn.Linear(embeddings.shape[1] + classes, HIDDEN)
        self.out = nn.Linear(HIDDEN, pixels[0].numel())
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return images (n, channels, h, w); their values may lie outside of 0 to 1."""
        base = self.class_means[labels]
        one_hot = F.one_hot(labels, len(self.class_means)).to(embeddings)
        standardised = (embeddings - self.mean) / self.std
        hidden = F.relu(self.hidden(torch.cat([standardised, one_hot], 1)))
        return base + self.out(hidden).reshape(base.shape)

    @torch.no_grad()
    def decode(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return images with values from 0 to 1."""
        return self(embeddings, labels).clamp(0, 1)


def train_decoder(
    embeddings: Tensor,
    labels: Tensor,
    pixels: Tensor,
    classes: int,
    noise: Tensor | float = 0.0,
    epochs: int = EPOCHS,
    seed: int = 0,
) -> Decoder:
    """Return a decoder that minimises the mean squared error of the pixels.

    embeddings  (n, d), of images that are (n, channels, h, w) with values from 0 to 1
    labels      (n,)
    noise       the standard deviation that is added to each value of an embedding in training:
                how far those of the attacked model may be away
    """
    with rng.preserve_torch_generators(embeddings.device):
        rng.seed_torch_generators(int(rng.key(seed, "audit: a decoder")))
        decoder = Decoder(embeddings, labels, pixels, classes).to(embeddings)
        optimiser = torch.optim.Adam(decoder.parameters(), lr=STEP_SIZE)
        for _ in range(epochs):
            for rows in torch.randperm(len(embeddings)).split(BATCH):
                disturbed = embeddings[rows] + noise * torch.randn_like(embeddings[rows])
                optimiser.zero_grad()
                F.mse_loss(decoder(disturbed, labels[rows]), pixels[rows]).backward()
                optimiser.step()
    return decoder.eval()
