"""What each client sends and receives, in values and bytes."""

from __future__ import annotations

import torch
from torch import Tensor


class Ledger:
    """What each client really sent and received: numbers of values, and bytes of the messages that carry them."""

    COLUMNS = ("values_up", "bytes_up", "values_down", "bytes_down")

    def __init__(self, clients: int) -> None:
        self.counts = torch.zeros(clients, len(self.COLUMNS), dtype=torch.int64)

    def up(self, clients: Tensor, sizes: Tensor) -> None:
        self.counts[clients, :2] += sizes

    def down(self, clients: Tensor, sizes: Tensor) -> None:
        self.counts[clients, 2:] += sizes

    def of(self, client: int) -> dict[str, int]:
        return dict(zip(self.COLUMNS, self.counts[client].tolist(), strict=True))

    def total(self) -> dict[str, int]:
        return dict(zip(self.COLUMNS, self.counts.sum(0).tolist(), strict=True))
