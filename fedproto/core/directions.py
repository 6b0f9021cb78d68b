"""Directions that are far apart: prototypes on the unit sphere before anything is learned."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.core import rng
from fedproto.core.server_training import train_on_server
from fedproto.core.types import Tree

_SPREADING_STEPS = 200
_SPREADING_RATE = 0.1
_SHARPNESS = 10.0  # how much more the nearest pair of directions counts than the others


def spread_directions(key: Tensor, classes: int, dim: int) -> Tensor:
    """Return unit vectors (C, d) whose smallest angle is large: random ones that repel each other.

    Up to d + 1 of them come near a regular simplex.
    """
    return _spread(int(key), classes, dim).clone()


@lru_cache(maxsize=8)  # a deployed server starts its algorithm several times
def _spread(number: int, classes: int, dim: int) -> Tensor:
    key = torch.tensor(number)
    start = 2 * rng.uniform(key, classes * dim).reshape(classes, dim) - 1

    def nearness(params: Tree, rows: Tensor) -> Tensor:
        directions = F.normalize(params["directions"], dim=-1)
        cosines = directions @ directions.T - 3 * torch.eye(classes)  # not to itself
        return (_SHARPNESS * cosines).logsumexp(-1).sum() / _SHARPNESS

    spread = train_on_server(
        {"directions": F.normalize(start, dim=-1)},
        nearness,
        samples=1,
        key=key,
        epochs=_SPREADING_STEPS,
        batch=1,
        lr=_SPREADING_RATE,
    )
    return F.normalize(spread["directions"], dim=-1)
