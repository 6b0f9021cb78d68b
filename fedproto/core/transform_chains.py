"""Algorithms with transforms: chains of client parts, one per group, and server parts in a row.

    with_transforms(algorithm, transforms, layouts)  an algorithm whose uploads are transformed

What a transform is, is said in core/transforms.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.tensors import align_axes, divide_by_weight, find_received_values, sum_uploads
from fedproto.core.transforms import Context, Encoded, ServerContext, Shapes, Transform
from fedproto.core.types import Algorithm, Group, GroupLayout, State, Step, Task, Tree, Upload
from fedproto.errors import ConfigError, shown

#: Where the server's state holds that of the transforms; the algorithm never sees it.
_KEPT = "transform"


def with_transforms(
    algorithm: Algorithm,
    transforms: Sequence[Transform],
    layouts: Mapping[str, GroupLayout],
) -> Algorithm:
    """Return the algorithm with its uploads transformed: encoded in order, decoded in reverse.

    `layouts` is what the algorithm declares. Raises ConfigError if a transform fits neither the
    algorithm nor the transforms before it.
    """
    transformed = algorithm
    if any(transform.encode is not None for transform in transforms) and layouts:
        chains = {}
        for group, layout in layouts.items():
            chains[group] = _Chain.trace(group, layout, transforms)
        transformed = replace(
            transformed,
            encode=lambda upload, step: _encode_upload(chains, upload, step),
            decode=lambda wire, received: _decode_upload(chains, wire, received),
            check=lambda wire: _check_upload(chains, wire),
        )
    if any(transform.server is not None for transform in transforms):
        transformed = _with_server_parts(transformed, transforms, layouts)
    return transformed


def find_recoding(
    transforms: Sequence[Transform], layouts: Mapping[str, GroupLayout]
) -> str | None:
    """Return the name of the first transform that sends other things than values, or None.

    Such are whole-number codes, fewer values, and scales beside them.
    """
    for transform in transforms:
        for group, layout in layouts.items():
            if transform.encode is None:
                continue
            wire = _Chain.trace(group, layout, [transform]).wire
            shapes = {name: tuple(value.shape) for name, value in wire.items()}
            is_float = all(value.is_floating_point() for value in wire.values())
            if not is_float or shapes != {name: tuple(layout.shapes[name]) for name in shapes}:
                return transform.name
    return None


# --- the client parts


class _Stage(NamedTuple):
    """A transform in a chain, and what it is given and makes there."""

    transform: Transform
    purpose: str  # of its draws
    shapes: Shapes  # of one row of what it is given
    side: tuple[str, ...]  # the names of what it sends beside the values


@dataclass(frozen=True)
class _Chain:
    """The client parts of all transforms, as they act on one group."""

    group: str
    layout: GroupLayout
    stages: tuple[_Stage, ...]
    #: One row of everything that travels, without the axis of rows.
    wire: Tree

    @classmethod
    def trace(cls, group: str, layout: GroupLayout, transforms: Sequence[Transform]) -> _Chain:
        """Return the chain of a group, whose shapes are found by encoding one row of zeros."""
        rows = (1,) * len(layout.weight_shape)
        values = {name: torch.zeros(rows + tuple(layout.shapes[name])) for name in layout.shapes}
        received = dict(values)
        side: Tree = {}
        stages: list[_Stage] = []
        for position, transform in enumerate(transforms):
            if transform.encode is None:
                continue
            _refuse_codes(transform, stages, values)
            purpose = f"transform {position} {transform.name} {group}"
            context = Context(layout, rng.fold(torch.tensor(0), purpose), received)
            shapes = _row_shapes(values, layout)
            encoded = transform.encode(values, context)
            _refuse_misfit(transform, values, encoded, side)
            stages.append(_Stage(transform, purpose, shapes, tuple(encoded.side)))
            values = encoded.values
            side |= encoded.side
        wire = values | side
        if rows:
            wire = {name: value[0] for name, value in wire.items()}
        return cls(group, layout, tuple(stages), wire)

    def encode(self, group: Group, step: Step) -> Group:
        """Return a client's group as it travels."""
        values = divide_by_weight(group)
        if self.layout.relative:
            old = find_received_values(step.received, self.group, self.layout)
            has_weight = group.weight > 0
            for name, value in values.items():
                change = value - old[name]
                values[name] = torch.where(align_axes(has_weight, change), change, 0)
        side: Tree = {}
        for stage in self.stages:
            assert stage.transform.encode is not None
            context = Context(self.layout, rng.fold(step.key, stage.purpose), step.received)
            values, more = stage.transform.encode(values, context)
            side |= more
        return Group(values | side, group.weight, group.counts)

    def decode(self, wire: Group, received: State) -> Group:
        """Return the group that the server takes from what travelled."""
        values, side = self._split(wire.sums)
        for stage in reversed(self.stages):
            own_side = {name: side[name] for name in stage.side}
            values = stage.transform.decode(values, own_side, stage.shapes)
        if self.layout.relative:
            old = find_received_values(received, self.group, self.layout)
            values = {name: value + old[name] for name, value in values.items()}
        sums = {}
        for name, value in values.items():
            weighted = align_axes(wire.weight, value) * value
            sums[name] = torch.where(align_axes(wire.weight > 0, value), weighted, 0)
        return Group(sums, wire.weight, wire.counts)

    def check(self, wire: Group) -> None:
        """Raise ValueError if a group that came from anybody cannot be decoded."""
        axes = len(self.layout.weight_shape)  # deployed, the number of rows may grow
        if wire.weight.dim() != axes:
            raise ValueError(f"its weight has {wire.weight.dim()} axes, where {axes} is wanted")
        for name in sorted(self.wire.keys() ^ wire.sums.keys()):
            if name in self.wire:
                raise ValueError(f"there is no {name} in it")
            raise ValueError(f"{shown(name, 80)} in it is unexpected")
        for name, wanted in self.wire.items():
            _check_tensor(name, wanted, wire.sums[name], wire.weight)
        spoken = wire.weight > 0
        sums = wire.sums
        if wire.weight.dim():
            sums = {name: value[spoken] for name, value in sums.items()}
        values, side = self._split(sums)
        for stage in reversed(self.stages):
            own_side = {name: side[name] for name in stage.side}
            stage.transform.check(values, own_side, stage.shapes)
            values = stage.transform.decode(values, own_side, stage.shapes)
        for name, value in values.items():
            if not value.isfinite().all():
                raise ValueError(f"{name} has values that are not finite")

    def _split(self, sums: Tree) -> tuple[Tree, Tree]:
        """Return the values and the sides out of everything that travels of a group."""
        values = {name: sums[name] for name in self.layout.shapes}
        side = {name: value for name, value in sums.items() if name not in values}
        return values, side


