"""Rows of word ids, which the models of texts take."""

from __future__ import annotations

import torch
from torch import Tensor

#: Ids with a meaning of their own; the most frequent words follow.
PADDING_ID = 0
UNKNOWN_ID = 1
RESERVED_IDS = 2


def read_word_ids(x: Tensor, count: int) -> Tensor:
    """Return inputs, which come as floats, as ids below `count`; others are unknown words."""
    ids = x.long()  # exact: float32 counts to 2^24
    is_known = (ids >= 0) & (ids < count)
    return torch.where(is_known, ids, UNKNOWN_ID)
