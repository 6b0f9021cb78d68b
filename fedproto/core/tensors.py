"""Sums of trees of tensors: the server's arithmetic."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedproto.core.types import Tree, Upload
from fedproto.errors import shown


def move_index(index: Tensor, device: torch.device) -> Tensor:
    """Row numbers on another device, without waiting for what that device is doing."""
    if index.device == device or device.type != "cuda":
        return index.to(device)
    return index.pin_memory().to(device, non_blocking=True)


T = TypeVar("T")


def flatten_groups(groups: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Groups of named values as one, for a file or a message: `{"sums": {"a": x}}` is `{"sums.a": x}`."""
    return {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}


def split_groups(values: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The same back, by what stands before the first dot; of a name without one, the rest is empty."""
    groups: dict[str, dict[str, T]] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return groups


#: The types of numbers that files of ours hold; torch knows others, such as complex ones and eight bits.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def find_mismatch(wanted: Tree, found: Tree) -> str | None:
    """Return the first thing that tells the tensors that were found from those wanted, or None."""
    for name in sorted(wanted.keys() ^ found.keys()):
        return f"there is no {name}" if name in wanted else f"it has no {shown(name, 80)}"
    for name, value in wanted.items():
        if (value.shape, value.dtype) != (found[name].shape, found[name].dtype):
            kinds = [f"{tuple(each.shape)} of {each.dtype}" for each in (found[name], value)]
            return f"{name} is {kinds[0]}, where {kinds[1]} is wanted"
    return None


def take_one(uploads: Upload, place: int) -> Upload:
    """A single speaker's upload, without the axis over speakers."""
    return Upload(*({name: value[place] for name, value in tree.items()} for tree in uploads))


def pad_rows(value: Tensor, rows: int) -> Tensor:
    """With rows of zeros at its end, so that there are so many."""
    return torch.cat([value, value.new_zeros(rows - len(value), *value.shape[1:])])


def scatter_rows(upload: Upload, places: Tensor, rows: int) -> Upload:
    """An upload's rows in these places among so many, of whose others it says nothing."""
    return Upload(
        *(
            {name: value.new_zeros(rows, *value.shape[1:]).index_copy(0, places, value) for name, value in tree.items()}
            for tree in upload
        )
    )


def select_rows(uploads: Upload, rows: Tensor) -> Upload:
    """The uploads of some of the speakers."""
    return Upload(*({name: value[move_index(rows, value.device)] for name, value in tree.items()} for tree in uploads))


def align_axes(weight: Tensor, like: Tensor) -> Tensor:
    """`weight` with trailing axes of size 1, so that it multiplies `like`, of whose shape its own is a prefix."""
    return weight.reshape(weight.shape + (1,) * (like.dim() - weight.dim()))


def make_upload(values: Tree, weight: Tensor) -> Upload:
    """The upload that says `values` with `weight`."""
    return Upload({name: align_axes(weight, value) * value for name, value in values.items()}, {"weight": weight})


def stack_uploads(uploads: Sequence[Upload]) -> Upload:
    """Single uploads as one, with a leading axis over the speakers."""

    def stacked(trees: Sequence[Tree]) -> Tree:
        return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}

    return Upload(stacked([u.sums for u in uploads]), stacked([u.weights for u in uploads]))


def concatenate_rows(trees: Sequence[Tree]) -> Tree:
    """Rows of trees after each other; a tree may be empty."""
    some = [tree for tree in trees if tree]
    return {name: torch.cat([tree[name] for tree in some]) for name in some[0]} if some else {}


def join_uploads(uploads: Sequence[Upload]) -> Upload:
    """Uploads with a leading axis over speakers as one, with all of them."""
    return Upload(*(concatenate_rows(trees) for trees in zip(*uploads, strict=True)))


def sum_uploads(uploads: Upload) -> Upload:
    """The sum over the speakers' axis, which stays, with length 1: a sum of uploads is again uploads."""

    def summed(tree: Tree) -> Tree:
        return {name: value.sum(0, keepdim=True) for name, value in tree.items()}

    return Upload(summed(uploads.sums), summed(uploads.weights))


def weighted_mean(old: Tree, uploads: Upload) -> Tree:
    """Σ weight·value / Σ weight for each tensor, row by row; the old value where nobody spoke."""
    if not uploads.sums:
        return {}
    added = sum_uploads(uploads)
    weight = added.weights["weight"][0]
    spoken = weight > 0
    divisor = torch.where(spoken, weight, 1)
    return {
        name: torch.where(align_axes(spoken, value[0]), value[0] / align_axes(divisor, value[0]), old[name])
        for name, value in added.sums.items()
    }


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Σ ||a − b||² over all tensors of `a`."""
    return torch.stack([(value - b[name]).square().sum() for name, value in a.items()]).sum()