def _row_shapes(values: Tree, layout: GroupLayout) -> Shapes:
    """Return the shapes of one row of each tensor."""
    start = len(layout.weight_shape)
    return {name: tuple(value.shape[start:]) for name, value in values.items()}


def _refuse_codes(transform: Transform, before: Sequence[_Stage], values: Tree) -> None:
    """Refuse a transform of numbers that comes after one that made codes of them."""
    if all(value.is_floating_point() for value in values.values()):
        return
    last = before[-1].transform.name
    raise ConfigError(
        f"transform {transform.name} cannot follow {last}, which makes whole-number codes of the "
        f"values: write {last} last"
    )


def _refuse_misfit(transform: Transform, given: Tree, encoded: Encoded, earlier: Tree) -> None:
    """Refuse what a transform returned if it cannot be told apart when it arrives."""
    where = f"transform {transform.name}: encode"
    if encoded.values.keys() != given.keys():
        names = sorted(encoded.values.keys() ^ given.keys())
        raise ConfigError(f"{where} must keep the names of the values, and changed {names}")
    for name in encoded.side:
        if name in given or "/" not in name:
            raise ConfigError(f"{where} must name what it sends beside like 'NAME/word': {name!r}")
        if name in earlier:
            raise ConfigError(
                f"transform {transform.name} appears twice, or after another that sends {name!r}: "
                "use it once"
            )


def _check_tensor(name: str, wanted: Tensor, found: Tensor, weight: Tensor) -> None:
    """Raise ValueError if a tensor that travelled has another shape or type than it must have."""
    shape = tuple(weight.shape) + tuple(wanted.shape)
    if tuple(found.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(found.shape)}, where {shape} is wanted")
    if wanted.is_floating_point():
        if not found.is_floating_point():
            raise ValueError(f"{name} is of {found.dtype}, where floating-point is wanted")
    elif found.dtype != wanted.dtype:
        raise ValueError(f"{name} is of {found.dtype}, where {wanted.dtype} is wanted")


