"""What the server believes: every reply is checked before it can reach a sum.

A reply is checked alone by `check_reply`; `outliers.py` compares it with those of other members.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedproto.core.class_names import is_plain
from fedproto.core.client_names import MAX_NAME_CHARACTERS as MAX_SITE_CHARACTERS
from fedproto.core.client_names import is_chosen_name
from fedproto.core.codec import group_parts
from fedproto.core.tensors import align_axes
from fedproto.core.types import Group, GroupLayout, Upload
from fedproto.deploy.messages import Message
from fedproto.deploy.settings import ServerSettings
from fedproto.errors import Refused, shown

MAX_NAME_CHARACTERS = 200
#: Names of arrays in the messages of `core.codec`.
WEIGHT = "extra.weight"
ROWS = "extra.rows"


@dataclass(frozen=True)
class GroupArrays:
    """The arrays of the message of one group of an upload."""

    shapes: dict[str, tuple[int, ...]]  # by name; unless `per` is client, the shape of one row
    types: dict[str, np.dtype]
    per: Literal["client", "class", "cluster"]

    def count_bytes(self) -> int:
        """Return the bytes of the arrays; unless `per` is client, of one row of each."""
        sizes = [math.prod(self.shapes[name]) * self.types[name].itemsize for name in self.shapes]
        return sum(sizes)


#: The arrays of an upload's messages, by group.
UploadLayout = dict[str, GroupArrays]


@dataclass(frozen=True)
class ExpectedReply:
    """What a reply of this round must look like."""

    round: int
    members: Collection[str]  # sampled, and without an accepted reply
    classes: Collection[str]
    layout: UploadLayout
    limits: ServerSettings
    uniform: bool = False  # every member counts once, however many samples it has

    @property
    def by_class(self) -> bool:
        """Whether a reply has rows of classes."""
        return any(group.per == "class" for group in self.layout.values())


def check_reply(member: str, reply: Message, expected: ExpectedReply) -> None:
    """Raise Refused, with the reason, unless the reply has the expected form.

    Its values are checked by `check_upload`, once what travelled is decoded.
    """
    _check_sender(member, reply, expected)
    check_site(reply)
    size = sum(value.nbytes for value in reply.arrays.values())
    if size > expected.limits.max_bytes:
        raise Refused(f"it has {size} bytes; at most {expected.limits.max_bytes} are accepted")
    rows = 0
    if expected.by_class:
        _check_class_names(reply, expected)
        rows = len(reply.header["spoken"])
    groups = reply.groups()
    unexpected = sorted(groups.keys() ^ expected.layout.keys())
    if unexpected:
        name = _quote(unexpected[0] or min(groups[""]))  # an array of no group by its own name
        raise Refused(f"its arrays are not those of this algorithm: {name} is missing or unknown")
    for name, arrays in groups.items():
        _check_arrays(name, arrays, expected.layout[name], rows)


def _check_sender(member: str, reply: Message, expected: ExpectedReply) -> None:
    stated_member = reply.header.get("member")
    if stated_member != member:
        raise Refused(f"it claims to be from {_quote(stated_member)}, but {member} sent it")
    stated_round = reply.header.get("round")
    if stated_round != expected.round:
        raise Refused(f"it is of round {_quote(stated_round)}, but this is round {expected.round}")
    if member not in expected.members:
        raise Refused(
            "unexpected reply: the sender was not sampled this round or has already replied"
        )


def check_site(reply: Message) -> None:
    """Refuse a reply whose `site`, which people call its sender by, is not a short line of text."""
    site = reply.header.get("site", "")
    if site != "" and not is_chosen_name(site):
        raise Refused(
            f"it is of the site {_quote(site)}, which has more than {MAX_SITE_CHARACTERS} "
            "characters or is not plain text"
        )


def _check_class_names(reply: Message, expected: ExpectedReply) -> None:
    """Refuse a reply whose `spoken` are not usable names of classes that are accepted."""
    names = reply.header.get("spoken")
    if not isinstance(names, list) or not names:
        raise Refused("it does not name its classes")
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise Refused("it does not name its classes")
    max_classes = expected.limits.max_classes
    if len(names) > max_classes:
        raise Refused(f"it has {len(names)} classes; at most {max_classes} are accepted")
    if len(set(names)) < len(names):
        raise Refused("it names a class twice")
    for name in names:
        if len(name) > MAX_NAME_CHARACTERS or not is_plain(name):
            raise Refused(
                f"it names the class {_quote(name)}, which has more than {MAX_NAME_CHARACTERS} "
                "characters or is not plain text"
            )
    if expected.limits.new_classes:
        return
    for name in names:
        if name not in expected.classes:
            raise Refused(
                f"it has the class {_quote(name)}, which is not a class of this federation, "
                "and new classes are not accepted"
            )


def check_new_classes(
    spoken: list[str],
    known: Sequence[Collection[str]],
    brought: Collection[str],
    limits: ServerSettings,
) -> list[str]:
    """Return the classes of a reply that the federation does not have yet.

    `known` are those it has and those that accepted replies bring, in collections that share none;
    `brought` are those that the sender brought in earlier rounds. Raises Refused if there would be
    too many.
    """
    new = [name for name in spoken if not any(name in names for names in known)]
    if not new:
        return []
    brought_in_all = len({*brought, *new})
    if brought_in_all > limits.max_new_classes:
        raise Refused(
            f"with it, the sender would have brought {brought_in_all} classes; "
            f"at most {limits.max_new_classes} are accepted"
        )
    classes_in_all = sum(map(len, known)) + len(new)
    if classes_in_all > limits.max_classes:
        raise Refused(
            f"with it, the federation would have {classes_in_all} classes; "
            f"at most {limits.max_classes} are accepted"
        )
    return new


def _check_arrays(
    group: str, arrays: dict[str, np.ndarray], layout: GroupArrays, rows: int
) -> None:
    """Refuse arrays with other names, shapes or types, or with values that are not finite.

    rows  how many classes the reply speaks of
    """
    unexpected = sorted(arrays.keys() ^ layout.shapes.keys())
    if unexpected:
        name = _quote(unexpected[0])
        raise Refused(f"its arrays are not those of this algorithm: {name} is missing or unknown")
    if layout.per == "cluster":
        rows = len(arrays[ROWS]) if arrays[ROWS].ndim else 0
    for name, value in arrays.items():
        shape = layout.shapes[name]
        if layout.per != "client":
            shape = (rows, *shape)
        kind = layout.types[name]
        if value.shape != shape or value.dtype != kind:
            raise Refused(
                f"{name} is {value.dtype} of shape {value.shape} instead of {kind} of shape {shape}"
            )
        if name == ROWS:
            _check_row_numbers(value)
        if not np.isfinite(value).all():
            raise Refused(f"{name} has a value that is not a finite number")


def _check_row_numbers(rows: np.ndarray) -> None:
    distinct = set(rows.tolist())
    if len(distinct) < len(rows) or rows.min(initial=0) < 0:
        raise Refused("it names a row twice, or a row below 0")


def check_upload(upload: Upload, expected: ExpectedReply) -> None:
    """Raise Refused unless the weights and values of a decoded upload are within the limits."""
    for group in upload.values():
        _check_weights(group, expected)
        _check_values(group, expected)


def _check_weights(group: Group, expected: ExpectedReply) -> None:
    """Refuse weights out of bounds, and counts other than 1 where every member counts once."""
    max_count = expected.limits.max_count
    weight = group.weight.double()
    if not ((weight > 0) & (weight <= max_count)).all():
        raise Refused(f"it has a weight that is not above 0 and at most {max_count:g}")
    if expected.uniform and not (weight == 1).all():
        raise Refused(f"{WEIGHT} is not 1, although every member counts once")
    for name, value in group.counts.items():
        if not (value == 1).all():
            raise Refused(f"extra.{name} is not 1, although every member counts once")


def _check_values(group: Group, expected: ExpectedReply) -> None:
    """Refuse values that are not finite, or too large once they are divided by their weight."""
    max_norm = expected.limits.max_norm
    for name, value in group.sums.items():
        if not value.numel():
            continue
        mean = value.double() / align_axes(group.weight.double(), value)
        rows = (
            mean.flatten(group.weight.dim())
            if value.dim() > group.weight.dim()
            else mean[..., None]
        )
        largest = float(rows.square().mean(-1).sqrt().max())
        if not largest <= max_norm:
            raise Refused(
                f"value.{name} has a root mean square of {largest:.3g}; "
                f"at most {max_norm:g} is accepted"
            )


def describe_upload(upload: Upload, layouts: Mapping[str, GroupLayout]) -> UploadLayout:
    """Return what the messages of such an upload look like."""
    described = {}
    for group_name, group in upload.items():
        per = layouts[group_name].per
        shapes = {}
        types = {}
        for name, value in group_parts(group).items():
            shapes[name] = tuple(value.shape if per == "client" else value.shape[1:])
            types[name] = value.numpy().dtype
        described[group_name] = GroupArrays(shapes, types, per)
    return described


def _quote(value: object) -> str:
    return shown(value, 60)
