"""The latest upload of every client."""

from __future__ import annotations

import torch
from torch import Tensor

from fedproto.core.tensors import moved, rows_of
from fedproto.core.types import Tree, Upload

#: Values of all clients' prototypes together that are still written beside the global ones.
LARGEST_LOCAL = 2**22


class Memory:
    """The last upload of every client and the round it came in, for algorithms in which the absent still count."""

    def __init__(self, clients: int) -> None:
        self.last = torch.zeros(clients, dtype=torch.int64)  # round of the last upload, 0 = never
        self.uploads: Upload | None = None

    def store(self, clients: Tensor, uploads: Upload, round: int) -> None:
        if self.uploads is None:
            rows = len(self.last)
            sums, weights = ({n: v.new_zeros(rows, *v.shape[1:]) for n, v in tree.items()} for tree in uploads)
            self.uploads = Upload(sums, weights)
        for kept, new in zip(self.uploads, uploads, strict=True):
            for name, value in new.items():
                kept[name].index_copy_(0, moved(clients, value.device), value)
        self.last[clients] = round

    def local_prototypes(self) -> Tree:
        """`local` (clients, C, d) and `held` (clients, C), its weights: zeros where a client never spoke of a class."""
        if self.uploads is None or "prototypes" not in self.uploads.sums or "weight" not in self.uploads.weights:
            return {}
        sums, held = self.uploads.sums["prototypes"], self.uploads.weights["weight"]
        if sums.numel() > LARGEST_LOCAL or held.shape != sums.shape[:-1]:
            return {}
        return {"local": torch.where(held[..., None] > 0, sums / held[..., None], 0), "held": held}

    def recall(self) -> Upload | None:
        """The last uploads of all who ever spoke."""
        spoke = self.last > 0
        if self.uploads is None or spoke.all():
            return self.uploads
        return rows_of(self.uploads, spoke.nonzero().flatten())
