"""Trees of tensors and sums of uploads: the server's arithmetic.

Uploads of several clients are one Upload whose tensors have a leading axis over these clients,
called the speakers.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedproto.core.types import Tree, Upload
from fedproto.errors import shown

T = TypeVar("T")

#: The types of floating-point numbers that our files hold; torch has others, such as eight bits.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# --- trees


def move_index(index: Tensor, device: torch.device) -> Tensor:
    """Return row numbers on another device, without waiting for what that device is doing."""
    if index.device == device or device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


def flatten_groups(groups: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Return groups of named values as one dict of `GROUP.NAME`, for a file or a message.

    >>> flatten_groups({"sums": {"a": 1, "b": 2}})
    {'sums.a': 1, 'sums.b': 2}
    """
    flat = {}
    for group, values in groups.items():
        for name, value in values.items():
            flat[f"{group}.{name}"] = value
    return flat


def split_groups(values: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return the groups that `flatten_groups` was given, split at the first dot of each key.

    A key without a dot is a group whose only value has an empty name.

    >>> split_groups({"sums.a": 1, "ledger": 2})
    {'sums': {'a': 1}, 'ledger': {'': 2}}
    """
    groups: dict[str, dict[str, T]] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return groups


def find_mismatch(wanted: Tree, found: Tree) -> str | None:
    """Return the first difference in name, shape or type between two trees, or None."""
    for name in sorted(wanted.keys() ^ found.keys()):
        return f"there is no {name}" if name in wanted else f"it has no {shown(name, 80)}"
    for name, value in wanted.items():
        other = found[name]
        if other.shape != value.shape or other.dtype != value.dtype:
            return f"{name} is {_describe(other)}, where {_describe(value)} is wanted"
    return None


def _describe(value: Tensor) -> str:
    return f"{tuple(value.shape)} of {value.dtype}"


def pad_rows(value: Tensor, rows: int) -> Tensor:
    """Return a tensor with rows of zeros appended, so that it has `rows` of them."""
    missing = rows - len(value)
    return torch.cat([value, value.new_zeros(missing, *value.shape[1:])])


def concatenate_rows(trees: Sequence[Tree]) -> Tree:
    """Return a tree with the rows of all trees, one after the other; empty trees are left out."""
    filled = [tree for tree in trees if tree]
    if not filled:
        return {}
    return {name: torch.cat([tree[name] for tree in filled]) for name in filled[0]}


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Return Σ ||a − b||² over all tensors of `a`."""
    distances = [(value - b[name]).square().sum() for name, value in a.items()]
    return torch.stack(distances).sum()


# --- uploads


def align_axes(weight: Tensor, like: Tensor) -> Tensor:
    """Return `weight` with trailing axes of size 1, so that it multiplies `like`.

    The shape of `weight` is a prefix of the shape of `like`.
    """
    missing = like.dim() - weight.dim()
    return weight.reshape(weight.shape + (1,) * missing)


def make_upload(values: Tree, weight: Tensor) -> Upload:
    """Return the upload of `values` with `weight`: the products of both, and the weight."""
    sums = {name: align_axes(weight, value) * value for name, value in values.items()}
    return Upload(sums, {"weight": weight})


def stack_uploads(uploads: Sequence[Upload]) -> Upload:
    """Return single uploads as one, with a leading axis over the speakers."""

    def stack(trees: Sequence[Tree]) -> Tree:
        return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}

    sums = stack([upload.sums for upload in uploads])
    weights = stack([upload.weights for upload in uploads])
    return Upload(sums, weights)


def take_one(uploads: Upload, position: int) -> Upload:
    """Return a single speaker's upload, without the axis over speakers."""

    def take(tree: Tree) -> Tree:
        return {name: value[position] for name, value in tree.items()}

    return Upload(take(uploads.sums), take(uploads.weights))


def select_rows(uploads: Upload, rows: Tensor) -> Upload:
    """Return the uploads of some of the speakers."""

    def select(tree: Tree) -> Tree:
        return {name: value[move_index(rows, value.device)] for name, value in tree.items()}

    return Upload(select(uploads.sums), select(uploads.weights))


def scatter_rows(upload: Upload, places: Tensor, rows: int) -> Upload:
    """Return an upload with `rows` rows: its own ones at these places, and zeros elsewhere."""

    def scatter(value: Tensor) -> Tensor:
        return value.new_zeros(rows, *value.shape[1:]).index_copy(0, places, value)

    sums = {name: scatter(value) for name, value in upload.sums.items()}
    weights = {name: scatter(value) for name, value in upload.weights.items()}
    return Upload(sums, weights)


def join_uploads(uploads: Sequence[Upload]) -> Upload:
    """Return the uploads of several groups of speakers as those of all of them."""
    return Upload(*(concatenate_rows(trees) for trees in zip(*uploads, strict=True)))


def sum_uploads(uploads: Upload) -> Upload:
    """Return the sum over the speakers; their axis stays, with length 1, so it is again uploads."""

    def add_up(tree: Tree) -> Tree:
        return {name: value.sum(0, keepdim=True) for name, value in tree.items()}

    return Upload(add_up(uploads.sums), add_up(uploads.weights))


def weighted_mean(old: Tree, uploads: Upload) -> Tree:
    """Return Σ weight·value / Σ weight of each tensor, row by row.

    A row for which nobody has a weight keeps its old value.
    """
    if not uploads.sums:
        return {}
    summed = sum_uploads(uploads)
    weight = summed.weights["weight"][0]
    spoken = weight > 0
    divisor = torch.where(spoken, weight, 1)
    means = {}
    for name, sums in summed.sums.items():
        value = sums[0]
        quotient = value / align_axes(divisor, value)
        means[name] = torch.where(align_axes(spoken, value), quotient, old[name])
    return means
