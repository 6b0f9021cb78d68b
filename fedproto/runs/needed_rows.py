"""Which rows of shared pools of inputs a federation needs, so that only they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedproto.core.federation import Examples, Member


class NeededRows:
    """The rows that members need of each pool of inputs.

    Of a pool that members train with, they are the rows that somebody has, which may be few of
    many. Of a pool of test rows they are all, since a finished run shows a client classes that it
    does not have.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._masks: dict[int, Tensor] = {}  # by the identity of the pool
        for member in members:
            self._add(member.train, member.train.rows)
            self._add(member.test, slice(None))
            if member.validation is not None:
                self._add(member.validation, member.validation.rows)

    def _add(self, examples: Examples, rows: Tensor | slice) -> None:
        pool = examples.x
        if id(pool) not in self._masks:
            self._masks[id(pool)] = torch.zeros(len(pool), dtype=torch.bool, device=pool.device)
        self._masks[id(pool)][rows] = True

    def compute(self, function: Callable[[Tensor], Tensor], pool: Tensor) -> Tensor:
        """Return the values of a function of the needed rows of a pool, and 0 for the others."""
        needed = self._masks[id(pool)]
        computed = function(pool[needed])
        values = computed.new_zeros(len(pool), *computed.shape[1:])
        values[needed] = computed
        return values