def _encode_upload(chains: Mapping[str, _Chain], upload: Upload, step: Step) -> Upload:
    """Return an upload as it travels."""
    return {name: chains[name].encode(group, step) for name, group in upload.items()}


def _decode_upload(chains: Mapping[str, _Chain], wire: Upload, received: State) -> Upload:
    """Return the upload that the server takes from what travelled."""
    return {name: chains[name].decode(group, received) for name, group in wire.items()}


def _check_upload(chains: Mapping[str, _Chain], wire: Upload) -> None:
    """Raise ValueError if an upload that came from anybody cannot be decoded."""
    for name, group in wire.items():
        if name not in chains:
            raise ValueError(f"the group {shown(name, 80)} is unexpected")
        try:
            chains[name].check(group)
        except ValueError as error:
            raise ValueError(f"the group {name} cannot be decoded: {error}") from error


# --- the server parts


def _with_server_parts(
    algorithm: Algorithm,
    transforms: Sequence[Transform],
    layouts: Mapping[str, GroupLayout],
) -> Algorithm:
    """Return the algorithm whose uploads pass through the server parts before `aggregate`."""
    parts: dict[str, Transform] = {}
    for position, transform in enumerate(transforms):
        if transform.server is not None:
            _refuse_unmet_need(algorithm, transform, list(parts.values()))
            parts[f"{position}-{transform.name}"] = transform

    needs_each = any(part.needs == "each" for part in parts.values())

    def init(params: Tree, task: Task) -> State:
        states = {place: part.init(task) for place, part in parts.items()}
        kept = {
            "key": rng.key(task.seed, "transform"),
            "count": torch.tensor(0),
            "states": {place: state for place, state in states.items() if state},
        }
        return algorithm.init(params, task) | {_KEPT: kept}

    def aggregate(server: State, uploads: Upload) -> State:
        kept = server[_KEPT]
        count = kept["count"] + 1
        states = {}
        for place, part in parts.items():
            assert part.server is not None
            if part.needs == "sum":
                uploads = sum_uploads(uploads)
            key = rng.bits(rng.fold(kept["key"], place) + count, 1)[0]
            state, uploads = part.server(
                kept.get("states", {}).get(place, {}), uploads, ServerContext(layouts, key)
            )
            if state:
                states[place] = state
        inner = algorithm.aggregate(_hide_state(server), uploads)
        return inner | {_KEPT: {"key": kept["key"], "count": count, "states": states}}

    def metrics(server: State) -> dict[str, float]:
        found = dict(algorithm.metrics(_hide_state(server)))
        for place, part in parts.items():
            found |= part.metrics(server[_KEPT].get("states", {}).get(place, {}))
        return found

    return replace(
        algorithm,
        init=init,
        send=lambda server, recipient: algorithm.send(_hide_state(server), recipient),
        aggregate=aggregate,
        notes=lambda server: algorithm.notes(_hide_state(server)),
        metrics=metrics,
        combinable=algorithm.combinable and not needs_each,
    )


def _hide_state(server: State) -> State:
    """Return the server's state as the algorithm knows it, without that of the transforms."""
    return {name: value for name, value in server.items() if name != _KEPT}


def _refuse_unmet_need(
    algorithm: Algorithm, transform: Transform, before: Sequence[Transform]
) -> None:
    """Refuse a server part that needs single uploads, or their sum, where there is none.

    Groups that are sent once may come in any round, so no server part could treat all alike.
    """
    if algorithm.aggregate_once is not None:
        raise ConfigError(
            f"transform {transform.name} works on what the server gets in a round, but "
            f"{algorithm.name} sends {' and '.join(algorithm.once)} only once: leave the transform "
            "out, or the teacher"
        )
    for earlier in before:
        if transform.needs == "each" and earlier.needs == "sum":
            raise ConfigError(
                f"transform {transform.name} needs single uploads, but {earlier.name} before it "
                f"makes a sum of them: write {transform.name} first"
            )
    if transform.needs == "each" and algorithm.additive:
        raise ConfigError(
            f"transform {transform.name} needs single uploads, but {algorithm.name} gives the "
            "server only their sum: choose another algorithm, or leave the transform out"
        )
    if transform.needs == "sum" and not algorithm.additive and not algorithm.combinable:
        raise ConfigError(
            f"transform {transform.name} needs the sum of all uploads, but {algorithm.name} works "
            "on single uploads: choose another algorithm, or leave the transform out"
        )
