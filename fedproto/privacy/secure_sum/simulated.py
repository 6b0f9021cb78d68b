"""Secure sums in a simulated run: the rounding, the bytes and, if wanted, the whole protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedproto.core.types import GroupLayout, Upload
from fedproto.errors import ConfigError
from fedproto.privacy.secure_sum.fixed_point import FixedPoint
from fedproto.privacy.secure_sum.flat_uploads import count_values, from_vector, to_vectors
from fedproto.privacy.secure_sum.terms import (
    SESSION_BYTES,
    SumTerms,
    check_threshold,
    count_threshold,
)


@dataclass(frozen=True)
class SecureSum:
    """Adds uploads in fixed point, as `core.summation.Summation`; see combiners/secure_sum.py."""

    simulate: Literal["rounding", "protocol"] = "rounding"
    threshold: float = 0.67
    largest: float = 1e6
    error: float = 1e-6
    name: str = "secure-sum"

    def count_needed(self, members: int) -> int:
        """Return how many of the sampled clients' uploads must arrive."""
        return count_threshold(members, self.threshold)

    def make_terms(self, members: int, length: int) -> SumTerms:
        """Return the terms of a new sum of so many members' values; ConfigError if there are none.

        What protects, keys and masks, is drawn anew for every sum, from the operating system.
        """
        needed = self.count_needed(members)
        check_threshold(members, needed)
        fixed_point = FixedPoint.choose(members, self.largest, self.error)
        return SumTerms(os.urandom(SESSION_BYTES), needed, length, fixed_point)

    def check(self, members: int, arriving: int) -> None:
        """Raise ConfigError if the uploads of so many sampled clients could not be added."""
        needed = self.make_terms(members, length=1).threshold
        if arriving < needed:
            raise ConfigError(
                f"of {members} uploads {arriving} arrive, but {self.name} needs {needed} to unmask "
                "a sum: lose fewer uploads, or lower its threshold"
            )

    def add(self, uploads: Upload, members: int) -> Upload:
        """Return the sum of uploads, with a leading axis of 1; TrainingError if that fails.

        uploads  with a leading axis over those that arrived, of `members` sampled clients. The
                 others have shared secrets and then are gone.
        """
        vectors = to_vectors(uploads)
        terms = self.make_terms(members, vectors.shape[1])
        if self.simulate == "protocol":
            total = self._run_protocol(terms, vectors, members)
        else:
            encoded = np.zeros(terms.length, terms.fixed_point.dtype)
            for vector in vectors:
                encoded += terms.fixed_point.encode(vector)
            total = terms.fixed_point.decode(encoded)
        return from_vector(total, uploads)

    def _run_protocol(self, terms: SumTerms, vectors: np.ndarray, members: int) -> np.ndarray:
        from fedproto.privacy.secure_sum.local import add_securely

        gone = set(range(len(vectors), members))
        return add_securely(terms, dict(enumerate(vectors)), members, {"masked": gone}).total

    def count_traffic(
        self, layouts: Mapping[str, GroupLayout], members: int, lost: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what each sampled client sends and receives, (members, 2) each.

        The columns are values and bytes. What is received is beside what the algorithm sends.
        """
        length, values = count_values(layouts)
        if not length:
            nothing = torch.zeros(members, 2, dtype=torch.int64)
            return nothing, nothing
        from fedproto.privacy.secure_sum.local import count_bytes

        terms = self.make_terms(members, length)
        sent, received = count_bytes(terms, members, set(lost.tolist()))
        values_sent = np.full(members, values)
        up = torch.from_numpy(np.stack([values_sent, sent], 1))
        down = torch.from_numpy(np.stack([np.zeros_like(received), received], 1))
        return up, down
