"""Values as whole numbers modulo 2^32 or 2^64, whose sum over all members cannot overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedproto.errors import ConfigError, TrainingError

#: The sizes of a number, in bits; the first that is large enough is taken.
SIZES = (32, 64)
#: More bits after the binary point than a float64 has would say nothing.
MAX_FRACTION_BITS = 52


@dataclass(frozen=True)
class FixedPoint:
    """How values are written as whole numbers: x as round(x · 2^fraction_bits) modulo 2^bits.

    Rounding moves each value by at most 2^−(fraction_bits + 1), and the sum of m members by at most
    m times that. Beside that, a sum is rounded once, to the type of floating-point number that it
    is stored in.
    """

    bits: int  # 32 or 64
    fraction_bits: int
    largest: float  # the largest absolute value that a member may send
    members: int  # at most so many are added

    @classmethod
    def choose(cls, members: int, largest: float, error: float) -> FixedPoint:
        """Return the shortest numbers that are exact enough; ConfigError if none are.

        largest  the largest absolute value of one member
        error    by which rounding may move a value of one member
        """
        if not (0 < largest < math.inf and 0 < error < math.inf):
            raise ConfigError(
                f"a secure sum needs a range and an error above 0, not {largest:g} and {error:g}"
            )
        for bits in SIZES:
            room = math.log2(2 ** (bits - 1) - 1) - math.log2(members) - math.log2(largest)
            fraction_bits = min(math.floor(room), MAX_FRACTION_BITS)
            fixed_point = cls(bits, fraction_bits, largest, members)
            while not fixed_point.cannot_overflow:
                fixed_point = cls(bits, fixed_point.fraction_bits - 1, largest, members)
            if fixed_point.rounding_error() <= error:
                return fixed_point
        raise ConfigError(
            f"no number of {SIZES[-1]} bits holds the sum of {members} values up to {largest:g} "
            f"with an error of {error:g} each: allow a smaller range or a larger error"
        )

    @property
    def cannot_overflow(self) -> bool:
        """Whether the sum of the largest values of all members can be told from a negative one."""
        largest = math.floor(self.largest * 2.0**self.fraction_bits + 0.5)
        return self.members * largest < 2 ** (self.bits - 1)

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers, whose sums are modulo 2^bits."""
        return np.dtype(f"<u{self.bits // 8}")

    def rounding_error(self, members: int = 1) -> float:
        """Return by how much rounding moves a sum over so many members at most."""
        return members * 2.0 ** -(self.fraction_bits + 1)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return values as whole numbers.

        Raises TrainingError if one is not finite or out of range, before anything is sent.
        """
        values = np.asarray(values, dtype=np.float64)
        magnitude = float(np.abs(values).max(initial=0))
        if not magnitude <= self.largest:
            raise TrainingError(
                f"a value of {magnitude:.3g} does not fit a secure sum, whose range is "
                f"{self.largest:g}: nothing was sent; allow a larger range, or clip the values"
            )
        scaled = np.rint(np.ldexp(values, self.fraction_bits))
        return scaled.astype(np.int64).astype(self.dtype)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Return the values of a sum of whole numbers, as float64."""
        signed = total.astype(self.dtype).view(np.dtype(f"<i{self.bits // 8}"))
        return np.ldexp(signed.astype(np.float64), -self.fraction_bits)
