"""Estimates of the four constants that the proof presupposes, for all clients at once.

Each is a largest value over the points that were looked at: of a supremum it is an estimate from
below. Trees have a leading axis over the rows of a stack (objectives.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.types import Tree

#: Below this distance of two points a difference quotient is rounding error.
MIN_DISTANCE = 1e-12


# --- trees as vectors


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the inner product of each row of two trees: (k,)."""
    products = [(a[name] * b[name]).flatten(1).sum(1) for name in a]
    return torch.stack(products).sum(0)


def norm(tree: Tree) -> Tensor:
    """Return the Euclidean norm of each row of a tree: (k,)."""
    return dot(tree, tree).clamp(min=0).sqrt()


def subtract(a: Tree, b: Tree) -> Tree:
    """Return a − b, of the names of a."""
    return {name: value - b[name] for name, value in a.items()}


def scale(tree: Tree, factors: Tensor) -> Tree:
    """Return each row of a tree times its factor."""
    return {
        name: value * factors.reshape(-1, *[1] * (value.dim() - 1)) for name, value in tree.items()
    }


def normalise(tree: Tree) -> Tree:
    """Return each row of a tree divided by its norm; rows of zeros stay."""
    lengths = norm(tree)
    return scale(tree, 1 / torch.where(lengths > 0, lengths, 1))


def draw_directions(like: Tree, seed: int) -> Tree:
    """Return a random direction of length 1 for each row of a tree."""
    draws = {}
    for number, (name, value) in enumerate(like.items()):
        key = rng.key(seed, "theory direction", number)
        # Uniform values are as good as normal ones for a start that no eigenvector is orthogonal to
        values = rng.uniform(key, value.numel()) - 0.5
        draws[name] = values.reshape(value.shape).to(value.dtype)
    return normalise(draws)


# --- L1


class PowerIteration(NamedTuple):
    """The largest absolute eigenvalue of each row's symmetric matrix."""

    values: Tensor  # (k,)
    change: Tensor  # (k,) the last iteration's relative change, which says how far it converged


def iterate_power(multiply: Callable[[Tree], Tree], start: Tree, iterations: int) -> PowerIteration:
    """Return the largest absolute eigenvalue by power iteration.

    multiply  each row's matrix times a tree, such as a Hessian-vector product
    """
    vectors = normalise(start)
    values = torch.zeros(0)
    change = torch.zeros(0)
    for _ in range(iterations):
        products = multiply(vectors)
        lengths = norm(products)
        if len(values):
            change = (lengths - values).abs() / torch.where(lengths > 0, lengths, 1)
        values = lengths
        vectors = normalise(products)
    if not len(change):
        change = torch.full_like(values, torch.inf)
    return PowerIteration(values, change)


def largest_quotient(points: list[Tree], gradients: list[Tree]) -> Tensor:
    """Return the largest ‖∇L(a) − ∇L(b)‖ / ‖a − b‖ over all pairs of points: (k,).

    It is 0 where all points are equal.
    """
    largest = torch.zeros_like(norm(gradients[0]))
    for first in range(len(points)):
        for second in range(first):
            moved = norm(subtract(gradients[first], gradients[second]))
            distance = norm(subtract(points[first], points[second]))
            quotient = torch.where(distance > MIN_DISTANCE, moved / distance, 0)
            largest = torch.maximum(largest, quotient)
    return largest


# --- σ² and G


class GradientMoments(NamedTuple):
    """Unbiased estimates at one point, from the gradients of the two halves of one batch.

    The halves are independent, since rows are drawn with replacement: ⟨g_a, g_b⟩ has the
    expectation ‖∇L‖², without the variance that ‖g‖² contains. No further gradient is needed.
    """

    square: Tensor  # (k,) of ‖∇L‖²; may be negative
    variance: Tensor  # (k,) of E‖g − ∇L‖² for a whole batch
    norm: Tensor  # (k,) ‖g‖


def moments_of_halves(first: Tree, second: Tree, sizes: tuple[int, int]) -> GradientMoments:
    """Return the moments of a batch whose halves have these gradients and sizes."""
    first_size, second_size = sizes
    batch = first_size + second_size
    difference = subtract(first, second)
    share = first_size * second_size / batch**2
    return GradientMoments(
        square=dot(first, second),
        variance=share * dot(difference, difference),
        norm=norm(join_halves(first, second, sizes)),
    )


def join_halves(first: Tree, second: Tree, sizes: tuple[int, int]) -> Tree:
    """Return the gradient of the whole batch."""
    batch = sum(sizes)
    return {
        name: (sizes[0] * value + sizes[1] * second[name]) / batch for name, value in first.items()
    }


# --- L2


class EmbeddingQuotients(NamedTuple):
    """How far embeddings moved by the distance that the parameters moved, for each row: (k,)."""

    largest: Tensor  # over the samples: what Assumption 4 speaks of
    mean: Tensor  # over the samples: what steps (e) and (f) of Lemma 2 need


def embedding_quotients(
    before: Tensor, after: Tensor, mask: Tensor, distance: Tensor
) -> EmbeddingQuotients:
    """Return ‖f(φ'; x) − f(φ; x)‖ / ‖φ' − φ‖ over a client's samples.

    before, after  (k, n, d) embeddings
    mask           (k, n) 0 for padding
    distance       (k,) ‖φ' − φ‖
    """
    moved = (after - before).norm(dim=-1) * mask
    far = torch.where(distance > MIN_DISTANCE, distance, torch.inf)
    mean = moved.sum(1) / mask.sum(1)
    return EmbeddingQuotients(moved.amax(1) / far, mean / far)


def jacobian_norms(
    push: Callable[[Tree], Tensor], pull: Callable[[Tensor], Tree], start: Tensor, iterations: int
) -> Tensor:
    """Return ‖J‖ of each row by power iteration on J Jᵀ: (k,).

    push, pull  v -> J v and u -> Jᵀ u
    start       (k, d) directions
    """
    directions = {"u": start}
    values = norm(directions)
    for _ in range(iterations):
        directions = normalise(directions)
        pulled = pull(directions["u"])
        values = norm(pulled)
        directions = {"u": push(pulled)}
    return values
