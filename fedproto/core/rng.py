"""Random numbers that depend on their purpose, never on the order in which they are drawn.

Every draw is a pure function of (seed, round, client, purpose, index): a counter-based generator,
splitmix64, written in wrapping int64 tensor arithmetic. One client alone, a stack of a thousand,
another device or a resumed run therefore see the same shuffles, crops and samples.
"""

import functools
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit number, for torch
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
_LARGEST_INT64 = (1 << 63) - 1


def _logical_shift(x: Tensor, by: int) -> Tensor:
    """Return x shifted to the right, with zeros instead of copies of its sign."""
    lower_bits = (1 << (64 - by)) - 1
    return (x >> by) & lower_bits


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser: each input bit changes each output bit with probability 1/2."""
    x = (x ^ _logical_shift(x, 30)) * _FIRST_FACTOR
    x = (x ^ _logical_shift(x, 27)) * _SECOND_FACTOR
    return x ^ _logical_shift(x, 31)


def _purpose(name: str) -> int:
    """Return the number that stands for a purpose."""
    return zlib.crc32(name.encode())


def key(seed: int | Tensor, purpose: str, *parts: int | Tensor) -> Tensor:
    """Return the key of one stream of draws, such as of a round and a client.

    A part may be a tensor, as of client numbers, which gives a tensor of keys.

    >>> key(0, "shuffle", 3, torch.arange(5)).shape
    torch.Size([5])
    """
    return keys(seed, [purpose], *parts)[0]


def keys(seed: int | Tensor, purposes: Sequence[str], *parts: int | Tensor) -> Tensor:
    """Return the keys of several purposes at once, along a new first axis."""
    axes = max(torch.as_tensor(part).dim() for part in (seed, *parts))
    state = _mix(torch.as_tensor(seed) + _GOLDEN)
    numbers = torch.tensor([_purpose(purpose) for purpose in purposes])
    numbers = numbers.reshape(-1, *[1] * axes)
    for part in (numbers, *parts):
        state = _mix(state + (torch.as_tensor(part) + 1) * _GOLDEN)
    return state


def fold(keys: Tensor, purpose: str) -> Tensor:
    """Return the keys of streams that belong to a purpose, made from keys without one."""
    offset = torch.tensor(_purpose(purpose) + 1) * _GOLDEN  # a tensor, since it wraps around
    return _mix(keys + int(offset))


def bits(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """Return `count` random int64 values for each key, along a new last axis.

    They are those of the key's stream from the number `start` on.
    """
    index = torch.arange(start + 1, start + count + 1, device=keys.device)
    return _mix(keys[..., None] + index * _GOLDEN)


def uniform(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """Return `count` float64 values in [0, 1) for each key, like `bits`."""
    return _logical_shift(bits(keys, count, start), 11).double() * 2.0**-53


def permutation(keys: Tensor, count: int, lengths: Tensor | None = None) -> Tensor:
    """Return a random order of 0 .. count-1 for each key: the order in which random values sort.

    `lengths`, of the shape of `keys`, makes each order one of 0 .. length-1, followed by padding.
    """
    draws = bits(keys, count)
    if lengths is not None:
        is_padding = torch.arange(count, device=keys.device) >= lengths[..., None]
        draws = draws.masked_fill(is_padding, _LARGEST_INT64)
    return draws.argsort(dim=-1, stable=True)


def sample(key: Tensor, population: int, count: int) -> Tensor:
    """Return `count` of 0 .. population-1, sorted.

    They are those that would come first in a permutation, found without sorting everything.
    """
    draws = bits(key, population)
    smallest = draws.topk(count, largest=False, sorted=False).indices
    return smallest.sort().values


def preserve_torch_generators(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which torch's own generators may be used; it restores them."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def seed_torch_generators(seed: int) -> None:
    """Seed torch's own generators, on all devices."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # `torch.manual_seed` writes down the stack once for each kind of accelerator that might be
        # found later, which takes longer than the building of a small model.
        torch.default_generator.manual_seed(seed)


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a numpy generator for work done once, before round 1 (partitions, hold-outs)."""
    return np.random.default_rng([seed, _purpose(purpose)])
