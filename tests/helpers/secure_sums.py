"""Secure sums for tests: draws that can be repeated, and terms with little to say."""

import hashlib

from fedproto.privacy.secure_sum.fixed_point import FixedPoint
from fedproto.privacy.secure_sum.terms import SumTerms


class SeededDraw:
    """Random bytes that can be drawn again; they protect nothing."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.count = 0

    def __call__(self, count: int) -> bytes:
        self.count += 1
        return hashlib.shake_256(f"{self.seed}/{self.count}".encode()).digest(count)


def make_terms(members=5, threshold=3, length=4, largest=100.0, error=1e-4, session=b"s" * 16):
    """Return the terms of a small secure sum."""
    return SumTerms(session, threshold, length, FixedPoint.choose(members, largest, error))
