"""What a user should know about the data of a federation before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedproto.core.class_names import list_names
from fedproto.core.federation import Federation
from fedproto.data import Source

MAX_LISTED_CLASSES = 3  # in a sentence


def describe_single_rows(sources: Sequence[Source]) -> list[str]:
    """Return a notice on the classes with one training row in all sources, if there are any."""
    counts: Counter[str] = Counter()
    for source in dict.fromkeys(sources):
        rows_by_class = np.bincount(source.train.y, minlength=len(source.classes)).tolist()
        counts.update(dict(zip(source.classes, rows_by_class, strict=True)))
    names = [name for name, rows in counts.items() if rows == 1]
    if not names:
        return []
    if len(names) > 1:
        return [f"{len(names)} classes have a single training row each: {_list_classes(names)}"]
    return [f"class {names[0]!r} has a single training row"]


def describe_lonely_classes(federation: Federation) -> list[str]:
    """Return a notice on the classes that one of several clients alone has, if there are any."""
    if len(federation.members) < 2:
        return []
    holders = federation.own_classes.sum(0)
    lonely = (holders == 1).nonzero().flatten().tolist()
    names = [federation.classes[label] for label in lonely]
    if not names:
        return []
    if len(names) > 1:
        listed = _list_classes(names)
        return [
            f"{len(names)} classes have training rows with one client alone ({listed}): "
            "the prototype of each is that client's alone"
        ]
    (holder,) = federation.own_classes[:, lonely[0]].nonzero().flatten().tolist()
    client = federation.members[holder].name
    return [
        f"class {names[0]!r} has training rows with client {client} alone, so its prototype is "
        "that client's alone"
    ]


def _list_classes(names: Sequence[str]) -> str:
    return list_names([repr(name) for name in names], MAX_LISTED_CLASSES)
