"""Feature maps, one file each: fixed functions of the input that all clients share.

A map draws what is random from a seed among its own options, never from the run's, and looks at one
input at a time: no statistics of anybody's data. Two parties with equal options therefore compute
the same features, and sums of them can be added. See core/closed_form.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.errors import ConfigError

#: Inputs whose features are computed at a time.
INPUTS_AT_ONCE = 250


class Inputs(NamedTuple):
    """What a client's inputs are."""

    shape: tuple[int, ...]  # of one input
    #: The words of a vocabulary by rank, if inputs are rows of word ids; see
    #: data/shared/feature_encoding.py.
    words: tuple[str, ...] | None = None

    @property
    def are_images(self) -> bool:
        """Whether an input is an image: (channels, height, width)."""
        return len(self.shape) == 3


#: (n, *shape) -> (n, values)
Compute = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FeatureMap:
    """A fixed function of the input.

    name   as in `--feature-map`
    count  (inputs) -> the number of values
    build  (inputs) -> the function (n, *shape) -> (n, values), which `vmap` can run. ConfigError if
           the map is not for such inputs
    """

    name: str
    count: Callable[[Inputs], int]
    build: Callable[[Inputs], Compute]


def standardise(x: Tensor) -> Tensor:
    """Return inputs (n, ...), each with mean 0 and variance 1 over all its own values.

    An input of one colour becomes zeros.
    """
    flat = x.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return (centred / deviation.clamp(min=1e-3)).view_as(x)


def draw_normal(seed: int, purpose: str, *shape: int) -> Tensor:
    """Return standard normal float64 values of this shape, the same on every machine."""
    count = math.prod(shape)
    draws = rng.uniform(rng.key(seed, purpose), 2 * count)
    radius = (-2 * (1 - draws[:count]).log()).sqrt()  # by Box and Muller
    return (radius * (2 * math.pi * draws[count:]).cos()).reshape(shape)


@torch.no_grad()
def compute_features(compute: Compute, x: Tensor) -> Tensor:
    """Return the features of all inputs, INPUTS_AT_ONCE at a time."""
    return torch.cat([compute(part) for part in x.split(INPUTS_AT_ONCE)])


def refuse_inputs(name: str, wanted: str, inputs: Inputs) -> ConfigError:
    """Return the error for inputs that a map is not for."""
    found = "texts" if inputs.words is not None else f"inputs of shape {inputs.shape}"
    return ConfigError(f"feature map {name} is for {wanted}, not for {found}: use auto")
