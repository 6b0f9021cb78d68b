"""The bytes of a secure sum's messages. Whatever arrives may come from anybody, and is checked.

Numbers of members are little-endian, two bytes each. Lists are in the order of these numbers, so
that there is one way only to write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fedproto.errors import Refused
from fedproto.privacy.secure_sum.primitives import KEY_BYTES, TAG_BYTES
from fedproto.privacy.secure_sum.shamir import SHARE_BYTES

NUMBER_BYTES = 2
KEYS_BYTES = 2 * KEY_BYTES
COMMITMENT_BYTES = 32
SHARES_BYTES = 2 * SHARE_BYTES  # of one member's two secrets
SEALED_BYTES = SHARES_BYTES + TAG_BYTES


class PublicKeys(NamedTuple):
    """The two public keys of a member."""

    sharing: bytes  # for the encryption of shares
    masking: bytes  # for the masks between two members


class SharesOf(NamedTuple):
    """One share of each secret of one member."""

    masking: bytes  # of the seed of its masking key
    own: bytes  # of the seed of its own mask


def pack_entries(entries: Mapping[int, bytes]) -> bytes:
    """Return entries of equal length, each after the number of its member."""
    packed = b""
    for number in sorted(entries):
        packed += number.to_bytes(NUMBER_BYTES, "little") + entries[number]
    return packed


def unpack_entries(message: bytes, length: int) -> dict[int, bytes]:
    """Return entries of `length` bytes by member; Refused unless the numbers are in order."""
    step = NUMBER_BYTES + length
    if len(message) % step:
        raise Refused(f"a list of a secure sum has {len(message)} bytes, not a multiple of {step}")
    entries = {}
    last = -1
    for start in range(0, len(message), step):
        number = int.from_bytes(message[start : start + NUMBER_BYTES], "little")
        if number <= last:
            raise Refused("a list of a secure sum names a member twice, or not in order")
        entries[number] = message[start + NUMBER_BYTES : start + step]
        last = number
    return entries


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Return a list of members."""
    return pack_entries(dict.fromkeys(numbers, b""))


def unpack_numbers(message: bytes) -> frozenset[int]:
    """Return the members of a list."""
    return frozenset(unpack_entries(message, 0))


def pack_keys(keys: PublicKeys) -> bytes:
    """Return what a member sends first."""
    return keys.sharing + keys.masking


def unpack_keys(message: bytes) -> PublicKeys:
    """Return a member's two public keys."""
    if len(message) != KEYS_BYTES:
        raise Refused(f"its keys have {len(message)} bytes, where {KEYS_BYTES} are wanted")
    keys = PublicKeys(message[:KEY_BYTES], message[KEY_BYTES:])
    if keys.sharing == keys.masking:
        raise Refused("its two public keys are the same")
    return keys


def unpack_shares(text: bytes) -> SharesOf:
    """Return the two shares that one member gave another."""
    if len(text) != SHARES_BYTES:
        raise Refused(f"shares have {len(text)} bytes, where {SHARES_BYTES} are wanted")
    return SharesOf(text[:SHARE_BYTES], text[SHARE_BYTES:])


def unpack_masked(message: bytes, length: int, dtype: np.dtype) -> np.ndarray:
    """Return a member's masked values."""
    wanted = length * dtype.itemsize
    if len(message) != wanted:
        raise Refused(f"its masked values have {len(message)} bytes, where {wanted} are wanted")
    return np.frombuffer(message, dtype=dtype)
