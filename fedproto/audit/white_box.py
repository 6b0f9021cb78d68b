"""Images from prototypes, with the client's model: an input whose embedding is the prototype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedproto.audit.image_quality import total_variation
from fedproto.audit.threats import ThreatModel

THREAT = ThreatModel(
    "server",
    "a client's prototypes, that client's trained model, and images of the same kind that no "
    "client has",
    "images that look like the client's",
)
STEPS = 200
STEP_SIZE = 0.05  # of Adam, in units of the normalised pixels
TOTAL_VARIATION = 0.05  # beside a relative squared error of 1


def invert_embeddings(
    embed: Callable[[Tensor], Tensor],
    targets: Tensor,
    start: Tensor,
    black: Tensor,
    white: Tensor,
    steps: int = STEPS,
    smoothness: float = TOTAL_VARIATION,
) -> Tensor:
    """Return one input for each target whose embedding is near it, like `start`.

    Minimises ‖f(x) − c‖² / ‖c‖² + smoothness · TV(x) by Adam within the range of pixels.

    embed         (n, *shape) -> (n, d)
    targets       (n, d) prototypes c
    start         (n, *shape) where to begin, as with the mean image of the class
    black, white  the smallest and the largest value of a pixel, of a shape that fits `start`
    """
    x = start.detach().clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=STEP_SIZE)
    scale = targets.square().sum(1).clamp(min=1e-12)
    for _ in range(steps):
        optimiser.zero_grad()
        objective = (embed(x) - targets).square().sum(1) / scale
        if smoothness:
            objective = objective + smoothness * total_variation(x)
        objective.sum().backward()
        optimiser.step()
        with torch.no_grad():
            x.copy_(torch.minimum(torch.maximum(x, black), white))
    return x.detach()
