"""Replies that are too large beside those of the other members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from fedproto.algorithms import trainable
from fedproto.core.tensors import split_group_name
from fedproto.core.types import Upload
from fedproto.deploy.settings import ServerSettings
from fedproto.errors import shown

#: The fewest other members a member is compared with: the median of one would be that one's word.
MIN_OTHER_MEMBERS = 2


@dataclass(frozen=True)
class Amounts:
    """How large an upload is, by class; by what `_name_weights` returns where weights travel."""

    norms: dict[str, float]  # root mean square of the values, without their weight
    counts: dict[str, float]  # the weight

    @classmethod
    def measure(cls, upload: Upload, spoken: list[str]) -> Amounts:
        """Return the amounts of an upload whose rows are those of the `spoken` classes.

        Running statistics are left out: they are in the units of each member's data.
        """
        norms: dict[str, float] = {}
        counts: dict[str, float] = {}
        for group_name, group in upload.items():
            weight = group.weight.double().reshape(-1)
            values = trainable(group.sums).values()
            flat = [value.double().reshape(len(weight), -1) for value in values]
            means = torch.cat(flat, 1) / weight[:, None]
            root_mean_squares = means.square().mean(1).sqrt()
            names = spoken if group.weight.dim() else [_name_weights(group_name)]
            sizes = zip(names, root_mean_squares.tolist(), weight.tolist(), strict=True)
            for name, norm, count in sizes:
                norms[name] = max(norms.get(name, 0.0), norm)
                counts[name] = max(counts.get(name, 0.0), count)
        return cls(norms, counts)


def _name_weights(group: str) -> str:
    """Return what stands for a class where weights travel: no class has such a name.

    Weights of different architectures are not compared.
    """
    architecture = split_group_name(group)[1]
    return f"\0{architecture}" if architecture else ""


def find_outliers(
    replies: Mapping[str, Amounts], remembered: Mapping[str, Amounts], limits: ServerSettings
) -> dict[str, str]:
    """Return which replies of a round are too large beside the others, and why.

    The one furthest beyond a limit goes first, and the rest are compared without it, so that it
    does not make others look wrong. `remembered` are earlier uploads of members that did not reply
    this time: replies are compared with them, but they are not judged.
    """
    compared = {**remembered, **replies}
    names = list(compared)
    norms = _AmountsOfAll([each.norms for each in compared.values()], rare_is_suspicious=True)
    counts = _AmountsOfAll([each.counts for each in compared.values()], rare_is_suspicious=False)
    limited = (("norm", norms, limits.max_norm_ratio), ("count", counts, limits.max_count_ratio))
    is_compared = np.ones(len(names), bool)
    is_judged = np.array([name in replies for name in names], bool)
    reasons: dict[str, str] = {}
    while is_judged.any():
        furthest: list[tuple[float, str, str]] = []
        for kind, amounts, limit in limited:
            ratios = amounts.compare(is_compared)
            excesses = np.where(is_judged[amounts.members], ratios / limit, 0.0)
            largest = float(excesses.max())
            for member in np.unique(amounts.members[excesses == largest]).tolist():
                label, ratio = amounts.find_largest(member, ratios)
                furthest.append((largest, names[member], _describe(kind, label, ratio, limit)))
        excess, name, reason = max(furthest)
        if excess <= 1:
            break
        reasons[name] = reason
        member = names.index(name)
        is_compared[member] = False
        is_judged[member] = False
    return reasons


def _describe(kind: str, label: str, ratio: float, limit: float) -> str:
    """Return the sentence about a reply whose amount of a class is too large."""
    is_class = label and not label.startswith("\0")
    subject = f"of class {shown(label, 60)}" if is_class else "of its weights"
    rounded = float(f"{ratio:.1g}")  # more digits would tell what the others have
    return (
        f"the {kind} {subject} is about {rounded:g} times the median of the other "
        f"members'; at most {limit:g} times is accepted (max-{kind}-ratio)"
    )


class _AmountsOfAll:
    """All members' amounts of one kind, one after the other: an entry per member and class.

    values, members  the amount of an entry, and the place of its member
    labels           the class of an entry, or what stands for it
    """

    def __init__(self, amounts: Sequence[Mapping[str, float]], rare_is_suspicious: bool) -> None:
        sizes = [len(own) for own in amounts]
        self.rare_is_suspicious = rare_is_suspicious
        self.ends = np.cumsum(sizes)
        self.members = np.repeat(np.arange(len(amounts)), sizes)
        self.labels = [label for own in amounts for label in own]
        self.values = np.array([value for own in amounts for value in own.values()])
        numbers = {label: number for number, label in enumerate(dict.fromkeys(self.labels))}
        self.groups = np.array([numbers[label] for label in self.labels], int)
        self.order = np.lexsort((self.values, self.groups))
        self.typical = np.array([median(own.values()) for own in amounts])
        self.typical_order = np.argsort(self.typical)

    def compare(self, is_compared: np.ndarray) -> np.ndarray:
        """Return each entry, divided by the median of the other members' amounts of its class.

        Where too few others hold a class, it is compared with their typical class instead. Unless
        `rare_is_suspicious`, the larger of the two counts: a member may have many samples of a
        class that is rare elsewhere. The ratio is 0 where there is nothing to compare with, and of
        members that are not compared.
        """
        everybody = np.zeros(len(is_compared), int)
        typical_of_others = _find_medians_of_others(
            self.typical, everybody, self.typical_order, is_compared
        )[self.members]
        counts = is_compared[self.members]
        medians = _find_medians_of_others(self.values, self.groups, self.order, counts)
        reference = np.maximum(medians, typical_of_others)
        if self.rare_is_suspicious:
            reference = np.where(medians > 0, medians, typical_of_others)
        has_reference = counts & (reference > 0)
        ratios = np.zeros(len(self.values))
        with np.errstate(over="ignore"):
            np.divide(self.values, reference, out=ratios, where=has_reference)
        return ratios

    def find_largest(self, member: int, ratios: np.ndarray) -> tuple[str, float]:
        """Return the class of a member's largest ratio, and this ratio."""
        end = self.ends[member]
        first = self.ends[member - 1] if member else 0
        largest = first + int(ratios[first:end].argmax())
        return self.labels[largest], float(ratios[largest])


def _find_medians_of_others(
    values: np.ndarray, groups: np.ndarray, order: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Return for each value that counts the median of the others of its group that count.

    It is 0 where there are too few others, and for values that do not count.

    order  sorts the values by group, and those of a group by size
    """
    kept = order[counts[order]]
    ordered = values[kept]
    sizes_of_groups = np.bincount(groups[kept])
    sizes_of_groups = sizes_of_groups[sizes_of_groups > 0]
    sizes = np.repeat(sizes_of_groups, sizes_of_groups)
    firsts = np.repeat(np.cumsum(sizes_of_groups) - sizes_of_groups, sizes_of_groups)
    own_places = np.arange(len(kept)) - firsts
    others = sizes - 1
    is_enough = others >= MIN_OTHER_MEMBERS
    lower = _skip_places((others - 1) // 2, own_places)
    upper = _skip_places(others // 2, own_places)
    both = ordered[firsts + np.where(is_enough, lower, 0)]
    both = both + ordered[firsts + np.where(is_enough, upper, 0)]
    medians = np.zeros(len(values))
    medians[kept] = np.where(is_enough, both / 2, 0.0)
    return medians


def _skip_places(places: np.ndarray, skipped: np.ndarray) -> np.ndarray:
    """Return where values at `places` stand in lists that have one more value, at `skipped`."""
    return places + (places >= skipped)
