"""How a step of training follows the gradient: SGD, Adam and AdamW, clipping, and schedules.

The functions change tensors in place, and take one client's tensors or those of a stack of clients:
`rate` and the like are then tensors that broadcast over the stack. They compute what `torch.optim`
computes, which takes two seconds to import and knows no stacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # settings name what is here, and must not wait for torch
    from torch import Tensor

OptimiserName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "cosine", "linear", "step"]

#: Adam's constants, as Kingma and Ba (2015) and torch have them.
BETA1 = 0.9
BETA2 = 0.999
EPSILON = 1e-8
#: Is added to a norm before it divides, as in torch.nn.utils.clip_grad_norm_.
NORM_EPSILON = 1e-6
#: The schedule `step`: from these parts of the rounds on, the rate is divided by ten (once more).
STEP_PLACES = (0.5, 0.75)


@dataclass(frozen=True)
class Optimiser:
    """How a step follows the gradient. Its moments start at zero in each round and phase.

    name          `sgd` with the run's momentum, or `adam` or `adamw` with β 0.9 and 0.999
    weight_decay  λ: SGD and Adam add λ·w to the gradient, AdamW shrinks w by lr·λ in each step
    clip_norm     the largest norm that the gradient of all trained parameters may have; 0: any
    """

    name: OptimiserName = "sgd"
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of what is kept for each parameter between steps, in its shape."""
        return ("velocity",) if self.name == "sgd" else ("velocity", "square")

    def decay_gradient(self, gradient: Tensor, value: Tensor) -> Tensor:
        """Return the gradient with the weight decay that is a part of it."""
        if not self.weight_decay or self.name == "adamw":
            return gradient
        return gradient.add(value, alpha=self.weight_decay)

    def shrink(self, value: Tensor, rate: float | Tensor) -> None:
        """Shrink parameters, in place, if weight decay is not a part of the gradient (AdamW)."""
        if self.weight_decay and self.name == "adamw":
            value.mul_(1 - rate * self.weight_decay)


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate over the rounds, as a factor of the run's `lr`.

    It rises over `warmup` rounds, and is 1 in the next one. From there `cosine` and `linear` fall
    to nearly 0 in the last of the `rounds`, and `step` is 0.1 from half of them on and 0.01 from
    three quarters on.
    """

    name: ScheduleName = "constant"
    warmup: int = 0
    rounds: int = 1

    def factor(self, round: int) -> float:
        """Return the factor of a round; the first is 1."""
        if round <= self.warmup:
            return round / (self.warmup + 1)
        rounds_to_fall = max(1, self.rounds - self.warmup)
        progress = min(1.0, (round - 1 - self.warmup) / rounds_to_fall)
        if self.name == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        if self.name == "linear":
            return 1 - progress
        if self.name == "step":
            divisions = sum(progress >= place for place in STEP_PLACES)
            return 10.0**-divisions
        return 1.0


class AdamRates(NamedTuple):
    """What the rate and the number of a step make of Adam's moments; without bias in early steps.

    The second moment's root is divided by `root_correction`, and the first moment is multiplied by
    `step_size`.
    """

    step_size: float | Tensor
    root_correction: float | Tensor


def adam_rates(rate: float | Tensor, step: int | Tensor) -> AdamRates:
    """Return Adam's rates of a step; the first is 1, and a tensor has no axes and is float64."""
    mean_correction = 1 - BETA1**step
    square_correction = 1 - BETA2**step
    return AdamRates(rate / mean_correction, square_correction**0.5)


def move_by_adam(
    value: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, rates: AdamRates
) -> None:
    """Do one step of Adam in place, with m and v as the running means of g and g².

    m ← β₁·m + (1 − β₁)·g, v ← β₂·v + (1 − β₂)·g², w ← w − lr · m̂ / (√v̂ + ε), where m̂ and v̂
    are m and v divided by 1 − β₁ᵗ and 1 − β₂ᵗ in step t.
    """
    mean.lerp_(gradient, 1 - BETA1)
    square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    root = square.sqrt().div_(rates.root_correction).add_(EPSILON)
    value.sub_(mean / root * rates.step_size)


def clip_factor(squared_norms: Sequence[Tensor], clip_norm: float) -> Tensor:
    """Return what gradients are multiplied by, so that the norm of all together is `clip_norm`.

    It is at most 1. The squared norms are those of the gradients of single parameters.
    """
    first, *others = squared_norms
    norm = sum(others, first).sqrt()
    return (clip_norm / (norm + NORM_EPSILON)).clamp(max=1)
