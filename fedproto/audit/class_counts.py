"""Which classes a client has, and how many training inputs of each: read from its upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.audit.attacked_run import AttackedRun
from fedproto.audit.threats import ThreatModel
from fedproto.core.tensors import divide_by_weight, split_group_name
from fedproto.core.types import Group, State, Upload
from fedproto.errors import DoesNotApply

THREAT = ThreatModel(
    "server",
    "every single upload as the algorithm has it, and nothing else",
    "each client's classes and its number of images of each",
)
#: Where there is no count per class, this parameter tells which classes were trained on.
HEAD_BIAS = "bias"


@dataclass(frozen=True)
class CountsRead:
    """What the server reads, beside the truth; all are (clients, C)."""

    true_counts: Tensor
    has_class: Tensor  # bool, what the server believes
    read_counts: Tensor | None  # None: no upload says how many
    how: str

    @property
    def right_classes(self) -> float:
        """The fraction of pairs of client and class that are right."""
        return float((self.has_class == (self.true_counts > 0)).double().mean())

    @property
    def exact_clients(self) -> float:
        """The fraction of clients whose whole list of classes is right."""
        right = self.has_class == (self.true_counts > 0)
        return float(right.all(1).double().mean())

    @property
    def guessing(self) -> float:
        """What `right_classes` is for a server that says the more frequent answer everywhere."""
        held = float((self.true_counts > 0).double().mean())
        return max(held, 1 - held)

    @property
    def count_error(self) -> float | None:
        """The mean absolute error of the counts, over pairs of client and class."""
        if self.read_counts is None:
            return None
        return float((self.read_counts - self.true_counts).abs().double().mean())


def read_counts(uploads: Upload, true_counts: Tensor) -> CountsRead:
    """Return what single uploads with one weight per class say.

    The weight of a class is its number of images (or 1, if all count alike); 0 is absence. Where
    noise was added, so that nothing is 0, half an image is the threshold.
    """
    group = _find_class_group(uploads)
    weight = group.weight.cpu().double()
    is_number = bool((weight.max() > 1) or not torch.equal(weight, weight.round()))
    counts = weight if is_number else None
    how = "the weight of each class in the upload"
    threshold = 0.0 if (weight == 0).any() else 0.5
    return CountsRead(true_counts.cpu(), weight > threshold, counts, how)


def read_head(
    uploads: Upload, server: State, names: Sequence[str], true_counts: Tensor
) -> CountsRead:
    """Return what the change of a head's bias says: it rises for the classes trained on.

    names  the biases with one value per class that travel; the last one is the head's
    """
    group = next(group for name, group in uploads.items() if split_group_name(name)[0] == "model")
    values = divide_by_weight(group)[names[-1]]
    received = server[names[-1]] if names[-1] in server else server["model"][names[-1]]
    change = (values - received).cpu().double()
    how = f"the sign of the change of {names[-1]}"
    return CountsRead(true_counts.cpu(), change > 0, None, how)


def guess_from_sum(true_counts: Tensor) -> CountsRead:
    """Return what a server says that sees only sums: the more frequent answer for everybody."""
    held = (true_counts > 0).double().mean()
    guess = torch.full(true_counts.shape, bool(held > 0.5))
    return CountsRead(true_counts.cpu(), guess, None, "nothing: the server sees only sums")


def attack(run: AttackedRun, uploads: Upload) -> CountsRead:
    """Return what the uploads of one more round tell; DoesNotApply if they tell nothing."""
    if run.hides_uploads:
        return guess_from_sum(run.counts())
    if any(group.weight.dim() == 2 for group in uploads.values()):
        return read_counts(uploads, run.counts())
    classes = len(run.federation.classes)
    biases = []
    for group in uploads.values():
        for name, value in group.sums.items():
            if name.endswith(HEAD_BIAS) and tuple(value.shape[1:]) == (classes,):
                biases.append(name)
    if not biases:
        raise DoesNotApply("no upload has a value per class")
    return read_head(uploads, run.experiment.progress.server, biases, run.counts())


def _find_class_group(uploads: Upload) -> Group:
    """Return the group with one weight per class."""
    return next(group for group in uploads.values() if group.weight.dim() == 2)
