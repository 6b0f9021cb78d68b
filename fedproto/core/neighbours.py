"""The nearest of many vectors, by L2 distance."""

from __future__ import annotations

import torch
from torch import Tensor

#: Distances that are held at a time: 32 MB.
MAX_DISTANCES = 1 << 22


def find_nearest(points: Tensor, among: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return which of some vectors are nearest to each of n points, and how far: (n, k) each.

    The nearest comes first, and of equally near ones that with the smaller number. k is `count`,
    or the number of vectors (m, d) `among` which is sought if there are fewer.
    """
    count = min(count, len(among))
    others = among.double()
    points_at_a_time = max(1, MAX_DISTANCES // max(1, len(among)))
    numbers = [torch.zeros(0, count, dtype=torch.long)]
    distances = [torch.zeros(0, count, dtype=torch.float64)]
    for part in points.double().split(points_at_a_time):
        # Without products of matrices, whose rounding errors would part equal vectors.
        gaps = torch.cdist(part, others, compute_mode="donot_use_mm_for_euclid_dist")
        ordered = gaps.sort(dim=1, stable=True)
        numbers.append(ordered.indices[:, :count].cpu())
        distances.append(ordered.values[:, :count].cpu())
    return torch.cat(numbers), torch.cat(distances)
