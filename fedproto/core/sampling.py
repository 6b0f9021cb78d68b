"""Who takes part in a round: the cohort, lost uploads and stragglers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.engine import Cohort


@dataclass(frozen=True)
class Schedule:
    rounds: int
    participation: float = 1.0  # share of the clients sampled each round
    lost_uploads: float = 0.0  # share of the uploads lost on their way
    stragglers: float = 0.0  # share of the sampled clients that does half its steps
    eval_every: int = 10
    seed: int = 0


def draw(clients: int, schedule: Schedule, round: int) -> Cohort:
    """Who takes part in a round, whose upload is lost, and who does half its steps."""

    def some(purpose: str, of: Tensor, share: float, at_least: int) -> Tensor:
        count = max(at_least, _nearest(share * len(of)))
        if count in (0, len(of)):
            return of[:count]
        return of[rng.sample(rng.key(schedule.seed, purpose, round), len(of), count)]

    picked = some("sample", torch.arange(clients), schedule.participation, at_least=1)
    lost = some("lost uploads", picked, schedule.lost_uploads, at_least=0)
    return Cohort(picked, lost, slow=some("stragglers", picked, schedule.stragglers, at_least=0))


def _nearest(number: float) -> int:
    """Rounded, halves up: python's round(0.5) is 0."""
    return int(number + 0.5)
