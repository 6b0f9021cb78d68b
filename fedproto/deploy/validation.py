"""What the server believes: every reply is checked before it can reach a sum.

A reply is checked alone by `check_reply`; `outliers.py` compares it with those of other members.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedproto.core.class_names import is_plain
from fedproto.core.client_names import MAX_NAME_CHARACTERS as MAX_SITE_CHARACTERS
from fedproto.core.client_names import is_chosen_name
from fedproto.core.codec import upload_parts
from fedproto.core.types import Upload
from fedproto.deploy.messages import Message
from fedproto.deploy.settings import ServerSettings
from fedproto.errors import Refused, shown

MAX_NAME_CHARACTERS = 200
#: Names of arrays in the messages of `core.codec`.
WEIGHT = "extra.weight"
ROWS = "extra.rows"


@dataclass(frozen=True)
class UploadLayout:
    """The arrays of an upload's message."""

    shapes: dict[str, tuple[int, ...]]  # by name; with `by_class`, the shape of one class's row
    by_class: bool  # whether there is one weight per class, rather than one per member


@dataclass(frozen=True)
class ExpectedReply:
    """What a reply of this round must look like."""

    round: int
    members: frozenset[str]  # sampled, and without an accepted reply
    classes: tuple[str, ...]
    layout: UploadLayout
    limits: ServerSettings
    uniform: bool = False  # every member counts once, however many samples it has


def check_reply(member: str, reply: Message, expected: ExpectedReply) -> None:
    """Raise Refused, with the reason, unless the reply can be believed."""
    _check_sender(member, reply, expected)
    _check_site(reply)
    size = sum(value.nbytes for value in reply.arrays.values())
    if size > expected.limits.max_bytes:
        raise Refused(f"it has {size} bytes; at most {expected.limits.max_bytes} are accepted")
    rows = None
    if expected.layout.by_class:
        _check_class_names(reply, expected)
        rows = len(reply.header["spoken"])
    _check_arrays(reply, expected.layout, rows)
    _check_weights(reply, expected)
    _check_values(reply, expected)


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


def _check_site(reply: Message) -> None:
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
    spoken: list[str], known: set[str], brought: set[str], limits: ServerSettings
) -> list[str]:
    """Return the classes of a reply that the federation does not have yet.

    `known` are those it has, and `brought` those that the sender brought in earlier rounds. Raises
    Refused if there would be too many.
    """
    new = [name for name in spoken if name not in known]
    if not new:
        return []
    brought_in_all = len(brought.union(new))
    if brought_in_all > limits.max_new_classes:
        raise Refused(
            f"with it, the sender would have brought {brought_in_all} classes; "
            f"at most {limits.max_new_classes} are accepted"
        )
    classes_in_all = len(known) + len(new)
    if classes_in_all > limits.max_classes:
        raise Refused(
            f"with it, the federation would have {classes_in_all} classes; "
            f"at most {limits.max_classes} are accepted"
        )
    return new


def _check_arrays(reply: Message, layout: UploadLayout, rows: int | None) -> None:
    """Refuse arrays with other names, shapes or types, or with values that are not finite."""
    unexpected = sorted(reply.arrays.keys() ^ layout.shapes.keys())
    if unexpected:
        name = _quote(unexpected[0])
        raise Refused(f"its arrays are not those of this algorithm: {name} is missing or unknown")
    for name, value in reply.arrays.items():
        shape = layout.shapes[name]
        if rows is not None:
            shape = (rows, *shape)
        kind = np.int32 if name == ROWS else np.float32
        if value.shape != shape or value.dtype != kind:
            raise Refused(
                f"{name} is {value.dtype} of shape {value.shape} instead of "
                f"{kind.__name__} of shape {shape}"
            )
        if name == ROWS:
            _check_row_numbers(value)
        if not np.isfinite(value).all():
            raise Refused(f"{name} has a value that is not a finite number")


def _check_row_numbers(rows: np.ndarray) -> None:
    distinct = set(rows.tolist())
    if len(distinct) < len(rows) or rows.min(initial=0) < 0:
        raise Refused("it names a row twice, or a row below 0")


def _check_weights(reply: Message, expected: ExpectedReply) -> None:
    """Refuse weights out of bounds, and counts other than 1 where every member counts once."""
    max_count = expected.limits.max_count
    weight = reply.arrays[WEIGHT]
    accepted = (weight > 0) & (weight.astype(np.float64) <= max_count)
    if not accepted.all():
        raise Refused(f"it has a weight that is not above 0 and at most {max_count:g}")
    for name, value in reply.arrays.items():
        is_count = name.startswith("extra.") and name not in (ROWS, WEIGHT)
        counts_once = is_count or (name == WEIGHT and expected.uniform)
        if counts_once and not (value == 1).all():
            raise Refused(f"{name} is not 1, although every member counts once")


def _check_values(reply: Message, expected: ExpectedReply) -> None:
    """Refuse values that are too large once they are divided by their weight."""
    weight = reply.arrays[WEIGHT].astype(np.float64)
    max_norm = expected.limits.max_norm
    for name, value in reply.arrays.items():
        if not name.startswith("value.") or not value.size:
            continue
        missing_axes = value.ndim - weight.ndim
        divisor = weight.reshape(weight.shape + (1,) * missing_axes)
        mean = value.astype(np.float64) / divisor
        axes = tuple(range(weight.ndim, value.ndim))
        with np.errstate(over="ignore"):
            root_mean_squares = np.sqrt((mean**2).mean(axes))
        largest = float(root_mean_squares.max())
        if not largest <= max_norm:
            raise Refused(
                f"{name} has a root mean square of {largest:.3g}; at most {max_norm:g} is accepted"
            )


def describe_upload(upload: Upload) -> UploadLayout:
    """Return what the message of such an upload looks like."""
    by_class = upload.weights["weight"].dim() > 0
    shapes = {}
    for name, value in upload_parts(upload).items():
        shapes[name] = tuple(value.shape[1:] if by_class else value.shape)
    return UploadLayout(shapes, by_class)


def _quote(value: object) -> str:
    return shown(value, 60)
