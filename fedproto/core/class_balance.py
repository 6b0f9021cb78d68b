"""Classes that count equally in training, however unequal a client's numbers of rows are.

Either a sample weighs the more, the rarer its class is with the client (`class_weights`), or rare
classes are drawn more often (`sampling`). The functions take one client or, with leading axes, a
stack of clients; rows beyond a client's number of rows are padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedproto.core import rng


def count_classes(labels: Tensor, inside: Tensor, classes: int) -> Tensor:
    """Return how many rows of each class there are: (..., classes) integers.

    labels  (..., rows) classes of the rows
    inside  (..., rows) False where a row is padding
    """
    counts = torch.zeros(*labels.shape[:-1], classes, dtype=torch.int64, device=labels.device)
    return counts.scatter_add(-1, labels, inside.long())


def balanced_weights(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each class: rows / (classes that are there · rows of the class).

    It is 0 for a class without rows. The weights of a client's rows have the mean 1; scikit-learn's
    `balanced` ones are the same.
    """
    rows = counts.sum(-1, keepdim=True)
    classes_there = (counts > 0).sum(-1, keepdim=True)
    weights = rows.to(dtype) / (classes_there * counts.clamp(min=1)).to(dtype)
    return weights * (counts > 0)


def weigh_samples(mask: Tensor, weights: Tensor) -> Tensor:
    """Return the mask of a batch with each sample's weight in it; the sum stays as it is.

    A mean by this mask is therefore Σ weight · value / Σ weight.
    """
    weighted = mask * weights
    scale = mask.sum(-1, keepdim=True) / weighted.sum(-1, keepdim=True)
    return weighted * scale


def draw_balanced(
    row_keys: Tensor, order_keys: Tensor, labels: Tensor, lengths: Tensor, classes: int
) -> Tensor:
    """Return an epoch's rows, as many as a client has, of all its classes equally many (± 1).

    Of a class with too many rows some are drawn, and those of a class with too few come several
    times, all equally often (± 1). Padding comes last.

    row_keys, order_keys  (...) keys of the draws: which rows, and in which order
    labels                (..., rows) classes of the rows
    lengths               (...) the number of rows that are not padding
    """
    slot = torch.arange(labels.shape[-1], device=labels.device).expand(labels.shape).contiguous()
    inside = slot < lengths[..., None]
    counts = count_classes(labels, inside, classes)
    quotas = _share_out(counts, lengths)
    quota_ends = quotas.cumsum(-1)
    slot_class = torch.searchsorted(quota_ends, slot, right=True).clamp(max=classes - 1)
    number_in_class = slot - (quota_ends - quotas).gather(-1, slot_class)
    rows_by_class = _shuffle_within_classes(row_keys, torch.where(inside, labels, classes))
    class_starts = counts.cumsum(-1) - counts
    slot_count = counts.gather(-1, slot_class).clamp(min=1)
    place = class_starts.gather(-1, slot_class) + number_in_class % slot_count
    chosen = rows_by_class.gather(-1, place)
    order = rng.permutation(order_keys, labels.shape[-1], lengths)
    return chosen.gather(-1, order)


def _share_out(counts: Tensor, lengths: Tensor) -> Tensor:
    """Return how many of the `lengths` places each class gets that has rows: (..., classes)."""
    is_there = counts > 0
    number_there = is_there.sum(-1, keepdim=True).clamp(min=1)
    classes_until = is_there.cumsum(-1)  # the class itself included
    places = lengths[..., None]
    places_until = classes_until * places // number_there
    places_before = (classes_until - 1) * places // number_there
    return (places_until - places_before) * is_there


def _shuffle_within_classes(keys: Tensor, labels: Tensor) -> Tensor:
    """Return the rows sorted by class, and within a class in random order."""
    shuffled = rng.bits(keys, labels.shape[-1]).argsort(dim=-1, stable=True)
    by_class = labels.gather(-1, shuffled).argsort(dim=-1, stable=True)
    return shuffled.gather(-1, by_class)
