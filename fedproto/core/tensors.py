"""Trees of tensors and sums of uploads: the server's arithmetic.

Uploads of several clients are one Upload whose tensors have a leading axis over these clients,
called the speakers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedproto.core.types import Group, GroupLayout, State, Tree, Upload
from fedproto.errors import shown

T = TypeVar("T")

#: The types of floating-point numbers that our files hold; torch has others, such as eight bits.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Between a group's name and its architecture's, and before the name of an architecture's tree.
SEPARATOR = "@"


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


def flatten_state(state: State) -> Tree:
    """Return a state as one tree; a tensor of an inner tree is named `TREE/NAME`.

    >>> flatten_state({"a": 1, "inner": {"b": 2}})
    {'a': 1, 'inner/b': 2}
    """
    flat: Tree = {}
    for name, value in state.items():
        if isinstance(value, dict):
            for inner_name, inner_value in flatten_state(value).items():
                flat[f"{name}/{inner_name}"] = inner_value
        else:
            flat[name] = value
    return flat


def unflatten_state(flat: Mapping[str, T]) -> State:
    """Return the state that `flatten_state` was given; empty trees are lost.

    >>> unflatten_state({"a": 1, "inner/b": 2})
    {'a': 1, 'inner': {'b': 2}}
    """
    state: State = {}
    for name, value in flat.items():
        *path, last = name.split("/")
        place = state
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return state


def order_like(state: State, like: State) -> State:
    """Return the state with its names in the order of another; names that only it has come last.

    The order in which an algorithm adds up tensors decides the last bits of its sums.

    >>> order_like({"b": 1, "new": 2, "a": {"y": 3, "x": 4}}, {"a": {"x": 0, "y": 0}, "b": 0})
    {'a': {'x': 4, 'y': 3}, 'b': 1, 'new': 2}
    """
    names = [name for name in like if name in state]
    names += [name for name in state if name not in like]
    ordered: State = {}
    for name in names:
        value = state[name]
        wanted = like.get(name)
        if isinstance(value, dict) and isinstance(wanted, dict):
            value = order_like(value, wanted)
        ordered[name] = value
    return ordered


#: The tree of a client's whole state that holds what it keeps beside its model.
KEPT = "client"


def join_client(params: Tree, kept: State) -> Tree:
    """Return a client's whole state: its parameters, and what it keeps beside them."""
    return params | flatten_state({KEPT: kept})


def split_client(whole: Mapping[str, T]) -> tuple[dict[str, T], State]:
    """Return a client's parameters and what it keeps beside them, out of its whole state."""
    prefix = f"{KEPT}/"
    params: dict[str, T] = {}
    kept: dict[str, T] = {}
    for name, value in whole.items():
        if name.startswith(prefix):
            kept[name.removeprefix(prefix)] = value
        else:
            params[name] = value
    return params, unflatten_state(kept)


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
    """Return a tree with the rows of all trees, one after the other; empty trees are left out.

    Rows of a tree that lacks a tensor are zeros in it.
    """
    filled = [tree for tree in trees if tree]
    examples: Tree = {}
    for tree in filled:
        examples |= tree
    joined = {}
    for name, example in examples.items():
        parts = []
        for tree in filled:
            part = tree.get(name)
            if part is None:
                rows = len(next(iter(tree.values())))
                part = example.new_zeros(rows, *example.shape[1:])
            parts.append(part)
        joined[name] = torch.cat(parts)
    return joined


