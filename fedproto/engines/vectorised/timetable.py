"""Tables of which client uses which sample at which step of a round.

They hold the draws that the reference engine makes for one client after the other, made for many
clients at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.core import dropout, rng
from fedproto.core.batches import Training, count_passes, count_steps
from fedproto.core.class_balance import draw_balanced
from fedproto.core.local_training import algorithm_key
from fedproto.core.tensors import move_index
from fedproto.core.types import Phase, Tree
from fedproto.engines.vectorised.architecture_groups import ArchitectureGroup
from fedproto.engines.vectorised.private_timetable import draw_private_tables

DRAW_PURPOSES = ("shuffle", "augment", "dropout")


class Timetable:
    """Makes the tables for the phases of an algorithm.

    The first axis of every table is over the m clients of a chunk. An order is a client's samples
    as its epochs take them, one epoch after the other, each padded to the longest client's. With
    `local_steps`, a client with few samples has more epochs than others, whose last ones go unused.

    rows      (m, epochs·longest)       the pool's rows in that order
    keep.*    (m, epochs·longest, ...)  what each dropout layer keeps of a sample in that order
    crops     (m, epochs·longest, 3)    where a sample in that order is cropped, if it is
    border    (m, channels)             the colour around an image that is cropped
    at        (m, steps, batch)         the places in that order that a step takes
    mask      (m, steps, batch)         0 where a step takes nothing
    slot      (m, steps, batch)         where a step's embeddings are collected, if they are
    lr, momentum  (m,)
    client    (m, 3)                    its key, its number, and its steps of earlier phases
    class_weights (m, C)                how much a sample of a class counts, if not equally

    Private steps have an order and further tables of their own: see private_timetable.py.
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
        self.shortest_epoch = int(group.per_epoch.min())

    @property
    def unused_slot(self) -> int:
        """The slot for embeddings that are not collected; it comes after all others."""
        return self.longest_epoch * self.training.batch

    def count_steps(self, positions: Tensor, phase: Phase, slow: Tensor) -> Tensor:
        """Return each client's number of steps in a phase: half of them, rounded up, if slow."""
        steps = count_steps(phase, self.training, self.group.per_epoch[positions])
        return torch.where(slow, (steps + 1) // 2, steps)

    def count_most_epochs(self, phase: Phase) -> int:
        """Return the epochs of a phase for the client of the group that has the most."""
        steps = count_steps(phase, self.training, self.shortest_epoch)
        return count_passes(steps, self.shortest_epoch)

    def make_tables(self, round: int, positions: Tensor, slow: Tensor) -> list[Tree]:
        """Return a tree of tables for each phase of a round.

        positions  (m,) the clients' positions in the architecture group
        slow       (m,) whether a client does only half its steps
        """
        if not self.phases:
            return []
        counts = [self.count_steps(positions, phase, slow) for phase in self.phases]
        step_counts = torch.stack(counts)
        per_epoch = self.group.per_epoch[positions]
        trees = []
        steps_so_far = None
        first_epoch = torch.zeros_like(per_epoch)
        for number, phase in enumerate(self.phases):
            if self.training.private is None:
                epochs = first_epoch[:, None] + torch.arange(self.count_most_epochs(phase))
                tree = self._draw_order(round, positions, epochs)
                tree |= self._lay_out_steps(positions, phase, step_counts[number])
            else:
                done = step_counts[:number].sum(0)
                tree = draw_private_tables(
                    self.group, self.training, round, positions, done, step_counts[number]
                )
            steps_before = torch.zeros_like(tree["steps"]) if steps_so_far is None else steps_so_far
            tree["client"] = torch.stack([tree.pop("key"), tree.pop("number"), steps_before], 1)
            steps_so_far = steps_before + tree.pop("steps")
            if self.collecting:
                is_last = number == len(self.phases) - 1
                tree["slot"] = self._assign_slots(
                    positions, tree["mask"], step_counts[number], is_last
                )
            trees.append(tree)
            all_steps = count_steps(phase, self.training, per_epoch)
            first_epoch = first_epoch + count_passes(all_steps, per_epoch)
        return trees

    def describe_idle_clients(self, round: int, positions: Tensor) -> Tree:
        """Return what a tree of tables says of clients that take no step, as without phases."""
        group = self.group
        on_device = move_index(positions, group.device)
        own_key = algorithm_key(group.seed[positions], round, group.number[positions])
        number = group.number_on_device[on_device]
        key = move_index(own_key, group.device)
        return {
            "lr": group.lr[on_device] * self.training.schedule.factor(round),
            "momentum": group.momentum[on_device],
            "client": torch.stack([key, number, torch.zeros_like(number)], 1),
            "mask": group.lr.new_zeros(len(positions), 1, 1),
        }

    def _draw_order(self, round: int, positions: Tensor, epochs: Tensor) -> Tree:
        """Return the samples in the order of the epochs, and what is drawn for each of them.

        epochs  (m, epochs) the numbers of the epochs
        """
        group = self.group
        longest = group.train.rows.shape[1]
        on_device = move_index(positions, group.device)
        keys = rng.keys(
            group.seed[positions, None],
            DRAW_PURPOSES,
            round,
            group.number[positions, None],
            epochs,
        )
        own_key = algorithm_key(group.seed[positions], round, group.number[positions])
        keys = torch.cat([keys, own_key[None, :, None].expand_as(keys[:1])])  # one transfer for all
        shuffle_key, augment_key, dropout_key, own_key = move_index(keys, group.device)
        lengths = group.train.lengths[on_device, None].expand(-1, epochs.shape[1])
        if self.training.sampling == "balanced":
            order = self._draw_balanced(round, positions, epochs, shuffle_key, lengths)
        else:
            order = rng.permutation(shuffle_key, longest, lengths)
        tree = {"rows": group.train.rows[on_device].gather(1, order.flatten(1))}
        if group.border is not None:
            draws = rng.uniform(augment_key, 3 * longest)
            tree["crops"] = draws.reshape(len(positions), -1, 3)
            tree["border"] = group.border[on_device]
        keep = dropout.draw(group.dropped, dropout_key, longest)
        for name, value in keep.items():
            tree[f"keep.{name}"] = value.flatten(1, 2)
        tree["lr"] = group.lr[on_device] * self.training.schedule.factor(round)
        tree["momentum"] = group.momentum[on_device]
        tree["key"] = own_key[:, 0]
        tree["number"] = group.number_on_device[on_device]
        if group.class_weights is not None:
            tree["class_weights"] = group.class_weights[on_device]
        return tree

    def _draw_balanced(
        self, round: int, positions: Tensor, epochs: Tensor, order_keys: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return the places of the epochs' rows, of all of a client's classes equally many."""
        group = self.group
        row_keys = rng.key(
            group.seed[positions, None],
            "balance",
            round,
            group.number[positions, None],
            epochs,
        )
        rows = group.train.rows[move_index(positions, group.device)]
        labels = group.train.y[rows][:, None].expand(-1, epochs.shape[1], -1)
        row_keys = move_index(row_keys, group.device)
        return draw_balanced(row_keys, order_keys, labels, lengths, group.own.shape[1])

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
        epoch_start = step // per_epoch * group.train.rows.shape[1]
        return {
            "at": torch.where(inside, epoch_start[..., None] + place_in_epoch, 0),
            "mask": inside.to(group.lr.dtype),
            "steps": step_counts[:, 0],
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
