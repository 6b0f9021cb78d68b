"""What the functions of an algorithm must return, checked where a mistake would confuse.

All raise TypeError with one sentence; whoever calls them says in which round and for whom.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedproto.core.tensors import find_mismatch, flatten_state
from fedproto.core.types import Algorithm, Group, GroupLayout, State, Upload
from fedproto.errors import shown


def check_kept(kept: Any) -> State:
    """Return what `client_init` returned, if that is trees of tensors by name."""
    accepted = "trees of tensors by name, as in {'control': {...}}"
    if not isinstance(kept, dict):
        raise TypeError(f"client_init must return {accepted}, not {type(kept).__name__}")
    for name, tree in kept.items():
        if not isinstance(tree, dict):
            kind = type(tree).__name__
            raise TypeError(f"client_init must return {accepted}, but {name!r} is {kind}")
        for inner_name, value in flatten_state(tree).items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise TypeError(f"client_init must return {accepted}, but {inner_name!r} is {kind}")
    return kept


def check_same_kept(before: State, after: Any, function: str) -> State:
    """Return what a client keeps after a function; its names, shapes and types stay as they are."""
    if not isinstance(after, dict):
        raise TypeError(f"{function} must return a dict of trees, not {type(after).__name__}")
    mismatch = find_mismatch(flatten_state(before), flatten_state(after))
    if mismatch is not None:
        raise TypeError(f"{function} must return what client_init does: {mismatch}")
    return after


def check_upload(upload: Any) -> Upload:
    """Return what `upload` returned, if that is groups by name."""
    if not isinstance(upload, dict):
        kind = type(upload).__name__
        raise TypeError(f"upload must return a dict of fedproto.Group by name, not {kind}")
    for name, group in upload.items():
        if not isinstance(group, Group):
            kind = type(group).__name__
            raise TypeError(f"upload must return a dict of fedproto.Group, but {name!r} is {kind}")
        _check_axes(name, group)
    return upload


def _check_axes(name: str, group: Group) -> None:
    """Refuse a weight that does not fit the sums and counts of its group."""
    axes = tuple(group.weight.shape)
    for tensor, value in (group.sums | group.counts).items():
        if tuple(value.shape[: len(axes)]) != axes:
            raise TypeError(
                f"the weight of the group {name!r} is {axes}, so its tensors must begin with these "
                f"axes, but {tensor} is {tuple(value.shape)}"
            )


def check_declaration(algorithm: Algorithm, layouts: Any) -> dict[str, GroupLayout]:
    """Return what `declare` returned, if that is layouts by name, and `once` names some of them."""
    accepted = "a dict of fedproto.GroupLayout by name"
    if not isinstance(layouts, dict):
        raise TypeError(f"declare must return {accepted}, not {type(layouts).__name__}")
    for name, layout in layouts.items():
        if not isinstance(layout, GroupLayout):
            kind = type(layout).__name__
            raise TypeError(f"declare must return {accepted}, but {name!r} is {kind}")
    declared = ", ".join(layouts) or "none"
    for name in algorithm.once:
        if name not in layouts:
            raise TypeError(
                f"once names {shown(name, 80)}, but the declared groups are: {declared}"
            )
    return layouts


def check_phases(algorithm: Algorithm, kept: State) -> None:
    """Refuse a phase that trains a tree which the clients do not keep."""
    for phase in algorithm.phases:
        if phase.model and phase.model not in kept:
            trees = ", ".join(kept) or "none"
            raise TypeError(
                f"a phase trains {shown(phase.model, 80)}, but the trees that client_init returns "
                f"are: {trees}"
            )
