"""What asynchronous rounds do with uploads that are late: weigh them down, and take their changes.

An upload that started τ versions of the server ago counts (1 + τ)^(-staleness) times. Where its
values are a new version of what the client had received (a model), the server applies their change
to what it would send now: value − received at the start + received now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from fedproto.core.tensors import align_axes, find_received_values, map_upload
from fedproto.core.types import Group, GroupLayout, State, Upload


def weigh_staleness(staleness: Tensor, exponent: float) -> Tensor:
    """Return how much each upload counts, given how many versions ago it started.

    >>> weigh_staleness(torch.tensor([0, 3]), 0.5)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return (1.0 + staleness.double()) ** -exponent


def scale_uploads(uploads: Upload, factors: Tensor) -> Upload:
    """Return uploads whose sums, weights and counts are multiplied by one factor per speaker."""

    def scale(value: Tensor) -> Tensor:
        return value * align_axes(factors.to(value), value)

    return map_upload(uploads, scale)


def age_uploads(uploads: Upload, factors: Tensor, once: Collection[str]) -> Upload:
    """Return uploads scaled by `scale_uploads`, but for the groups that are sent once."""
    ageing = {name: group for name, group in uploads.items() if name not in once}
    return uploads | scale_uploads(ageing, factors)


def take_changes(uploads: Upload, received: State, layouts: Mapping[str, GroupLayout]) -> Upload:
    """Return uploads whose relative groups hold the changes of what their senders had received.

    uploads   of one client, or with a leading axis over the speakers
    received  what each of them had received, with the same leading axis
    """
    return _shift(uploads, received, layouts, -1)


def apply_changes(uploads: Upload, received: State, layouts: Mapping[str, GroupLayout]) -> Upload:
    """Return the uploads of `take_changes` as if their senders had started from other values.

    received  what each of them would receive now, with a leading axis over the speakers
    """
    return _shift(uploads, received, layouts, 1)


def _shift(
    uploads: Upload, received: State, layouts: Mapping[str, GroupLayout], sign: int
) -> Upload:
    """Return uploads with weight × received added to the sums of relative groups, or subtracted."""
    shifted = {}
    for group_name, group in uploads.items():
        if not layouts[group_name].relative:
            shifted[group_name] = group
            continue
        base = find_received_values(received, group_name, layouts[group_name])
        sums = {}
        for name, value in group.sums.items():
            sums[name] = value + sign * align_axes(group.weight, value) * base[name]
        shifted[group_name] = Group(sums, group.weight, group.counts)
    return shifted
