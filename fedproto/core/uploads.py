"""The latest upload of every client."""

from __future__ import annotations

import torch
from torch import Tensor

from fedproto.core.tensors import move_index, select_rows
from fedproto.core.types import Tree, Upload

#: All clients' prototypes are saved beside the global ones up to this many values in all.
LARGEST_LOCAL_VALUES = 2**22


class LatestUploads:
    """Keeps every client's latest upload and its round: absent clients may still count with it."""

    def __init__(self, clients: int) -> None:
        self.last_round = torch.zeros(clients, dtype=torch.int64)  # of the upload; 0 = none so far
        self.uploads: Upload | None = None  # with a leading axis over all clients

    def store(self, clients: Tensor, uploads: Upload, round: int) -> None:
        """Replace the uploads of these clients by those of this round."""
        if self.uploads is None:
            self.uploads = Upload(self._make_room(uploads.sums), self._make_room(uploads.weights))
        for stored, new in zip(self.uploads, uploads, strict=True):
            for name, value in new.items():
                stored[name].index_copy_(0, move_index(clients, value.device), value)
        self.last_round[clients] = round

    def _make_room(self, tree: Tree) -> Tree:
        """Return zeros like the tensors of some clients' uploads, with a row for every client."""
        clients = len(self.last_round)
        return {name: value.new_zeros(clients, *value.shape[1:]) for name, value in tree.items()}

    def local_prototypes(self) -> Tree:
        """Return the clients' own prototypes, or nothing if there are none or too many to save.

        `local` (clients, C, d) are the prototypes and `held` (clients, C) their weights; both are
        zero where a client never uploaded a prototype of the class.
        """
        if self.uploads is None:
            return {}
        sums = self.uploads.sums.get("prototypes")
        held = self.uploads.weights.get("weight")
        if sums is None or held is None:
            return {}
        if sums.numel() > LARGEST_LOCAL_VALUES or held.shape != sums.shape[:-1]:
            return {}
        weight = held[..., None]
        return {"local": torch.where(weight > 0, sums / weight, 0), "held": held}

    def recall(self) -> Upload | None:
        """Return the latest uploads of all clients that ever uploaded."""
        has_upload = self.last_round > 0
        if self.uploads is None or has_upload.all():
            return self.uploads
        return select_rows(self.uploads, has_upload.nonzero().flatten())
