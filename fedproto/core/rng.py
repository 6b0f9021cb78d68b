"""Random numbers that depend on what they are for, never on the order in which they are asked for.

Every draw is a pure function of (seed, round, client, purpose, index): a counter-based generator, splitmix64,
written in wrapping int64 tensor arithmetic. One client alone, a stack of a thousand, another device or a resumed
run therefore see the same shuffles, crops and samples.
"""

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as the signed 64-bit number torch wants
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_LARGEST = (1 << 63) - 1


def _logical_shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every input bit changes every output bit with probability one half."""
    x = (x ^ _logical_shift(x, 30)) * _FIRST
    x = (x ^ _logical_shift(x, 27)) * _SECOND
    return x ^ _logical_shift(x, 31)


def _purpose(name: str) -> int:
    return zlib.crc32(name.encode())


def key(seed: int | Tensor, purpose: str, *parts: int | Tensor) -> Tensor:
    """The key of one stream of draws; a part may be a tensor of client ids, which gives a tensor of keys.

    >>> key(0, "shuffle", 3, torch.arange(5)).shape
    torch.Size([5])
    """
    return keys(seed, [purpose], *parts)[0]


def keys(seed: int | Tensor, purposes: Sequence[str], *parts: int | Tensor) -> Tensor:
    """The keys of several purposes at once, along a new first axis."""
    axes = max(torch.as_tensor(part).dim() for part in (seed, *parts))
    state = _mix(torch.as_tensor(seed) + _GOLDEN)
    numbers = torch.tensor([_purpose(purpose) for purpose in purposes]).reshape(-1, *(1 for _ in range(axes)))
    for part in (numbers, *parts):
        state = _mix(state + (torch.as_tensor(part) + 1) * _GOLDEN)
    return state


def bits(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """`count` random int64 values for each key, along a new last axis; of its stream, those from `start` on."""
    index = torch.arange(start + 1, start + count + 1, device=keys.device)
    return _mix(keys[..., None] + index * _GOLDEN)


def uniform(keys: Tensor, count: int, start: int = 0) -> Tensor:
    """`count` float64 values in [0, 1) for each key; of its stream, those from `start` on."""
    return _logical_shift(bits(keys, count, start), 11).double() * 2.0**-53


def permutation(keys: Tensor, count: int, lengths: Tensor | None = None) -> Tensor:
    """A random order of 0 .. count-1 for each key: the order in which random values sort.

    Where `lengths` are given, of the shape of `keys`, each order is of 0 .. length-1, and the rest of it is padding.
    """
    draws = bits(keys, count)
    if lengths is not None:
        draws = draws.masked_fill(torch.arange(count, device=keys.device) >= lengths[..., None], _LARGEST)
    return draws.argsort(dim=-1, stable=True)


def sample(key: Tensor, population: int, count: int) -> Tensor:
    """`count` of 0 .. population-1, sorted: those that would come first in a permutation, found without sorting all."""
    return bits(key, population).topk(count, largest=False, sorted=False).indices.sort().values


def preserve_torch_generators(device: torch.device) -> AbstractContextManager[None]:
    """Within it torch's own generators may be seeded and asked; afterwards they are as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A numpy generator for work done once, before the first round (partitions, hold-outs)."""
    return np.random.default_rng([seed, _purpose(purpose)])