def map_trees(function: Callable[..., Tensor], first: Tree, *others: Tree) -> Tree:
    """Return function(value, value, ...) of the tensors that have the names of the first tree.

    >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
    >>> map_trees(torch.add, {"a": one}, {"a": two, "b": one})
    {'a': tensor(3.)}
    """
    mapped = {}
    for name, value in first.items():
        mapped[name] = function(value, *(tree[name] for tree in others))
    return mapped


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Return Σ ||a − b||² over all tensors of `a`."""
    distances = [(value - b[name]).square().sum() for name, value in a.items()]
    return torch.stack(distances).sum()


def inner_product(a: Tree, b: Tree) -> Tensor:
    """Return Σ ⟨a, b⟩ over all tensors of `a`."""
    products = [(value * b[name]).sum() for name, value in a.items()]
    return torch.stack(products).sum()


# --- uploads


def split_group_name(name: str) -> tuple[str, str]:
    """Return a group's name within its architecture, and the architecture's; empty: all of them.

    >>> split_group_name("model@cnn"), split_group_name("prototypes")
    (('model', 'cnn'), ('prototypes', ''))
    """
    group, _, architecture = name.partition(SEPARATOR)
    return group, architecture


def align_axes(weight: Tensor, like: Tensor) -> Tensor:
    """Return `weight` with trailing axes of size 1, so that it multiplies `like`.

    The shape of `weight` is a prefix of the shape of `like`.
    """
    missing = like.dim() - weight.dim()
    return weight.reshape(weight.shape + (1,) * missing)


def make_group(values: Tree, weight: Tensor) -> Group:
    """Return the group of `values` with `weight`: the products of both, and the weight."""
    sums = {name: align_axes(weight, value) * value for name, value in values.items()}
    return Group(sums, weight)


def divide_by_weight(group: Group) -> Tree:
    """Return the values of a group, sums / weight; 0 where the weight is 0."""
    has_weight = group.weight > 0
    divisor = torch.where(has_weight, group.weight, 1)
    values = {}
    for name, sums in group.sums.items():
        quotient = sums / align_axes(divisor, sums)
        values[name] = torch.where(align_axes(has_weight, sums), quotient, 0)
    return values


def find_received_values(received: State, group: str, layout: GroupLayout) -> Tree:
    """Return the version of a group's values that the client received, by the same names.

    They are in the tree that is named like the group, in none, or in another tree: the first of
    these that has all their names. Where there are several architectures, each has a tree of trees.
    """
    group, architecture = split_group_name(group)
    if architecture:
        received = received[SEPARATOR + architecture]
    for tree in (received.get(group), received, *received.values()):
        if isinstance(tree, dict) and layout.shapes.keys() <= tree.keys():
            return {name: tree[name] for name in layout.shapes}
    raise KeyError(f"the group {group!r} is relative, but its values are not among those sent")


def map_group(group: Group, change: Callable[[Tensor], Tensor]) -> Group:
    """Return a group with all its tensors changed."""
    sums = {name: change(value) for name, value in group.sums.items()}
    counts = {name: change(value) for name, value in group.counts.items()}
    return Group(sums, change(group.weight), counts)


def map_upload(upload: Upload, change: Callable[[Tensor], Tensor]) -> Upload:
    """Return an upload with all its tensors changed."""
    return {name: map_group(group, change) for name, group in upload.items()}


def flatten_upload(upload: Upload) -> Tree:
    """Return an upload as one tree: `GROUP/sums/NAME`, `GROUP/weight`, `GROUP/counts/NAME`."""
    flat = {}
    for name, group in upload.items():
        flat[f"{name}/weight"] = group.weight
        for kind, tree in (("sums", group.sums), ("counts", group.counts)):
            for tensor_name, value in tree.items():
                flat[f"{name}/{kind}/{tensor_name}"] = value
    return flat


def unflatten_upload(flat: Tree) -> Upload:
    """Return the upload that `flatten_upload` was given; ValueError if it is not one."""
    parts: dict[str, dict[str, Tree]] = {}
    for key, value in flat.items():
        group, _, rest = key.partition("/")
        kind, _, name = rest.partition("/")
        if (kind == "weight") == bool(name) or kind not in Group._fields:
            raise ValueError(f"{shown(key, 80)} is not a part of an upload")
        parts.setdefault(group, {}).setdefault(kind, {})[name] = value
    upload = {}
    for group, kinds in parts.items():
        if "weight" not in kinds:
            raise ValueError(f"there is no {shown(group, 80)}/weight")
        upload[group] = Group(kinds.get("sums", {}), kinds["weight"][""], kinds.get("counts", {}))
    return upload


def stack_uploads(uploads: Sequence[Upload]) -> Upload:
    """Return single uploads as one, with a leading axis over the speakers."""

    def stack(trees: Sequence[Tree]) -> Tree:
        return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}

    stacked = stack([flatten_upload(upload) for upload in uploads])
    return unflatten_upload(stacked)


def take_one(uploads: Upload, position: int) -> Upload:
    """Return a single speaker's upload, without the axis over speakers."""
    return map_upload(uploads, lambda value: value[position])


def select_rows(uploads: Upload, rows: Tensor) -> Upload:
    """Return the uploads of some of the speakers."""
    return map_upload(uploads, lambda value: value[move_index(rows, value.device)])


def scatter_rows(group: Group, places: Tensor, rows: int) -> Group:
    """Return a group with `rows` rows: its own ones at these places, and zeros elsewhere."""

    def scatter(value: Tensor) -> Tensor:
        return value.new_zeros(rows, *value.shape[1:]).index_copy(0, places, value)

    return map_group(group, scatter)


def join_uploads(uploads: Sequence[Upload]) -> Upload:
    """Return the uploads of several groups of speakers as those of all of them."""
    return unflatten_upload(concatenate_rows([flatten_upload(upload) for upload in uploads]))


def sum_group(group: Group) -> Group:
    """Return the sum of a group over the speakers, with a leading axis of 1."""
    return map_group(group, lambda value: value.sum(0, keepdim=True))


def sum_uploads(uploads: Upload) -> Upload:
    """Return the sum over the speakers; their axis stays, with length 1, so it is again uploads."""
    return {name: sum_group(group) for name, group in uploads.items()}


def count_speakers(uploads: Upload) -> int:
    """Return the length of the axis over the speakers."""
    return max((len(group.weight) for group in uploads.values()), default=0)


def weighted_mean(old: Tree, uploads: Group) -> Tree:
    """Return Σ weight·value / Σ weight of each tensor of a group, row by row.

    A row for which nobody has a weight keeps its old value.
    """
    weight = uploads.weight.sum(0)
    spoken = weight > 0
    divisor = torch.where(spoken, weight, 1)
    means = {}
    for name, sums in uploads.sums.items():
        value = sums.sum(0)
        quotient = value / align_axes(divisor, value)
        means[name] = torch.where(align_axes(spoken, value), quotient, old[name])
    return means
