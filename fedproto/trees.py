"""Sums of trees of tensors: the server's arithmetic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.types import Tree, Upload


def moved(index: Tensor, device: torch.device) -> Tensor:
    """Row numbers on another device, without waiting for what that device is doing."""
    if index.device == device or device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def rows_of(uploads: Upload, rows: Tensor) -> Upload:
    """The uploads of some of the speakers."""
    return Upload(*({name: value[moved(rows, value.device)] for name, value in tree.items()} for tree in uploads))


def over_rows(weight: Tensor, like: Tensor) -> Tensor:
    """`weight` with trailing axes of size 1, so that it multiplies `like`, of whose shape its own is a prefix."""
    return weight.reshape(weight.shape + (1,) * (like.dim() - weight.dim()))


def weighted(values: Tree, weight: Tensor) -> Upload:
    """The upload that says `values` with `weight`."""
    return Upload({name: over_rows(weight, value) * value for name, value in values.items()}, {"weight": weight})


def stack(uploads: Sequence[Upload]) -> Upload:
    """Single uploads as one, with a leading axis over the speakers."""

    def stacked(trees: Sequence[Tree]) -> Tree:
        return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}

    return Upload(stacked([u.sums for u in uploads]), stacked([u.weights for u in uploads]))


def append(trees: Sequence[Tree]) -> Tree:
    """Rows of trees after each other; a tree may be empty."""
    some = [tree for tree in trees if tree]
    return {name: torch.cat([tree[name] for tree in some]) for name in some[0]} if some else {}


def join(uploads: Sequence[Upload]) -> Upload:
    """Uploads with a leading axis over speakers as one, with all of them."""
    return Upload(*(append(trees) for trees in zip(*uploads, strict=True)))


def total(uploads: Upload) -> Upload:
    """The sum over the speakers' axis, which stays, with length 1: a sum of uploads is again uploads."""

    def summed(tree: Tree) -> Tree:
        return {name: value.sum(0, keepdim=True) for name, value in tree.items()}

    return Upload(summed(uploads.sums), summed(uploads.weights))


def mean(old: Tree, uploads: Upload) -> Tree:
    """Σ weight·value / Σ weight for each tensor, row by row; the old value where nobody spoke."""
    if not uploads.sums:
        return {}
    added = total(uploads)
    weight = added.weights["weight"][0]
    spoken = weight > 0
    divisor = torch.where(spoken, weight, 1)
    return {
        name: torch.where(over_rows(spoken, value[0]), value[0] / over_rows(divisor, value[0]), old[name])
        for name, value in added.sums.items()
    }


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Σ ||a − b||² over all tensors of `a`."""
    return torch.stack([(value - b[name]).square().sum() for name, value in a.items()]).sum()
