"""Whom and what the server believes: every answer is checked before it can reach a sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from fedproto.algorithms import trainable
from fedproto.core.class_names import is_plain
from fedproto.core.codec import upload_parts
from fedproto.core.metrics import ACCURACIES
from fedproto.core.types import Upload
from fedproto.deploy.messages import Header, Message
from fedproto.errors import Refused, shown

WORD = 200  # letters of a name at most
WEIGHT, ROWS = "extra.weight", "extra.rows"  # as in the messages of `wire`
WITNESSES = 2  # others at least by whom somebody is judged: a median of one is that one's word


@dataclass(frozen=True)
class Limits:
    """What the server accepts of one answer."""

    bytes: int = 64 * 2**20
    classes: int = 1000  # of the federation, and so of one answer
    classes_of_one: int = 100  # that one member may bring, in all rounds together
    count: float = 1e7  # weight of a class, or of a member
    norm: float = 1e4  # of one prototype, or of one tensor of weights, by root mean square
    new_classes: bool = False
    norm_ratio: float = 5.0  # of a class's mean to the median of the other members'
    count_ratio: float = 100.0  # likewise


@dataclass(frozen=True)
class Expected:
    """What an answer of this round must look like."""

    round: int
    members: frozenset[str]  # who was asked and has not answered
    classes: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]  # of each array: of one class where `by_class`, else whole
    by_class: bool
    limits: Limits
    once: bool = False  # every member counts once, whatever it has


def check(member: str, parcel: Message, expected: Expected) -> None:
    """Refuse with the reason."""
    _check_sender(member, parcel, expected)
    size = sum(value.nbytes for value in parcel.arrays.values())
    if size > expected.limits.bytes:
        raise Refused(f"it has {size} bytes, and {expected.limits.bytes} are accepted")
    rows = _check_names(parcel, expected) if expected.by_class else None
    _check_arrays(parcel, expected, rows)
    _check_amounts(parcel, expected)


def _check_sender(member: str, parcel: Message, expected: Expected) -> None:
    if parcel.header.get("member") != member:
        raise Refused(
            f"it says it is of {_word(parcel.header.get('member'))}, but {member} sent it"
        )
    if parcel.header.get("round") != expected.round:
        raise Refused(
            f"it is of round {_word(parcel.header.get('round'))}, and this is round {expected.round}"
        )
    if member not in expected.members:
        raise Refused(
            "it was not asked for: its sender is no member of this round, or has answered already"
        )


def _check_names(parcel: Message, expected: Expected) -> int:
    """The number of classes it speaks of."""
    names = parcel.header.get("spoken")
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
    ):
        raise Refused("it does not name the classes it speaks of")
    if len(names) > expected.limits.classes:
        raise Refused(
            f"it speaks of {len(names)} classes, and {expected.limits.classes} are accepted"
        )
    if len(set(names)) < len(names) or any(
        len(name) > WORD or not is_plain(name) for name in names
    ):
        raise Refused(
            f"it names a class twice, or with more than {WORD} letters, or in letters that are not plain"
        )
    new = [name for name in names if name not in expected.classes]
    if new and not expected.limits.new_classes:
        raise Refused(
            f"it speaks of {_word(new[0])}, which is no class of this federation, and new ones are not accepted"
        )
    return len(names)


def check_new_classes(
    spoken: list[str], known: set[str], brought: set[str], limits: Limits
) -> list[str]:
    """The classes that an answer would bring to those `known`, or refuse them with the reason.

    `brought` are those that its member has brought already, in other rounds.
    """
    new = [name for name in spoken if name not in known]
    in_all = len(brought.union(new))
    if new and in_all > limits.classes_of_one:
        raise Refused(
            f"with it its sender would have brought {in_all} classes, and {limits.classes_of_one} are accepted"
        )
    if new and len(known) + len(new) > limits.classes:
        raise Refused(
            f"with it the federation would have {len(known) + len(new)} classes, and {limits.classes} are accepted"
        )
    return new


def _check_arrays(parcel: Message, expected: Expected, rows: int | None) -> None:
    if set(parcel.arrays) != set(expected.shapes):
        odd = sorted(set(parcel.arrays) ^ set(expected.shapes))[0]
        raise Refused(
            f"its arrays are not those of this method: {_word(odd)} is missing or too many"
        )
    for name, value in parcel.arrays.items():
        wanted = expected.shapes[name] if rows is None else (rows, *expected.shapes[name])
        kind = np.int32 if name == ROWS else np.float32
        if value.shape != wanted or value.dtype != kind:
            raise Refused(
                f"{name} is {value.dtype} of shape {value.shape}, and {kind.__name__} of shape {wanted} is wanted"
            )
        if name == ROWS and (len(set(value.tolist())) < len(value) or value.min(initial=0) < 0):
            raise Refused("it names a row twice, or one below 0")
        if not np.isfinite(value).all():
            raise Refused(f"{name} holds a value that is not a finite number")


def _check_amounts(parcel: Message, expected: Expected) -> None:
    """Weights within bounds, and values, which are sums over weights, too."""
    weight = parcel.arrays[WEIGHT].astype(np.float64)
    if not ((weight > 0) & (weight <= expected.limits.count)).all():
        raise Refused(f"it has a weight that is not above 0 and at most {expected.limits.count:g}")
    for name, value in parcel.arrays.items():
        ones = name.startswith("extra.") and name != ROWS and (expected.once or name != WEIGHT)
        if ones and not (value == 1).all():
            raise Refused(f"{name} is not 1, by which every member counts once")
    for name, value in parcel.arrays.items():
        if name.startswith("value.") and value.size:
            mean = value.astype(np.float64) / weight.reshape(
                weight.shape + (1,) * (value.ndim - weight.ndim)
            )
            axes = tuple(range(weight.ndim, value.ndim))
            with np.errstate(over="ignore"):
                largest = float(np.sqrt((mean**2).mean(axes)).max())
            if not largest <= expected.limits.norm:
                raise Refused(
                    f"{name} has a root mean square of {largest:.3g}, and {expected.limits.norm:g} is accepted"
                )


@dataclass(frozen=True)
class Amounts:
    """How large an upload is: by class, or by the empty name where weights travel."""

    norms: dict[str, float]  # root mean square of what is said, without its weight
    counts: dict[str, float]  # the weight by which it is said

    @classmethod
    def of(cls, upload: Upload, spoken: list[str]) -> Amounts:
        weight = upload.weights["weight"].double().reshape(-1)
        values = list(
            trainable(upload.sums).values()
        )  # running statistics are in the units of each member's data
        rows = (
            torch.cat([value.double().reshape(len(weight), -1) for value in values], 1)
            / weight[:, None]
        )
        norms = rows.square().mean(1).sqrt()
        names = spoken or [""]
        return cls(
            dict(zip(names, norms.tolist(), strict=True)),
            dict(zip(names, weight.tolist(), strict=True)),
        )


def find_outliers(
    answers: Mapping[str, Amounts], remembered: Mapping[str, Amounts], limits: Limits
) -> dict[str, str]:
    """Whose answers of a round are too large beside the others', and why; all are judged together.

    The one that is most out of line goes first, and the rest are judged without it, so that it makes nobody else look
    odd. What members said who did not answer this time, `remembered`, is compared with, but not judged.
    """
    present = {**remembered, **answers}
    reasons: dict[str, str] = {}
    while True:
        found = _most_out_of_line(present, answers.keys() - reasons.keys(), limits)
        if found is None:
            return reasons
        name, reasons[name] = found
        del present[name]


def _most_out_of_line(
    present: Mapping[str, Amounts], judged: set[str], limits: Limits
) -> tuple[str, str] | None:
    """Who is further beyond a limit than anybody else, and the sentence about it."""
    norms = _ratios({name: amounts.norms for name, amounts in present.items()}, rare_is_odd=True)
    counts = _ratios({name: amounts.counts for name, amounts in present.items()}, rare_is_odd=False)
    candidates = []
    for ratios, limit, what in (
        (norms, limits.norm_ratio, "norm"),
        (counts, limits.count_ratio, "count"),
    ):
        for name in judged:
            about, ratio = max(ratios[name].items(), key=lambda item: item[1])
            whose = f"of class {_word(about)}" if about else "of its weights"
            rounded = float(f"{ratio:.1g}")  # more digits would tell what the others have
            sentence = (
                f"the {what} {whose} is about {rounded:g} times the median of the other members', "
                f"and {limit:g} times is accepted (max-{what}-ratio)"
            )
            candidates.append((ratio / limit, name, sentence))
    excess, name, sentence = max(candidates, default=(0.0, "", ""))
    return (name, sentence) if excess > 1 else None


def _ratios(
    amounts: Mapping[str, Mapping[str, float]], rare_is_odd: bool
) -> dict[str, dict[str, float]]:
    """Each member's amount of each class over the median of the others'.

    Where too few others speak of a class, its amount is compared with that of their usual class instead. With
    `rare_is_odd` false it always may be: who has many images of a class that is rare elsewhere is no liar.
    """
    usual = _medians_of_others({name: median(mine.values()) for name, mine in amounts.items()})
    classes = {about for mine in amounts.values() for about in mine}
    by_class = {
        about: _medians_of_others(
            {name: mine[about] for name, mine in amounts.items() if about in mine}
        )
        for about in classes
    }
    ratios: dict[str, dict[str, float]] = {name: {} for name in amounts}
    for name, mine in amounts.items():
        for about, amount in mine.items():
            beside = by_class[about].get(name, 0.0)
            if not beside or not rare_is_odd:
                beside = max(beside, usual.get(name, 0.0))
            ratios[name][about] = amount / beside if beside else 0.0  # nobody to compare with
    return ratios


def _medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """For each member the median of the others' values; nothing where there are too few others."""
    others = len(values) - 1
    if others < WITNESSES:
        return {}
    ordered = sorted(values.values())
    medians = {}
    for name, value in values.items():
        own = bisect_left(ordered, value)
        middle = [place if place < own else place + 1 for place in ((others - 1) // 2, others // 2)]
        medians[name] = (ordered[middle[0]] + ordered[middle[1]]) / 2
    return medians


def shapes_of(upload: Upload) -> tuple[dict[str, tuple[int, ...]], bool]:
    """What a member's answer looks like: each array's shape, without the classes' axis where there is one."""
    by_class = upload.weights["weight"].dim() > 0
    parts = upload_parts(upload)
    return {
        name: tuple(value.shape[1:] if by_class else value.shape) for name, value in parts.items()
    }, by_class


def accuracies(header: Header) -> dict[str, float]:
    """Those a member tells of: a share each, by the names that we know."""
    told = {way: header.get(f"accuracy.{way}") for way in ACCURACIES}
    return {way: float(v) for way, v in told.items() if isinstance(v, (int, float)) and 0 <= v <= 1}


def _word(value: object) -> str:
    return shown(value, 60)
