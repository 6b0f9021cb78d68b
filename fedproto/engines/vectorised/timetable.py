"""Which client uses which sample at which step: the draws of the reference engine, for many clients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.core import dropout, rng
from fedproto.core.local_training import Training
from fedproto.core.tensors import move_index
from fedproto.core.types import Phase, Tree
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup

PURPOSES = ("shuffle", "augment", "dropout")


class Timetable:
    """Tables for the phases of an algorithm. Their first axis is over the m clients of a chunk.

    rows    (m, epochs·longest) rows of the pool, in the order in which the epochs take them
    at      (m, steps, batch)   the places in that order which a step takes; mask is 0 where there is nothing to take
    keep.*  (m, epochs·longest, ...)  what dropout keeps of each sample; crops: where it is cut out
    slot    (m, steps, batch)   where the embeddings of a step are collected, if they are (`collecting`)
    """

    def __init__(
        self,
        group: ArchitectureGroup,
        phases: Sequence[Phase],
        training: Training,
        collecting: bool,
    ) -> None:
        self.group, self.phases, self.training, self.collecting = (
            group,
            phases,
            training,
            collecting,
        )
        self.longest_epoch = int(group.per_epoch.max())

    @property
    def places(self) -> int:
        """For how many embeddings there is room; one place more is for those that are not collected."""
        return self.longest_epoch * self.training.batch

    def epochs(self, phase: Phase) -> int:
        return phase.epochs or self.training.epochs

    def steps(self, who: Tensor, phase: Phase, slow: Tensor) -> Tensor:
        """How many steps each of the clients does in a phase: half of them, rounded up, if slow."""
        steps = self.epochs(phase) * self.group.per_epoch[who]
        return torch.where(slow, (steps + 1) // 2, steps)

    def tables(self, round: int, who: Tensor, slow: Tensor) -> list[Tree]:
        """A tree of tables for each phase."""
        first = itertools.accumulate(map(self.epochs, self.phases), initial=0)
        counts = torch.stack([self.steps(who, phase, slow) for phase in self.phases])
        trees = []
        for number, (phase, epoch) in enumerate(zip(self.phases, first, strict=False)):
            tree = self._order(round, who, range(epoch, epoch + self.epochs(phase)))
            tree |= self._steps_of(who, self.epochs(phase), counts[number])
            if self.collecting:
                tree["slot"] = self._slots(who, tree["mask"], counts[:number].sum(0), counts.sum(0))
            trees.append(tree)
        return trees

    def _order(self, round: int, who: Tensor, epochs: range) -> Tree:
        """The samples in the order of the epochs, and what is drawn for each of them."""
        group, device = self.group, self.group.device
        longest, here = group.train.rows.shape[1], move_index(who, device)
        seed, client = group.seed[who, None], group.number[who, None]
        shuffle, augment, drop = move_index(
            rng.keys(seed, PURPOSES, round, client, torch.tensor(epochs)), device
        )
        order = rng.permutation(
            shuffle, longest, group.train.lengths[here, None].expand(-1, len(epochs))
        )
        tree = {"rows": group.train.rows[here].gather(1, order.flatten(1))}
        if group.border is not None:
            tree["crops"] = rng.uniform(augment, 3 * longest).reshape(len(who), -1, 3)
            tree["border"] = group.border[here]
        keep = dropout.draw(group.dropped, drop, longest)
        tree |= {f"keep.{name}": value.flatten(1, 2) for name, value in keep.items()}
        return tree | {"lr": group.lr[here], "momentum": group.momentum[here]}

    def _steps_of(self, who: Tensor, epochs: int, todo: Tensor) -> Tree:
        """Each step's places in that order, for the steps there are to do."""
        group, device, batch = self.group, self.group.device, self.training.batch
        per_epoch, todo = (
            move_index(numbers, device)[:, None] for numbers in (group.per_epoch[who], todo)
        )
        step = torch.arange(epochs * self.longest_epoch, device=device)
        place = (step % per_epoch * batch)[..., None] + torch.arange(batch, device=device)
        lengths = group.train.lengths[move_index(who, device), None, None]
        inside = (place < lengths) & (step < todo)[..., None]
        start = step // per_epoch * group.train.rows.shape[1]
        return {
            "at": torch.where(inside, start[..., None] + place, 0),
            "mask": inside.to(group.lr.dtype),
        }

    def _slots(self, who: Tensor, mask: Tensor, before: Tensor, done: Tensor) -> Tensor:
        """Where the last epoch's embeddings go, counted over all phases; all others to one place behind."""
        device, batch = self.group.device, self.training.batch
        numbers = (self.group.per_epoch[who], before, done)
        per_epoch, before, done = (move_index(each, device)[:, None] for each in numbers)
        since = (
            before
            + torch.arange(mask.shape[1], device=device)
            - (done - 1) // per_epoch * per_epoch
        )
        slot = since[..., None] * batch + torch.arange(batch, device=device)
        return torch.where((mask > 0) & (slot >= 0), slot, self.places)

    def labels(self, tables: Tree) -> Tree:
        """Labels and mask of what the steps collected, at the same places."""
        if "slot" not in tables:
            return {}
        slot, rows = tables["slot"].flatten(1), tables["rows"].gather(1, tables["at"].flatten(1))
        labels, taken = (
            slot.new_zeros(len(slot), self.places + 1),
            tables["mask"].new_zeros(len(slot), self.places + 1),
        )
        return {
            "labels": labels.scatter(1, slot, self.group.train.y[rows]),
            "taken": taken.scatter(1, slot, tables["mask"].flatten(1)),
        }
