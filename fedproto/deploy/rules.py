"""Whom and what the server believes: every answer is checked before it can reach a sum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedproto.deploy.parcels import Header, Parcel
from fedproto.errors import Refused, shown
from fedproto.types import Upload
from fedproto.vocabulary import is_plain

WORD = 200  # letters of a name at most
WAYS = ("head", "head_own", "prototype", "prototype_own")


@dataclass(frozen=True)
class Limits:
    """What the server accepts of one answer."""

    bytes: int = 64 * 2**20
    classes: int = 1000  # that one member may speak of, and that members may make of the federation's
    count: float = 1e7  # weight of a class, or of a member
    norm: float = 1e4  # of one prototype, or of one tensor of weights, by root mean square
    new_classes: bool = False


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


def check(member: str, parcel: Parcel, expected: Expected) -> None:
    """Refuse with the reason."""
    _check_sender(member, parcel, expected)
    size = sum(value.nbytes for value in parcel.arrays.values())
    if size > expected.limits.bytes:
        raise Refused(f"it has {size} bytes, and {expected.limits.bytes} are accepted")
    rows = _check_names(parcel, expected) if expected.by_class else None
    _check_arrays(parcel, expected, rows)
    _check_amounts(parcel, expected)


def _check_sender(member: str, parcel: Parcel, expected: Expected) -> None:
    if parcel.header.get("member") != member:
        raise Refused(f"it says it is of {_word(parcel.header.get('member'))}, but {member} sent it")
    if parcel.header.get("round") != expected.round:
        raise Refused(f"it is of round {_word(parcel.header.get('round'))}, and this is round {expected.round}")
    if member not in expected.members:
        raise Refused("it was not asked for: its sender is no member of this round, or has answered already")


def _check_names(parcel: Parcel, expected: Expected) -> int:
    """The number of classes it speaks of."""
    names = parcel.header.get("spoken")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise Refused("it does not name the classes it speaks of")
    if len(names) > expected.limits.classes:
        raise Refused(f"it speaks of {len(names)} classes, and {expected.limits.classes} are accepted")
    if len(set(names)) < len(names) or any(len(name) > WORD or not is_plain(name) for name in names):
        raise Refused(f"it names a class twice, or with more than {WORD} letters, or in letters that are not plain")
    new = [name for name in names if name not in expected.classes]
    if new and len(new) + len(expected.classes) > expected.limits.classes:
        raise Refused(f"with it the federation would have more than {expected.limits.classes} classes")
    if new and not expected.limits.new_classes:
        raise Refused(
            f"it speaks of {_word(new[0])}, which is no class of this federation, and new ones are not accepted"
        )
    return len(names)


def _check_arrays(parcel: Parcel, expected: Expected, rows: int | None) -> None:
    if set(parcel.arrays) != set(expected.shapes):
        odd = sorted(set(parcel.arrays) ^ set(expected.shapes))[0]
        raise Refused(f"its arrays are not those of this method: {_word(odd)} is missing or too many")
    for name, value in parcel.arrays.items():
        wanted = expected.shapes[name] if rows is None else (rows, *expected.shapes[name])
        if value.shape != wanted or value.dtype != np.float32:
            raise Refused(f"{name} is {value.dtype} of shape {value.shape}, and float32 of shape {wanted} is wanted")
        if not np.isfinite(value).all():
            raise Refused(f"{name} holds a value that is not a finite number")


def _check_amounts(parcel: Parcel, expected: Expected) -> None:
    """Weights within bounds, and values, which are sums over weights, too."""
    weight = parcel.arrays["weights.weight"].astype(np.float64)
    if not ((weight > 0) & (weight <= expected.limits.count)).all():
        raise Refused(f"it has a weight that is not above 0 and at most {expected.limits.count:g}")
    for name, value in parcel.arrays.items():
        ones = name.startswith("weights.") and (expected.once or name != "weights.weight")
        if ones and not (value == 1).all():
            raise Refused(f"{name} is not 1, by which every member counts once")
    for name, value in parcel.arrays.items():
        if name.startswith("sums.") and value.size:
            mean = value.astype(np.float64) / weight.reshape(weight.shape + (1,) * (value.ndim - weight.ndim))
            axes = tuple(range(weight.ndim, value.ndim))
            with np.errstate(over="ignore"):
                largest = float(np.sqrt((mean**2).mean(axes)).max())
            if not largest <= expected.limits.norm:
                raise Refused(
                    f"{name} has a root mean square of {largest:.3g}, and {expected.limits.norm:g} is accepted"
                )


def shapes_of(upload: Upload) -> tuple[dict[str, tuple[int, ...]], bool]:
    """What a member's answer looks like: each array's shape, without the classes' axis where there is one."""
    by_class = upload.weights["weight"].dim() > 0
    shapes: dict[str, tuple[int, ...]] = {}
    for group, tree in zip(Upload._fields, upload, strict=True):
        shapes |= {
            f"{group}.{name}": tuple(value.shape[1:] if by_class else value.shape) for name, value in tree.items()
        }
    return shapes, by_class


def accuracies(header: Header) -> dict[str, float]:
    """Those a member tells of: a share each, by the names that we know."""
    told = {way: header.get(f"accuracy.{way}") for way in WAYS}
    return {way: float(v) for way, v in told.items() if isinstance(v, (int, float)) and 0 <= v <= 1}


def _word(value: object) -> str:
    return shown(value, 60)
