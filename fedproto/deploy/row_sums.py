"""Sums over very many members of rows that only some of them have.

What a sum costs depends on the rows that there are, not on the rows that there could be.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Members whose rows are added one after the other before their sum is added to that of others.
FAN_IN = 16
_LEVELS = 4


def add_rows(parts: Iterable[tuple[Tensor, Tensor]], total_like: Tensor) -> Tensor:
    """Return the sum of everybody's rows, zero where nobody has one.

    The rows of 16 members are added one after the other, then 16 such sums, and so on, up to the
    fourth level, which has no end: the error of rounding hardly grows with the number of members.
    torch adds dense tensors of up to some 500,000 members in the same order, but for the last few
    columns, whose number depends on the processor.

    parts       of each member, the different places of its rows, and the rows themselves
    total_like  a tensor of the shape and type of the sum
    """
    levels = [torch.zeros_like(total_like) for _ in range(_LEVELS)]
    touched: list[list[Tensor]] = [[] for _ in range(_LEVELS)]
    for count, (places, rows) in enumerate(parts, start=1):
        levels[0].index_add_(0, places, rows)
        touched[0].append(places)
        level = 0
        while level + 1 < _LEVELS and count % FAN_IN ** (level + 1) == 0:
            moved = torch.cat(touched[level]).unique()
            levels[level + 1].index_add_(0, moved, levels[level][moved])
            levels[level].index_fill_(0, moved, 0)
            touched[level].clear()
            touched[level + 1].append(moved)
            level += 1
    total = levels[0]
    for level_sum in levels[1:]:
        total = total + level_sum
    return total
