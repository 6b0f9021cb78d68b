"""Class means, distances to them, and the nearest one. Pure functions; every one of them can be vmapped."""

import torch
import torch.nn.functional as F
from torch import Tensor


def class_sums(features: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Σ of the embeddings of each class, (C, d), and the number of samples in each, (C,)."""
    member = F.one_hot(y, classes).to(features.dtype) * mask[:, None]
    return member.T @ features, member.sum(0)


def class_means(features: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Eq. 3: C_i^(j) = 1/|D_ij| Σ_{(x,y) in D_ij} f_i(φ_i; x), and |D_ij|; the mean of an absent class is 0."""
    sums, counts = class_sums(features, y, mask, classes)
    return sums / counts.clamp(min=1)[:, None], counts


def _root(squares: Tensor) -> Tensor:
    """A square root whose gradient at 0 is 0, not infinite."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1).sqrt(), 0)


def _mse(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean(-1)


def _sql2(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(-1)


def _l2(a: Tensor, b: Tensor) -> Tensor:
    return _root(_sql2(a, b))


def _l1(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1)


def _emd(a: Tensor, b: Tensor) -> Tensor:
    """The one-dimensional earth mover's distance between the two vectors' values, each of mass 1/d."""
    return (a.sort(-1).values - b.sort(-1).values).abs().mean(-1)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(a, b, dim=-1)


#: Each compares vectors along the last axis; leading axes broadcast.
DISTANCES = {"mse": _mse, "l2": _l2, "sql2": _sql2, "l1": _l1, "emd": _emd, "cosine": _cosine}


def distances(features: Tensor, prototypes: Tensor, distance: str) -> Tensor:
    """From each of b embeddings to each of C prototypes: (b, C)."""
    return DISTANCES[distance](features[:, None, :], prototypes[None, :, :])


def nearest(features: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Eq. 4: ŷ = argmin_j ||f(φ; x) − C^(j)||_2, over the classes whose prototype is known."""
    return scores(features, prototypes, known).argmax(-1)


def scores(features: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Minus the L2 distance to each prototype, (b, C): larger is likelier; −∞ where there is no prototype."""
    return torch.where(known > 0, -distances(features, prototypes, "l2"), -torch.inf)
