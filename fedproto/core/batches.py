"""Which samples a client's steps take: how it trains, how many steps that is, and its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedproto.core import dropout, rng
from fedproto.core.class_balance import (
    balanced_weights,
    count_classes,
    draw_balanced,
    weigh_samples,
)
from fedproto.core.federation import Member
from fedproto.core.optimisers import Optimiser, RateSchedule
from fedproto.core.private_steps import PrivateSteps, sampling_rate
from fedproto.core.types import Algorithm, Batch, Phase, Tree

BORDER_PIXELS = 4  # added on every side of an image before a crop of its own size is cut out

#: Draws that belong to a record's place among the client's, and to a private step.
PRIVATE_PURPOSES = ("private augment", "private dropout")

#: A number of one client, or one per client.
Number = TypeVar("Number", int, Tensor)


@dataclass(frozen=True)
class Training:
    """How every client trains: by an optimiser that starts fresh each round."""

    batch: int
    lr: float
    momentum: float  # of SGD
    epochs: int
    last_batch: Literal["auto", "keep", "drop"]
    seed: int
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: RateSchedule = field(default_factory=RateSchedule)
    class_weights: Literal["none", "balanced"] = "none"
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    #: Batches of every client per round, and per phase without epochs of its own; None: `epochs`.
    local_steps: int | None = None
    #: How steps protect each record; None: they do not, and batches are shuffled epochs.
    private: PrivateSteps | None = None

    def rate(self, round: int) -> float:
        """Return the learning rate of a round; the first is 1."""
        return self.lr * self.schedule.factor(round)


def list_trained_names(module: nn.Module, phase: Phase) -> list[str]:
    """Return the names of the parameters that a phase trains."""
    trainable = [name for name, value in module.named_parameters() if value.requires_grad]
    return [name for name in trainable if phase.trains(name)]


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether one of the module's layers is BatchNorm."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def steps_per_epoch(member: Member, training: Training) -> int:
    """Return the number of batches in an epoch.

    A last, partial batch counts, unless `last_batch` is "drop", or is "auto" and the model has
    BatchNorm: the statistics of a batch of two images, at layers where an image is one pixel, ruin
    a ResNet18 (and those of one image do not exist). A client with less than a full batch keeps
    what it has.
    """
    full_batches, remainder = divmod(len(member.train), training.batch)
    if not remainder:
        return full_batches
    drops_last = training.last_batch == "drop"
    if training.last_batch == "auto":
        drops_last = has_batch_norm(member.module)
    return full_batches if drops_last and full_batches else full_batches + 1


def count_steps(phase: Phase, training: Training, per_epoch: Number) -> Number:
    """Return the steps of a phase for clients that have `per_epoch` steps in an epoch."""
    if training.local_steps is None or phase.epochs:
        return (phase.epochs or training.epochs) * per_epoch
    if isinstance(per_epoch, Tensor):
        return torch.full_like(per_epoch, training.local_steps)
    return training.local_steps


def count_passes(steps: Number, per_epoch: Number) -> Number:
    """Return the epochs that so many steps take; the last one may be partial."""
    return (steps + per_epoch - 1) // per_epoch


def count_round_steps(member: Member, algorithm: Algorithm, training: Training) -> int:
    """Return the number of local steps of a client in a round."""
    per_epoch = steps_per_epoch(member, training)
    steps = 0
    for phase in algorithm.phases:
        if list_trained_names(member.module, phase):
            steps += count_steps(phase, training, per_epoch)
    return steps


def draw_batches(
    member: Member,
    training: Training,
    round: int,
    epochs: range,
    steps_left: int,
) -> Iterator[tuple[Batch, Tree]]:
    """Yield the first `steps_left` batches of some epochs, and what dropout keeps of each.

    Every epoch is shuffled, augmented and dropped out by draws of its own.
    """
    per_epoch = steps_per_epoch(member, training)
    count = len(member.train)
    device = member.train.rows.device

    def key(purpose: str, epoch: int) -> Tensor:
        return rng.key(training.seed, purpose, round, member.id, epoch).to(device)

    labels = member.train.y[member.train.rows]
    for epoch in epochs:
        if training.sampling == "balanced":
            order = _draw_balanced(labels, key("balance", epoch), key("shuffle", epoch))
        else:
            order = rng.permutation(key("shuffle", epoch), count)
        rows = member.train.rows[order]
        x = member.train.x[rows]
        y = member.train.y[rows]
        if member.border is not None:
            draws = rng.uniform(key("augment", epoch), 3 * count).reshape(count, 3)
            x = crop_and_flip(x, member.border, draws)
        keep = dropout.draw(member.dropped, key("dropout", epoch), count)
        weights = None
        if training.class_weights == "balanced":
            weights = _weigh_by_class(labels, x.dtype)[order]
        steps = min(steps_left, per_epoch)
        for step in range(steps):
            start = step * training.batch
            stop = min(start + training.batch, count)
            mask = x.new_ones(stop - start)
            if weights is not None:
                mask = weigh_samples(mask, weights[start:stop])
            batch = Batch(x[start:stop], y[start:stop], mask)
            yield batch, {name: value[start:stop] for name, value in keep.items()}
        steps_left -= steps


def draw_private_batches(
    member: Member, training: Training, round: int, key: int, first: int, steps: int
) -> Iterator[tuple[Batch, Tree]]:
    """Yield the batches of private steps, and what dropout keeps of each.

    A batch holds each record with the same probability; one without any is a record of padding.

    key    of (seed, round, client)
    first  the number of the first of the steps in the round
    """
    assert training.private is not None
    count = len(member.train)
    device = member.train.rows.device
    rate = sampling_rate(training.batch, count)
    taken = training.private.draw_places(rate, count, steps, key, first)
    for step in range(steps):
        places = taken[step].nonzero().flatten()
        is_empty = not len(places)
        if is_empty:
            places = places.new_zeros(1)
        rows = member.train.rows[places.to(device)]
        x = member.train.x[rows]
        numbers = (round, member.id, first + step, places)
        keys = rng.keys(training.seed, PRIVATE_PURPOSES, *numbers).to(device)
        augment_key, dropout_key = keys
        if member.border is not None:
            x = crop_and_flip(x, member.border, rng.uniform(augment_key, 3))
        keep = dropout.draw(member.dropped, dropout_key, 1)
        mask = x.new_full((len(places),), 0.0 if is_empty else 1.0)
        batch = Batch(x, member.train.y[rows], mask)
        yield batch, {name: value[:, 0] for name, value in keep.items()}


def _draw_balanced(labels: Tensor, row_key: Tensor, order_key: Tensor) -> Tensor:
    """Return the places of the rows of an epoch in which all of a client's classes come equally."""
    length = torch.tensor(len(labels), device=labels.device)
    return draw_balanced(row_key, order_key, labels, length, int(labels.max()) + 1)


def _weigh_by_class(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each of a client's samples, by how rare its class is with the client."""
    classes = int(labels.max()) + 1
    counts = count_classes(labels, torch.ones_like(labels, dtype=torch.bool), classes)
    return balanced_weights(counts, dtype)[labels]


def crop_and_flip(x: Tensor, border: Tensor, draws: Tensor) -> Tensor:
    """Return each image with a border, cropped at a random place to its size, and maybe mirrored.

    x       (images, channels, height, width)
    border  one colour, (channels,), or one per image, (images, channels)
    draws   (images, 3) numbers in [0, 1): the place down and right, and below 0.5: mirrored
    """
    height, width = x.shape[-2:]
    border = border[..., None, None]
    padded = F.pad(x - border, (BORDER_PIXELS,) * 4) + border
    places = 2 * BORDER_PIXELS + 1
    down, right = (draws[:, :2] * places).long().unbind(1)
    rows = down[:, None] + torch.arange(height, device=x.device)
    columns = right[:, None] + torch.arange(width, device=x.device)
    columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
    image = torch.arange(len(x), device=x.device)
    channels_last = padded.permute(0, 2, 3, 1)
    cropped = channels_last[image[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)
