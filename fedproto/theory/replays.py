"""One round of all clients, trained again and again from the same state.

The statements are about expectations over batches, so a round is replayed several times, each time
with batches of its own that are drawn with replacement: only then is a batch's gradient unbiased
given the past (Assumption 2). A run's own epochs are shuffled instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedproto.core import dropout, rng
from fedproto.core.types import State, Tree
from fedproto.theory.estimators import join_halves, moments_of_halves
from fedproto.theory.objectives import LocalObjectives, Samples


class ReplayPlan(NamedTuple):
    """How a round is replayed."""

    replays: int
    batch: int
    eta: float
    momentum: float
    seed: int
    round: int


class Replays(NamedTuple):
    """What R replays of a round of m clients did; steps beyond a client's own are 0.

    The estimates at each step are those of `GradientMoments`.
    """

    squares: Tensor  # (m, R, E)
    variances: Tensor  # (m, R, E)
    norms: Tensor  # (m, R, E)
    ends: Sequence[Tree]  # R trees with a leading axis over the clients
    middle: Tree  # half way through the first replay


def replay_round(
    objectives: LocalObjectives, params: Tree, received: State, steps: Tensor, plan: ReplayPlan
) -> Replays:
    """Return R replays of a round, all clients and replays trained side by side.

    params, received  with a leading axis over the clients
    steps             (m,) E of each client
    """
    order = steps.argsort(descending=True, stable=True)  # so that a step works on the first ones
    who = order.repeat_interleave(plan.replays)
    state = {name: value[who].clone() for name, value in params.items()}
    of_round = _take(received, who)
    velocity = {name: torch.zeros_like(state[name]) for name in objectives.trained}
    longest = int(steps.max())
    places = _draw_places(objectives, who, longest, plan)
    middle = {name: value.clone() for name, value in params.items()}
    columns: dict[str, list[Tensor]] = {"square": [], "variance": [], "norm": []}
    for step in range(longest):
        active = int((steps > step).sum()) * plan.replays
        first, second, sizes = _halve_gradient(
            objectives,
            {name: value[:active] for name, value in state.items()},
            _take(of_round, slice(0, active)),
            who[:active],
            places[:active, step],
            _draw_keep(objectives, who[:active], step, plan),
        )
        moments = moments_of_halves(first, second, sizes)
        for name, values in moments._asdict().items():
            column = values.new_zeros(len(who))
            column[:active] = values
            columns[name].append(column)
        gradient = join_halves(first, second, sizes)
        for name, value in gradient.items():
            velocity[name][:active].mul_(plan.momentum).add_(value)
            state[name][:active].sub_(velocity[name][:active], alpha=plan.eta)
        _copy_middle(middle, state, steps, order, step, plan.replays)
    tables = {name: torch.stack(values, 1) for name, values in columns.items()}
    shaped = {name: _unsort(value, order, plan.replays) for name, value in tables.items()}
    unsorted = {name: _unsort(value, order, plan.replays) for name, value in state.items()}
    ends = [_take_replay(unsorted, number) for number in range(plan.replays)]
    return Replays(shaped["square"], shaped["variance"], shaped["norm"], ends, middle)


def _halve_gradient(
    objectives: LocalObjectives,
    state: Tree,
    received: State,
    who: Tensor,
    places: Tensor,
    keep: Tree | None,
) -> tuple[Tree, Tree, tuple[int, int]]:
    """Return the gradients of the two halves of each row's batch, and the halves' sizes.

    Both are computed in one stack of twice as many rows.
    """
    rows = len(who)
    batch = places.shape[1]
    half = (batch + 1) // 2
    sizes = (half, batch - half)
    samples = objectives.take(who, places)
    x = _split_halves(samples.x, half)
    y = _split_halves(samples.y, half)
    mask = _split_halves(samples.mask, half)
    if sizes[1] < half:
        mask[rows:, -1] = 0  # the second half of an odd batch is padded
    halves_kept = None
    if keep is not None:
        halves_kept = {name: _split_halves(value, half) for name, value in keep.items()}
    twice = {name: torch.cat([value, value]) for name, value in state.items()}
    received_twice = _take(received, torch.arange(rows).repeat(2))
    gradient = objectives.gradient(twice, received_twice, Samples(x, y, mask), halves_kept)
    first = {name: value[:rows] for name, value in gradient.items()}
    second = {name: value[rows:] for name, value in gradient.items()}
    return first, second, sizes


def _split_halves(values: Tensor, half: int) -> Tensor:
    """Return the first half of each row's batch, then the second, which repeats its last sample."""
    second = values[:, half:]
    if second.shape[1] < half:
        second = torch.cat([second, values[:, -1:]], 1)
    return torch.cat([values[:, :half], second])


def _draw_places(
    objectives: LocalObjectives, who: Tensor, longest: int, plan: ReplayPlan
) -> Tensor:
    """Return which of its rows each row of the stack takes, drawn with replacement: (k, E, b)."""
    keys = _keys(objectives, who, "theory batches", plan)
    draws = rng.uniform(keys, longest * plan.batch)
    places = (draws * objectives.counts[who][:, None]).long()
    return places.reshape(len(who), longest, plan.batch)


def _draw_keep(
    objectives: LocalObjectives, who: Tensor, step: int, plan: ReplayPlan
) -> Tree | None:
    """Return what dropout keeps of each row's batch; None without dropout."""
    layers = [layer for layer in objectives.dropped if layer.p > 0]
    if not layers:
        return None
    keys = rng.fold(_keys(objectives, who, "theory dropout", plan) + step, "step")
    return dropout.draw(objectives.dropped, keys, plan.batch)


def _keys(objectives: LocalObjectives, who: Tensor, purpose: str, plan: ReplayPlan) -> Tensor:
    """Return a key for each row of a stack, whose replays follow each other."""
    replay = torch.arange(len(who)) % plan.replays
    return rng.key(plan.seed, purpose, plan.round, objectives.clients[who], replay)


def _copy_middle(
    middle: Tree, state: Tree, steps: Tensor, order: Tensor, step: int, replays: int
) -> None:
    """Copy the first replay of the clients that are half way through their steps."""
    half_way = ((steps[order] + 1) // 2 == step + 1).nonzero().flatten()
    if len(half_way):
        for name, value in state.items():
            middle[name][order[half_way]] = value[half_way * replays]


def _unsort(values: Tensor, order: Tensor, replays: int) -> Tensor:
    """Return (m, R, ...) in the order of the clients, from rows in the order of training."""
    shaped = values.unflatten(0, (len(order), replays))
    return shaped[order.argsort()]


def _take_replay(state: Tree, number: int) -> Tree:
    """Return one replay of all clients, from trees of (m, R, ...)."""
    return {name: value[:, number] for name, value in state.items()}


def _take(state: State, rows: Tensor | slice) -> State:
    """Return some rows of a state of tensors, which may have trees in it."""
    taken: State = {}
    for name, value in state.items():
        taken[name] = _take(value, rows) if isinstance(value, dict) else value[rows]
    return taken
