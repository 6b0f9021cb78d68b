"""Steps of training that protect each record of a client: DP-SGD (Abadi et al. 2016).

A step takes each of a client's n records with probability q = batch / n (Poisson sampling), clips
the gradient of each record's loss, over all parameters that the step trains, to the length C, adds
noise of standard deviation σ·C to every value of the sum, and divides by the expected number of
records, q·n. The optimiser then follows that as it follows any gradient.

Why a record is protected: let one record be added or removed, while the others keep their places.
Given the parameters before the step, all that changes is one term of the sum, whose length is at
most C, and which is there with probability q. Each step is therefore a Gaussian mechanism with
multiplier σ under Poisson sampling with rate q, whatever the loss is, because the loss is computed
for one record at a time: terms that would couple the records of a batch cannot. What it reads
besides is the model, what the server sent and what the client keeps, all of which were computed
from earlier steps. Draws of dropout and of augmentation belong to a record's place and to the step,
so they do not change for the others. The optimiser's moments, weight decay and the step itself
only see the noisy sum. The accountant composes all steps of a run.

The number of a client's records decides q and the number of steps, and counts as public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedproto.core.entropy import Entropy
from fedproto.core.tensors import align_axes
from fedproto.core.types import Batch, Step, Tree

#: (trained parameters, batch of one record, what dropout keeps of it) -> terms of the loss, step
ComputeTerms = Callable[[Tree, Batch, Tree], tuple[Tree, Step]]


class RecordGradients(NamedTuple):
    """What a private step computes of a batch of b records, before anything is protected."""

    gradients: Tree  # (b, …) by parameter
    terms: Tree  # the mean of each term of the loss over the records
    step: Step  # features and logits of the batch, without parameters


@dataclass(frozen=True)
class PrivateSteps:
    """How the steps of all clients are protected.

    norm     C, the largest length of a record's gradient; infinite: any
    noise    σ, the standard deviation of the noise, in units of C
    entropy  where noise and samples come from; seeded for tests only
    """

    norm: float
    noise: float
    entropy: Entropy = field(default_factory=Entropy)

    def draw_places(self, rate: float, records: int, steps: int, key: int, first: int) -> Tensor:
        """Return which of a client's records each step takes: (steps, records) booleans.

        key    of (seed, round, client); it matters in the seeded mode only, as does
        first  the number of the first of the steps in the round
        """
        draws = self.entropy.uniform((steps, records), "private samples", key, first)
        return draws < rate

    def draw_noise(self, trained: Tree, keys: Sequence[int], steps: Sequence[int]) -> Tree:
        """Return the noise of one step of each client: (clients, …) for each parameter.

        trained  the parameters of one client, whose shapes count
        keys     those of the clients, as for `draw_places`
        steps    the numbers of the clients' steps in the round
        """
        sizes = [value.numel() for value in trained.values()]
        deviation = self.noise * self.norm if self.noise else 0.0
        flat = torch.zeros(len(keys), sum(sizes), dtype=torch.float64)
        if deviation:
            for place, numbers in enumerate(zip(keys, steps, strict=True)):
                flat[place] = self.entropy.normal((sum(sizes),), "private noise", *numbers)
        noise = {}
        pieces = (flat * deviation).split(sizes, 1)
        for (name, value), piece in zip(trained.items(), pieces, strict=True):
            noise[name] = piece.reshape(len(keys), *value.shape).to(value)
        return noise


def sampling_rate(batch: int, records: int) -> float:
    """Return q, the probability with which a step takes a record."""
    return min(1.0, batch / max(1, records))


def expected_batch(batch: int, records: int) -> float:
    """Return q·n, the expected number of records in a step, by which the noisy sum is divided."""
    return float(min(batch, max(1, records)))


def record_gradients(
    compute_terms: ComputeTerms, trained: Tree, batch: Batch, keep: Tree
) -> RecordGradients:
    """Return the gradient of the loss of each record of a batch.

    trained  the parameters to differentiate by
    keep     what each dropout layer keeps of the batch, (b, …) each
    """

    def compute_loss(trained: Tree, x: Tensor, y: Tensor, keep: Tree) -> tuple[Tensor, Any]:
        of_one = Batch(x[None], y[None], x.new_ones(1))
        keep_of_one = {name: value[None] for name, value in keep.items()}
        terms, step = compute_terms(trained, of_one, keep_of_one)
        loss = torch.stack(list(terms.values())).sum()
        return loss, (terms, step.features[0], step.logits[0])

    of_each = vmap(
        grad(compute_loss, has_aux=True), in_dims=(None, 0, 0, 0), randomness="different"
    )
    gradients, (terms, features, logits) = of_each(trained, batch.x, batch.y, keep)
    means = {name: _mean_of_records(values, batch.mask) for name, values in terms.items()}
    return RecordGradients(gradients, means, Step({}, features, logits, batch, received={}))


def _mean_of_records(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the records whose value is finite; 0 without any."""
    counts = mask * values.isfinite()
    return torch.where(counts > 0, values, 0).sum() / counts.sum().clamp(min=1)


def sum_clipped(gradients: Tree, mask: Tensor, norm: float) -> Tree:
    """Return the sum over the records of their gradients, each no longer than `norm`.

    The length is over all parameters together. A record whose gradient is not finite adds nothing,
    nor does padding.

    gradients  (b, …) for each parameter
    mask       (b,) 1 for a record, 0 for padding
    """
    factor = clip_factors(gradients, norm)
    counts = (mask > 0) & (factor > 0)
    sums = {}
    for name, gradient in gradients.items():
        clipped = gradient * align_axes(factor, gradient)
        sums[name] = torch.where(align_axes(counts, clipped), clipped, 0).sum(0)
    return sums


def clip_factors(gradients: Tree, norm: float) -> Tensor:
    """Return what each record's gradient is multiplied by: (b,), at most 1.

    It is 0 where a gradient is not finite, or so long that the factor would lose precision.
    Lengths are computed in float64. Where something is clipped, the factor is smaller by a few
    units of the gradients' precision, so that rounding makes nothing longer than the bound.
    """
    squares = []
    for gradient in gradients.values():
        flat = gradient.reshape(len(gradient), -1)
        squares.append(torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square())
    length = torch.stack(squares).sum(0).sqrt()
    dtype = next(iter(gradients.values())).dtype
    precision = torch.finfo(dtype)
    bound = norm * (1 - 8 * precision.eps) if math.isfinite(norm) else norm
    factor = torch.where(length > bound, bound / length, 1.0)
    is_usable = length.isfinite() & (factor >= precision.tiny)
    return torch.where(is_usable, factor, 0.0).to(dtype)
