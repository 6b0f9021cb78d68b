"""Combiners: what becomes of the uploads of a round before the server's algorithm sees them.

Without one, uploads are added. A combiner puts something else in the place of their mean that a few
wrong uploads cannot move far, such as a median, and passes it on as if it were a sum: an algorithm
that only divides sums by weights works with every combiner.

Shapes in comments: m uploads, R rows (one per weight: 1 for a model, C for prototypes), D values of
a row in all tensors of the group together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedproto.core.summation import Summation
from fedproto.core.tensors import divide_by_weight, sum_group
from fedproto.core.types import Algorithm, Group, State, Task, Tree, Upload
from fedproto.errors import ConfigError

#: (values (m, R, D), weight (m, R)) -> (R, D). A weight of 0 marks a row that an upload does not
#: have. What is returned for a row that nobody has is not used.
Rule = Callable[[Tensor, Tensor], Tensor]

#: Numbers that are sorted, or copied as float64, at a time.
_CHUNK_VALUES = 2**26


@dataclass(frozen=True)
class Combiner:
    """A rule that makes one upload of several.

    name      as in `--combiner`
    combine   a group with a leading axis over m uploads -> the combined one, with a leading axis
              of 1: value × Σ weight as its sums, Σ weight as its weight, and the sums of its counts
    needs     the least number of uploads that it is meant for
    additive  it adds the uploads, so that it changes no algorithm
    summation how the uploads are added, if the server must not see single ones
    """

    name: str
    combine: Callable[[Group], Group]
    needs: int = 1
    additive: bool = False
    summation: Summation | None = None


def with_combiner(algorithm: Algorithm, combiner: Combiner) -> Algorithm:
    """Return the algorithm with a server that combines the uploads before it aggregates them.

    Raises ConfigError if the algorithm needs the uploads themselves.
    """
    if combiner.summation is not None:
        return _with_summation(algorithm, combiner.summation)
    if combiner.additive:
        return algorithm
    if not algorithm.combinable:
        raise ConfigError(
            f"algorithm {algorithm.name} does more with the uploads than to divide their sum, so "
            f"it cannot be used with the combiner {combiner.name}, only with sum"
        )

    def init(params: Tree, task: Task) -> State:
        if task.clients < combiner.needs:
            raise ConfigError(
                f"combiner {combiner.name} needs at least {combiner.needs} clients, but there are "
                f"only {task.clients}"
            )
        return algorithm.init(params, task)

    def aggregate(server: State, uploads: Upload) -> State:
        combined = {}
        for name, group in uploads.items():
            combined[name] = _check_combined(combiner.combine(group), group, combiner.name)
        return algorithm.aggregate(server, combined)

    return replace(algorithm, init=init, aggregate=aggregate, additive=False)


def _with_summation(algorithm: Algorithm, summation: Summation) -> Algorithm:
    """Return an algorithm whose uploads are added where the server does not see them.

    Raises ConfigError if it needs single ones.
    """
    if algorithm.remembers:
        raise ConfigError(
            f"algorithm {algorithm.name} with absent=remember keeps single uploads, which "
            f"{summation.name} hides from the server: set absent=drop"
        )
    if not algorithm.additive:
        raise ConfigError(
            f"algorithm {algorithm.name} needs single uploads, which {summation.name} hides from "
            "the server: choose an algorithm that needs only their sum"
        )
    return replace(algorithm, additive=False, summation=summation)


def _check_combined(combined: Any, group: Group, name: str) -> Group:
    """Return what a combiner made of a group; TypeError unless it has one row like the group's."""
    if not isinstance(combined, Group):
        found = type(combined).__name__
        raise TypeError(f"combiner {name} must return a fedproto.Group, not {found}")
    wanted = _row_shapes(group)
    found_shapes = _row_shapes(combined)
    if wanted.keys() != found_shapes.keys():
        missing = sorted(wanted.keys() ^ found_shapes.keys())
        raise TypeError(f"combiner {name} must return the tensors it was given: {missing[0]}")
    for tensor, shape in wanted.items():
        found_shape = found_shapes[tensor]
        if found_shape != (1, *shape[1:]):
            raise TypeError(
                f"combiner {name} returned {tensor} as {found_shape}, "
                f"where {(1, *shape[1:])} is wanted"
            )
    return combined


def _row_shapes(group: Group) -> dict[str, tuple[int, ...]]:
    shapes = {"weight": tuple(group.weight.shape)}
    for name, value in group.sums.items():
        shapes[f"sums.{name}"] = tuple(value.shape)
    for name, value in group.counts.items():
        shapes[f"counts.{name}"] = tuple(value.shape)
    return shapes


# --- combiners from rules


