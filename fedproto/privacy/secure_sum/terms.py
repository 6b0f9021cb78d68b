"""What the server and all members of one secure sum agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedproto.errors import ConfigError
from fedproto.privacy.secure_sum.fixed_point import FixedPoint

SESSION_BYTES = 16
#: With two, each would learn the other's values from the sum.
MIN_MEMBERS = 3
#: Members are numbered by two bytes.
MAX_MEMBERS = 2**16 - 1


@dataclass(frozen=True)
class SumTerms:
    """The terms of one secure sum.

    session      a random word of 16 bytes that keys, shares and masks of this sum are bound to
    threshold    how many must answer to unmask: of all members, or of the neighbours of each and
                 itself
    length       values of each member
    fixed_point  how they are written as whole numbers
    """

    session: bytes
    threshold: int
    length: int
    fixed_point: FixedPoint

    def __post_init__(self) -> None:
        if len(self.session) != SESSION_BYTES:
            raise ConfigError(f"the session of a secure sum has {SESSION_BYTES} bytes")
        if self.threshold < 2 or self.length < 1:
            raise ConfigError("a secure sum needs a threshold of at least 2, and values to add")


def count_threshold(members: int, fraction: float) -> int:
    """Return a threshold that is a fraction of the members, rounded up, but always a majority."""
    return max(math.ceil(fraction * members), members // 2 + 1)


def is_majority(threshold: int, members: int) -> bool:
    """Return whether a threshold is more than half of the members, and not more than all.

    Otherwise a server could ask one half for shares of a member's key and the other half for shares
    of its own mask, and so unmask a single member.
    """
    return members // 2 < threshold <= members


def check_threshold(members: int, threshold: int) -> None:
    """Raise ConfigError unless so many members may have this threshold."""
    if not MIN_MEMBERS <= members <= MAX_MEMBERS:
        raise ConfigError(
            f"a secure sum needs from {MIN_MEMBERS} to {MAX_MEMBERS} members, not {members}"
        )
    if not is_majority(threshold, members):
        raise ConfigError(
            f"the threshold of a secure sum of {members} members must be a majority, from "
            f"{members // 2 + 1} to {members}, not {threshold}"
        )
