"""What adds the uploads of a round where the server must not see single ones.

The round loop hands all uploads of a round to the algorithm's `summation`, if it has one, and the
server goes on with their sum. privacy/secure_sum has the one there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedproto.core.tensors import map_group, pad_rows
from fedproto.errors import TrainingError

if TYPE_CHECKING:
    from fedproto.core.types import Group, GroupLayout, Upload
    from fedproto.core.uploads import LatestUploads


class Summation(Protocol):
    """Adds uploads."""

    @property
    def name(self) -> str:
        """What it is called in a sentence."""

    def count_needed(self, members: int) -> int:
        """Return how many of the sampled clients' uploads must arrive."""

    def check(self, members: int, arriving: int) -> None:
        """Raise ConfigError if the uploads of so many sampled clients could not be added."""

    def add(self, uploads: Upload, members: int) -> Upload:
        """Return the sum of uploads, with a leading axis of 1; TrainingError if that fails.

        uploads  with a leading axis over those that arrived, of `members` sampled clients
        """

    def count_traffic(
        self, layouts: Mapping[str, GroupLayout], members: int, lost: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what each sampled client sends and receives, (members, 2) each.

        The columns are values and bytes. What is received is beside what the algorithm sends.

        layouts  of the groups that are added
        lost     the places of those whose upload does not arrive
        """


def add_round(
    summation: Summation,
    speakers: Tensor,
    uploads: Upload,
    members: int,
    once: LatestUploads,
    once_groups: tuple[str, ...],
    round: int,
) -> tuple[Upload, list[str]]:
    """Return the sum of a round's uploads, without groups that are sent once, and what was added.

    The sum of those is kept in `once`, as if the first of the speakers had sent all of it. They are
    added only where enough clients send them at a time: the sum over a few latecomers would tell
    the server about each of them. Until then latecomers are left out.

    uploads  with a leading axis over the speakers
    members  clients that were sampled
    """
    is_due = once.last_round[speakers] == 0
    sent_once = [name for name in once_groups if name in uploads]
    if sent_once and int(is_due.sum()) < summation.count_needed(members):
        uploads = {name: group for name, group in uploads.items() if name not in sent_once}
        sent_once = []
    for name in sent_once:
        uploads = uploads | {name: _mask_rows(uploads, name, is_due)}
    if not uploads:
        return {}, []
    try:
        total = summation.add(uploads, members)
    except TrainingError as error:
        raise TrainingError(f"round {round}: {error}") from error
    if sent_once:
        due_speakers = speakers[is_due]
        kept = {name: spread_sum(total[name], len(due_speakers)) for name in sent_once}
        once.store(due_speakers, kept, round)
    rest = {name: group for name, group in total.items() if name not in sent_once}
    return rest, list(total)


def _mask_rows(uploads: Upload, name: str, is_kept: Tensor) -> Group:
    """Return a group with zeros in the rows of clients that are not kept."""

    def mask(value: Tensor) -> Tensor:
        kept = is_kept.to(value.device).reshape(-1, *[1] * (value.dim() - 1))
        return torch.where(kept, value, 0)

    return map_group(uploads[name], mask)


def spread_sum(group: Group, rows: int) -> Group:
    """Return a sum as a group of several clients: all of it is the first one's."""
    return map_group(group, lambda value: pad_rows(value, rows))
