"""Tables of which client uses which sample at which step of a round.

They hold the draws that the reference engine makes for one client after the other, made for many
clients at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.core import dropout, rng
from fedproto.core.class_balance import draw_balanced
from fedproto.core.local_training import Training, algorithm_key, count_passes, count_steps
from fedproto.core.tensors import move_index
from fedproto.core.types import Phase, Tree
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup

DRAW_PURPOSES = ("shuffle", "augment", "dropout")


class Timetable:
    """Makes the tables for the phases of an algorithm.

    The first axis of every table is over the m clients of a chunk. An order is a client's samples
    as its epochs take them, one epoch after the other, and padding at the end. With `local_steps`,
    a client with few samples has more epochs than others.

    rows      (m, width)                the pool's rows in that order
    keep.*    (m, width, ...)           what each dropout layer keeps of a sample in that order
    crops     (m, width, 3)             where a sample in that order is cropped, if it is
    border    (m, channels)             the colour around an image that is cropped
    at        (m, steps, batch)         the places in that order that a step takes
    mask      (m, steps, batch)         0 where a step takes nothing
    slot      (m, steps, batch)         where a step's embeddings are collected, if they are
    lr, momentum  (m,)
    key, number, steps_before  (m,)     of the client and the round; steps of earlier phases
    class_weights (m, C)                how much a sample of a class counts, if not equally
    """

    def __init__(
        self,
        group: ArchitectureGroup,
        phases: Sequence[Phase],
        training: Training,
        collecting: bool,
    ) -> None:
        self.group = group
        self.phases = phases
        self.training = training
        self.collecting = collecting  # whether embeddings are collected while training
        self.longest_epoch = int(group.per_epoch.max())  # in steps
        self.lengths = group.train.lengths.cpu()

    @property
    def unused_slot(self) -> int:
        """The slot for embeddings that are not collected; it comes after all others."""
        return self.longest_epoch * self.training.batch

    def count_steps(self, positions: Tensor, phase: Phase, slow: Tensor) -> Tensor:
        """Return each client's number of steps in a phase: half of them, rounded up, if slow."""
        steps = count_steps(phase, self.training, self.group.per_epoch[positions])
        return torch.where(slow, (steps + 1) // 2, steps)

    def count_epochs(self, phase: Phase) -> Tensor:
        """Return the number of epochs of a phase for every client of the group."""
        per_epoch = self.group.per_epoch
        return count_passes(count_steps(phase, self.training, per_epoch), per_epoch)

    def make_tables(self, round: int, positions: Tensor, slow: Tensor) -> list[Tree]:
        """Return a tree of tables for each phase of a round.

        positions  (m,) the clients' positions in the architecture group
        slow       (m,) whether a client does only half its steps
        """
        counts = [self.count_steps(positions, phase, slow) for phase in self.phases]
        step_counts = torch.stack(counts)
        per_epoch = self.group.per_epoch[positions]
        trees = []
        first_epoch = torch.zeros_like(per_epoch)
        for number, phase in enumerate(self.phases):
            tree = self._describe_clients(round, positions)
            tree |= self._draw_order(round, positions, phase, first_epoch)
            tree |= self._lay_out_steps(positions, phase, step_counts[number])
            steps_before = step_counts[:number].sum(0)
            tree["steps_before"] = move_index(steps_before, self.group.device)
            if self.collecting:
                is_last = number == len(self.phases) - 1
                tree["slot"] = self._assign_slots(
                    positions, tree["mask"], step_counts[number], is_last
                )
            trees.append(tree)
            first_epoch = first_epoch + self.count_epochs(phase)[positions]
        return trees

    def _draw_order(self, round: int, positions: Tensor, phase: Phase, first_epoch: Tensor) -> Tree:
        """Return the samples in the order of a phase's epochs, and what is drawn for each of them.

        first_epoch  (m,) the numbers of the clients' first epochs
        """
        epochs_of_all = self.count_epochs(phase)
        if int(epochs_of_all.max()) == 1:
            return self._draw_epoch(round, positions, first_epoch, self.group.train.rows.shape[1])
        device = self.group.device
        epochs = epochs_of_all[positions]
        lengths = self.lengths[positions]
        width = int((epochs_of_all * self.lengths).max())
        tree: Tree = {}
        for epoch in range(int(epochs.max())):
            longest = int(self.lengths[epochs_of_all > epoch].max())
            chosen = (epochs > epoch).nonzero().flatten()
            drawn = self._draw_epoch(round, positions[chosen], first_epoch[chosen] + epoch, longest)
            place = torch.arange(longest)
            own_lengths = lengths[chosen, None]
            target = torch.where(place < own_lengths, epoch * own_lengths + place, width)
            clients = move_index(chosen, device)[:, None]
            target = move_index(target, device)
            for name, value in drawn.items():
                if name not in tree:  # with one more place, for padding
                    tree[name] = value.new_zeros(len(positions), width + 1, *value.shape[2:])
                tree[name][clients, target] = value
        return {name: value[:, :width] for name, value in tree.items()}

    def _draw_epoch(self, round: int, positions: Tensor, epoch: Tensor, longest: int) -> Tree:
        """Return clients' samples in the order of an epoch, and what is drawn for each of them.

        epoch    (m,) the numbers of the epochs
        longest  the length of the tables; the clients have at most so many samples
        """
        group = self.group
        on_device = move_index(positions, group.device)
        seeds = group.seed[positions]
        numbers = group.number[positions]
        keys = rng.keys(seeds, DRAW_PURPOSES, round, numbers, epoch)
        shuffle_key, augment_key, dropout_key = move_index(keys, group.device)
        lengths = group.train.lengths[on_device]
        rows = group.train.rows[on_device, :longest]
        if self.training.sampling == "balanced":
            row_key = rng.key(seeds, "balance", round, numbers, epoch)
            order = draw_balanced(
                move_index(row_key, group.device),
                shuffle_key,
                group.train.y[rows],
                lengths,
                group.own.shape[1],
            )
        else:
            order = rng.permutation(shuffle_key, longest, lengths)
        tree = {"rows": rows.gather(1, order)}
        if group.border is not None:
            draws = rng.uniform(augment_key, 3 * longest)
            tree["crops"] = draws.reshape(len(positions), -1, 3)
        keep = dropout.draw(group.dropped, dropout_key, longest)
        for name, value in keep.items():
            tree[f"keep.{name}"] = value
        return tree

    def _describe_clients(self, round: int, positions: Tensor) -> Tree:
        """Return the tables of the clients that are not about samples."""
        group = self.group
        on_device = move_index(positions, group.device)
        tree = {"lr": group.lr[on_device] * self.training.schedule.factor(round)}
        tree["momentum"] = group.momentum[on_device]
        if group.border is not None:
            tree["border"] = group.border[on_device]
        numbers = group.number[positions]
        key = algorithm_key(group.seed[positions], round, numbers)
        tree["key"] = move_index(key, group.device)
        tree["number"] = move_index(numbers, group.device)
        if group.class_weights is not None:
            tree["class_weights"] = group.class_weights[on_device]
        return tree

    def _lay_out_steps(self, positions: Tensor, phase: Phase, step_counts: Tensor) -> Tree:
        """Return the places in the order that each step takes, and where it takes one at all."""
        group = self.group
        device = group.device
        batch = self.training.batch
        per_epoch = move_index(group.per_epoch[positions], device)[:, None]
        step_counts = move_index(step_counts, device)[:, None]
        most_steps = count_steps(phase, self.training, self.longest_epoch)
        step = torch.arange(most_steps, device=device)
        place_in_batch = torch.arange(batch, device=device)
        place_in_epoch = (step % per_epoch * batch)[..., None] + place_in_batch
        lengths = group.train.lengths[move_index(positions, device), None, None]
        inside = (place_in_epoch < lengths) & (step < step_counts)[..., None]
        epoch_start = (step // per_epoch)[..., None] * lengths
        return {
            "at": torch.where(inside, epoch_start + place_in_epoch, 0),
            "mask": inside.to(group.lr.dtype),
        }

    def _assign_slots(
        self, positions: Tensor, mask: Tensor, step_counts: Tensor, is_last: bool
    ) -> Tensor:
        """Return the slots of the embeddings of each step of a phase: (m, steps, batch).

        Those of the last epoch of the last phase have slots of their own.

        step_counts  (m,) the clients' steps in the phase
        """
        device = self.group.device
        batch = self.training.batch
        per_epoch = move_index(self.group.per_epoch[positions], device)[:, None]
        step_counts = move_index(step_counts, device)[:, None]
        last_epoch_start = (step_counts - 1) // per_epoch * per_epoch
        step = torch.arange(mask.shape[1], device=device)
        step_of_last_epoch = step - last_epoch_start
        place_in_batch = torch.arange(batch, device=device)
        slot = step_of_last_epoch[..., None] * batch + place_in_batch
        is_collected = (mask > 0) & (slot >= 0) & is_last
        return torch.where(is_collected, slot, self.unused_slot)

    def collect_labels(self, tables: Tree) -> Tree:
        """Return the labels and the mask of the embeddings that a phase collects, by slot.

        The tree is empty if nothing is collected.
        """
        if "slot" not in tables:
            return {}
        slot = tables["slot"].flatten(1)
        rows = tables["rows"].gather(1, tables["at"].flatten(1))
        mask = tables["mask"].flatten(1)
        labels = slot.new_zeros(len(slot), self.unused_slot + 1)
        taken = mask.new_zeros(len(slot), self.unused_slot + 1)
        return {
            "labels": labels.scatter(1, slot, self.group.train.y[rows]),
            "taken": taken.scatter(1, slot, mask),
        }
