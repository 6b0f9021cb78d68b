"""What each client sends and receives, in values and bytes."""

from __future__ import annotations

import torch
from torch import Tensor


class Ledger:
    """Counts what each client sent and received: values, and bytes of the messages that carry them.

    Sizes are given as (clients, 2): values and bytes.
    """

    COLUMNS = ("values_up", "bytes_up", "values_down", "bytes_down")

    def __init__(self, clients: int) -> None:
        self.counts = torch.zeros(clients, len(self.COLUMNS), dtype=torch.int64)

    def up(self, clients: Tensor, sizes: Tensor) -> None:
        """Add what these clients sent."""
        self.counts[clients, :2] += sizes

    def down(self, clients: Tensor, sizes: Tensor) -> None:
        """Add what these clients received."""
        self.counts[clients, 2:] += sizes

    def of(self, client: int) -> dict[str, int]:
        """Return one client's counts by the name of their column."""
        return dict(zip(self.COLUMNS, self.counts[client].tolist(), strict=True))

    def total(self) -> dict[str, int]:
        """Return the counts of all clients together by the name of their column."""
        return dict(zip(self.COLUMNS, self.counts.sum(0).tolist(), strict=True))
