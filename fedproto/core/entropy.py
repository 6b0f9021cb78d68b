"""Random numbers that protect somebody: noise, and who is sampled, from the operating system.

They are never drawn by core/rng.py, whose seed stands in the run's configuration, so that anybody
could draw them again and take the noise away. A seeded mode exists for tests only: there the draws
depend on (seed, purpose, parts), so that engines can be compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.core import rng

_UNIT = 2.0**-53


@dataclass(frozen=True)
class Entropy:
    """Where protecting draws come from.

    seed  for tests only: draws that can be repeated and protect nothing; None: the operating system
    """

    seed: int | None = None

    def uniform(self, shape: Sequence[int], purpose: str, *parts: int) -> Tensor:
        """Return float64 values in [0, 1) on the CPU, whole multiples of 2⁻⁵³.

        `purpose` and `parts`, such as a round and a client, matter in the seeded mode only.
        """
        count = math.prod(shape)
        if self.seed is not None:
            return rng.uniform(rng.key(self.seed, purpose, *parts), count).reshape(tuple(shape))
        bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
        # A shift of a negative number keeps its sign, so that bit is cleared.
        upper_bits = (bits >> 11) & ((1 << 53) - 1)
        return (upper_bits.double() * _UNIT).reshape(tuple(shape))

    def normal(self, shape: Sequence[int], purpose: str, *parts: int) -> Tensor:
        """Return float64 draws of the standard normal distribution on the CPU (Box and Muller).

        No draw is further from 0 than √(2 · 53 · ln 2) = 8.6: the probability that one should be
        is 10⁻¹⁷.
        """
        count = math.prod(shape)
        if not count:
            return torch.zeros(tuple(shape), dtype=torch.float64)
        pairs = (count + 1) // 2
        draws = self.uniform((2, pairs), purpose, *parts)
        length = (1 - draws[0]).log_().mul_(-2).sqrt_()  # 1 − u is never 0
        angle = draws[1] * (2 * math.pi)
        both = torch.cat([length * angle.cos(), length * angle.sin()])
        return both[:count].reshape(tuple(shape))
