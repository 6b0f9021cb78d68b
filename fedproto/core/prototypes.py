"""Class means, distances to them, and the nearest one: pure functions that can be vmapped.

`l1`, `l2` and `emd` have a kink where an embedding equals its prototype, such as that of a client
which alone has one sample of a class. There every number between the slopes of both sides is a
subgradient, and the rounding error of a − b would choose one at random, a different one on every
machine and in every engine. We choose 0: a difference of at most ROUNDING units of its type's
precision, relative to the largest value of the two vectors, has gradient 0. This changes neither
the distances themselves nor gradients elsewhere.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: The rounding error that a value of an embedding may have, in units of its type's precision.
ROUNDING = 16


def class_sums(features: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return Σ of the embeddings of each class, (C, d), and the number of its samples, (C,)."""
    in_class = F.one_hot(y, classes).to(features.dtype) * mask[:, None]
    return in_class.T @ features, in_class.sum(0)


def class_means(features: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return Eq. 3, C_i^(j) = 1/|D_ij| Σ_{(x,y) in D_ij} f_i(φ_i; x), and |D_ij|.

    The mean of a class without samples is 0.
    """
    sums, counts = class_sums(features, y, mask, classes)
    return sums / counts.clamp(min=1)[:, None], counts


def _noise(a: Tensor, b: Tensor) -> Tensor:
    """Return up to which size a value of a − b may be rounding error, for each pair of vectors.

    It is relative to the largest value of the two vectors: a small value of an embedding may be
    what is left of large ones that cancelled out, and has their error.
    """
    largest_a = a.detach().abs().amax(-1)
    largest_b = b.detach().abs().amax(-1)
    largest = torch.maximum(largest_a, largest_b)
    return ROUNDING * torch.finfo(largest.dtype).eps * largest


def _unless_noise(difference: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the same difference; values that may be rounding error pass no gradient on."""
    difference, noise = torch.broadcast_tensors(difference, _noise(a, b)[..., None])
    return torch.where(difference.abs() <= noise, difference.detach(), difference)


def _mse(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean(-1)


def _sql2(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(-1)


def _l2(a: Tensor, b: Tensor) -> Tensor:
    squares = _sql2(a, b)
    length = squares.detach().sqrt()
    equal = length <= _noise(a, b) * math.sqrt(a.shape[-1])
    differentiable = torch.where(equal, 1, squares).sqrt()  # without the infinite slope at 0
    return torch.where(equal, length, differentiable)


def _l1(a: Tensor, b: Tensor) -> Tensor:
    return _unless_noise(a - b, a, b).abs().sum(-1)


def _emd(a: Tensor, b: Tensor) -> Tensor:
    """Return the one-dimensional earth mover's distance.

    It is between the values of the two vectors, each of mass 1/d.
    """
    difference = a.sort(-1).values - b.sort(-1).values
    return _unless_noise(difference, a, b).abs().mean(-1)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(a, b, dim=-1)


#: Distances between vectors along the last axis; leading axes broadcast.
DISTANCES = {"mse": _mse, "l2": _l2, "sql2": _sql2, "l1": _l1, "emd": _emd, "cosine": _cosine}


def distances(features: Tensor, prototypes: Tensor, distance: str) -> Tensor:
    """Return the distance from each of b embeddings to each of C prototypes: (b, C)."""
    return DISTANCES[distance](features[:, None, :], prototypes[None, :, :])


def nearest(features: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return Eq. 4: ŷ = argmin_j ||f(φ; x) − C^(j)||_2, over the classes with a prototype."""
    return scores(features, prototypes, known).argmax(-1)


def scores(features: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return minus the L2 distance to each prototype, (b, C): larger is likelier.

    A class without a prototype has −∞.
    """
    return torch.where(known > 0, -distances(features, prototypes, "l2"), -torch.inf)


# --- probabilities


class Tau(NamedTuple):
    """What mean squared distances to prototypes are divided by before a softmax over classes."""

    value: float = 0.3
    unit: str = "relative"  # in units of the prototypes' spread, or "absolute"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Tau":
        """Return the τ among the options of an algorithm; the default if it has none."""
        return cls(options.get("tau", cls().value), options.get("tau_unit", cls().unit))

    def measure(self, prototypes: Tensor, known: Tensor) -> Tensor:
        """Return τ for these prototypes, as a number above 0: ()."""
        if self.unit == "absolute":
            return torch.full_like(known.sum(), self.value)
        spread = measure_spread(prototypes, known)
        return self.value * torch.where(spread > 0, spread, 1)


DEFAULT_TAU = Tau()


def measure_spread(prototypes: Tensor, known: Tensor) -> Tensor:
    """Return the mean over pairs of known prototypes of their mean squared difference: ().

    For n vectors it is 2 / (n − 1) times the sum of their squared differences from their mean. It
    is 0 if fewer than two are known.
    """
    count = known.sum()
    mean = (known[:, None] * prototypes).sum(0) / count.clamp(min=1)
    return 2 * (known * _mse(prototypes, mean)).sum() / (count - 1).clamp(min=1)


def log_probabilities(gaps: Tensor, known: Tensor, tau: Tensor) -> Tensor:
    """Return log softmax_j(−d_j / τ) over the known classes, (b, C); −∞ for the others.

    gaps  (b, C) mean squared distances to the prototypes
    """
    is_known = known > 0
    among_known = F.log_softmax(torch.where(is_known, -gaps / tau, -torch.inf), -1)
    return torch.where(is_known, among_known, -torch.inf)


def contrast_losses(
    features: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, tau: Tau
) -> Tensor:
    """Return −log softmax_j(−mse(h, C^(j))/τ) at j = y of each embedding h: (b,).

    It is 0 for a sample whose class has no prototype, or is the only one that has.
    """
    gaps = distances(features, prototypes, "mse")
    log_p = log_probabilities(gaps, known, tau.measure(prototypes, known))
    of_own_class = log_p.gather(-1, y[:, None])[:, 0]
    return torch.where(known[y] > 0, -of_own_class, 0)


def add_log_probabilities(logits: Tensor, by_prototype: Tensor, dim: int, tau: Tensor) -> Tensor:
    """Return the sum of the head's and the prototypes' log-probabilities, (b, C).

    by_prototype  (b, C) minus the L2 distances, as `scores` gives them
    dim           the values of a prototype
    """
    known = torch.isfinite(by_prototype).to(logits.dtype)
    return F.log_softmax(logits, -1) + log_probabilities(by_prototype.square() / dim, known, tau)