def combine_rows(name: str, rule: Rule, needs: int = 1) -> Combiner:
    """Return the combiner that applies a rule to each row of a group.

    All tensors of a group are combined together, row by row, over the uploads that have the row: a
    class's prototype over the holders of the class, a model over the clients. A row that fewer than
    `needs` uploads have is their coordinate-wise median; one that nobody has stays without weight.
    """

    def combine(group: Group) -> Group:
        if not group.sums:
            return sum_group(group)
        uploads = len(group.weight)
        rows = group.weight[:1].numel()
        weight = group.weight.reshape(uploads, rows)
        values = _join_values(group, weight)
        holders = (weight > 0).sum(0)
        combined = rule(values, weight)
        has_few = (holders > 0) & (holders < needs)
        if needs > 1 and has_few.any():
            combined = torch.where(has_few[:, None], take_median(values, weight), combined)
        combined = torch.where((holders > 0)[:, None], combined, 0)
        return _split_values(combined * weight.sum(0)[:, None], group)

    return Combiner(name, combine, needs)


def _join_values(group: Group, weight: Tensor) -> Tensor:
    """Return the values of all tensors, (m, R, D): sums divided by weights, 0 without a weight."""
    joined = []
    for values in divide_by_weight(group).values():
        size = values[:1].numel() // max(1, weight.shape[1])
        joined.append(values.reshape(*weight.shape, size))
    return torch.cat(joined, dim=2)


def _split_values(combined: Tensor, group: Group) -> Group:
    """Return combined sums, (R, D), as a group with the tensors, weight and counts of `group`."""
    sums = {}
    start = 0
    for name, like in group.sums.items():
        size = like[:1].numel() // max(1, len(combined))
        part = combined[:, start : start + size]
        sums[name] = part.reshape(1, *like.shape[1:]).to(like.dtype)
        start += size
    return sum_group(group)._replace(sums=sums)


# --- what rules are made of


def take_median(values: Tensor, weight: Tensor) -> Tensor:
    """Return the coordinate-wise median over the holders of each row, (R, D).

    Of an even number it is the mean of the two in the middle, as `np.median` has it.
    """
    holders = (weight > 0).sum(0)
    cut = (holders - 1).clamp(min=0) // 2
    return average_middle(values, weight, cut)


def average_middle(values: Tensor, weight: Tensor, cut: Tensor) -> Tensor:
    """Return the mean, at each coordinate, without the `cut` smallest and `cut` largest values.

    cut  (R,) of each row; at least one of its holders must be left
    """
    is_held = weight > 0
    places = torch.arange(len(weight), device=weight.device)[:, None]
    is_kept = (places >= cut) & (places < is_held.sum(0) - cut)  # (m, R), of ordered values
    share = is_kept.to(values.dtype) / is_kept.sum(0).clamp(min=1)
    means = []
    for columns in _split_columns(values):
        ordered = torch.where(is_held[..., None], columns, torch.inf).sort(dim=0).values
        kept = torch.where(is_kept[..., None], ordered * share[..., None], 0)
        means.append(kept.sum(0))
    return torch.cat(means, dim=1)


def average_weighted(values: Tensor, coefficients: Tensor) -> Tensor:
    """Return Σ_i c_i x_i of each row, (R, D), for coefficients (m, R)."""
    factors = coefficients.to(values.dtype)[..., None]
    means = [(columns * factors).sum(0) for columns in _split_columns(values)]
    return torch.cat(means, dim=1)


def compute_gram(values: Tensor, weight: Tensor) -> Tensor:
    """Return the scalar products of the uploads of each row, (R, m, m), as float64.

    They are taken around the median of the row, so that rounding spoils nothing where all values
    are far from 0 or where some are huge. Uploads without the row have products of 0.
    """
    centre = take_median(values, weight)
    uploads, rows = weight.shape
    gram = torch.zeros(rows, uploads, uploads, dtype=torch.float64, device=values.device)
    is_held = (weight > 0)[..., None]
    middles = centre.split(_columns_at_a_time(values), dim=1)
    for columns, middle in zip(_split_columns(values), middles, strict=True):
        offsets = torch.where(is_held, columns.double() - middle.double(), 0).transpose(0, 1)
        gram += offsets @ offsets.mT
    return (gram + gram.mT) / 2


def _split_columns(values: Tensor) -> tuple[Tensor, ...]:
    """Return the columns of values (m, R, D) in parts that fit into memory when they are sorted."""
    return values.split(_columns_at_a_time(values), dim=2)


def _columns_at_a_time(values: Tensor) -> int:
    uploads, rows, _ = values.shape
    return max(1, _CHUNK_VALUES // max(1, uploads * rows))
