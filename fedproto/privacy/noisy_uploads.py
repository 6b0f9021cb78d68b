"""What noise makes of an upload: of one client's, or of the sum of many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedproto.core.closed_form import GRAM, NOISE
from fedproto.core.tensors import align_axes
from fedproto.core.types import Group, Upload
from fedproto.privacy.noise import Grid, add_noise

#: The noise of the groups of an upload: by group, then by the tensors of a part.
Grids = Mapping[str, Mapping[tuple[str, ...], Grid]]
#: A class with fewer rows than this, noise included, is left out whatever the threshold is.
FEWEST_ROWS = 1.0


@dataclass(frozen=True)
class Protection:
    """How an upload is made private; see docs/privacy.md.

    unit       what is protected
    noise      standard deviation / sensitivity of every release; 0: no noise
    clip       the norm that embeddings (records) or values (clients) are clipped to; None: they
               are not, and there must be no noise
    at         who adds the noise
    threshold  a class counts if its noisy count is at least so many standard deviations of it
    seeded     whether the noise can be repeated, so that nothing is private
    sampling   the probability with which each client is in a round, independently of the others
               and in secret; None: cohorts are known, and sampling protects nobody
    shape      whether noise has one size for all coordinates of an embedding; see shaped_noise.py
    rounding   by how much each value of an upload may be rounded on its way to the sum
    """

    unit: Literal["record", "client"]
    noise: float
    clip: float | None
    at: Literal["client", "server"] = "client"
    threshold: float = 2.0
    seeded: bool = False
    sampling: float | None = None
    rounding: float = 0.0
    shape: Literal["equal", "variance"] = "equal"


def add_to_upload(upload: Upload, grids: Grids, key: Tensor, seeded: bool) -> Upload:
    """Return an upload with noise on all its parts, in float64.

    It may have a leading axis of 1 over a sum of clients. The weight of a group without noise for
    it must not depend on anybody's data.
    """
    noisy = {}
    for name, group in upload.items():
        sums = dict(group.sums)
        weight = group.weight
        for tensors, grid in grids[name].items():
            for tensor in tensors:
                sums[tensor] = add_noise(sums[tensor], grid, key, f"{name}/{tensor}", seeded)
            if not tensors:
                weight = add_noise(weight, grid, key, name, seeded)
        noisy[name] = Group(sums, weight)
    return noisy


def leave_out_rare(
    upload: Upload, grids: Grids, protection: Protection, releases: int = 1
) -> Upload:
    """Return a noisy upload in which a class with too small a noisy count has no weight.

    A server keeps the old value of such a class. `releases` is the number of noisy sums that the
    upload is the sum of.
    """
    kept = dict(upload)
    for name, group in upload.items():
        count_grid = grids[name].get(())
        if count_grid is None:
            continue
        least = protection.threshold * count_grid.deviation * math.sqrt(releases)
        if protection.unit == "record":
            least = max(least, FEWEST_ROWS)
        is_kept = (group.weight >= least) & (group.weight > 0)
        sums = {}
        for tensor, value in group.sums.items():
            sums[tensor] = torch.where(align_axes(is_kept, value), value, 0)
        kept[name] = Group(sums, torch.where(is_kept, group.weight, 0))
    return kept


def tell_noise(upload: Upload, grids: Grids, releases: int) -> Upload:
    """Return a noisy upload that tells a teacher how large the noise in its Gram matrix is.

    The eigenvalues of a symmetric matrix of noise of deviation σ reach about σ √D. `releases` is
    the number of noisy sums that the upload is the sum of; it has a leading axis over clients, or
    of 1.
    """
    if GRAM not in upload:
        return upload
    (grid,) = grids[GRAM].values()
    group = upload[GRAM]
    packed = group.sums["gram"]
    size = int(math.sqrt(2 * packed.shape[-1]))  # of size (size + 1) / 2 values
    largest = grid.deviation * math.sqrt(releases * size)
    noise = torch.full((len(packed),), largest / len(packed), dtype=torch.float64)
    return upload | {GRAM: group._replace(counts={NOISE: noise})}


def as_dtype(upload: Upload, dtype: torch.dtype) -> Upload:
    """Return an upload whose tensors have another type of numbers."""
    changed = {}
    for name, group in upload.items():
        sums = {tensor: value.to(dtype) for tensor, value in group.sums.items()}
        changed[name] = Group(sums, group.weight.to(dtype))
    return changed
