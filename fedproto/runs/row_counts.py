"""How many rows of its data a federation uses, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedproto.core.federation import Federation
from fedproto.data import Source
from fedproto.partitions import ClientRows

#: What the parts of a data set are called in a sentence, in order.
PARTS = {"train": "training", "validation": "validation", "test": "test"}


def count_rows(sources: Sequence[Source], rows: Sequence[ClientRows]) -> dict[str, dict[str, int]]:
    """Return for each part of the data how many rows are `used` and how many are `there`.

    `sources` and `rows` have one entry per client. A row that several clients have counts once.
    Validation rows that were set apart from the training rows do not count among these.
    """
    counts: dict[str, dict[str, int]] = {}
    rows_by_source: dict[Source, list[ClientRows]] = {}
    for source, client_rows in zip(sources, rows, strict=True):
        rows_by_source.setdefault(source, []).append(client_rows)
    for source, own_rows in rows_by_source.items():
        validation = [each.validation for each in own_rows if each.validation is not None]
        used = {
            "train": _count_distinct([each.train for each in own_rows]),
            "test": _count_distinct([each.test for each in own_rows]),
        }
        there = {"train": len(source.train.y), "test": len(source.test.y)}
        if validation:
            used["validation"] = _count_distinct(validation)
        if source.validation is not None:
            there["validation"] = len(source.validation.y)
        elif validation:
            there["train"] -= used["validation"]
            there["validation"] = used["validation"]
        for part in PARTS:
            if part in there:
                total = counts.setdefault(part, {"used": 0, "there": 0})
                total["used"] += used.get(part, 0)
                total["there"] += there[part]
    return counts


def _count_distinct(rows: Sequence[np.ndarray]) -> int:
    """Return how many rows there are in some arrays of rows together."""
    last = max(int(each.max(initial=-1)) for each in rows)
    is_used = np.zeros(last + 1, bool)
    for each in rows:
        is_used[each] = True
    return int(is_used.sum())


def describe_rows(federation: Federation) -> str:
    """Return a line such as `rows used: 142 of 142 training, 36 of 36 test; 3 classes, 2 clients`.

    The classes are those of which some client has training rows.
    """
    portions = []
    for part, name in PARTS.items():
        if part in federation.rows:
            count = federation.rows[part]
            portions.append(f"{count['used']:,} of {count['there']:,} {name}")
    classes = {label for member in federation.members for label in member.classes}
    sizes = f"{_say_count(len(classes), 'class')}, {_say_count(len(federation.members), 'client')}"
    return f"rows used: {', '.join(portions)}; {sizes}"


def _say_count(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
