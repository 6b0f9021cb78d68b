"""Replies that are too large beside the others, found member by member in plain dictionaries.

`fedproto.deploy.outliers` finds the same with arrays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from statistics import median

from fedproto.deploy.outliers import MIN_OTHER_MEMBERS, Amounts
from fedproto.deploy.settings import ServerSettings
from fedproto.errors import shown


def find_outliers(
    replies: Mapping[str, Amounts], remembered: Mapping[str, Amounts], limits: ServerSettings
) -> dict[str, str]:
    """Return which replies of a round are too large beside the others, and why.

    The one furthest beyond a limit goes first, and the rest are compared without it, so that it
    does not make others look wrong. `remembered` are earlier uploads of members that did not reply
    this time: replies are compared with them, but they are not judged.
    """
    compared = {**remembered, **replies}
    reasons: dict[str, str] = {}
    while True:
        judged = replies.keys() - reasons.keys()
        furthest = max(_measure_excesses(compared, judged, limits), default=None)
        if furthest is None or furthest[0] <= 1:
            return reasons
        _, name, reason = furthest
        reasons[name] = reason
        del compared[name]


def _measure_excesses(
    amounts: Mapping[str, Amounts], judged: set[str], limits: ServerSettings
) -> Iterator[tuple[float, str, str]]:
    """Yield how far each judged member is towards each limit (1: at the limit), and a sentence."""
    norms = {name: each.norms for name, each in amounts.items()}
    counts = {name: each.counts for name, each in amounts.items()}
    norm_ratios = _compare(norms, rare_is_suspicious=True)
    count_ratios = _compare(counts, rare_is_suspicious=False)
    for kind, ratios, limit in (
        ("norm", norm_ratios, limits.max_norm_ratio),
        ("count", count_ratios, limits.max_count_ratio),
    ):
        for name in judged:
            label, ratio = max(ratios[name].items(), key=lambda item: item[1])
            is_class = label and not label.startswith("\0")
            subject = f"of class {shown(label, 60)}" if is_class else "of its weights"
            rounded = float(f"{ratio:.1g}")  # more digits would tell what the others have
            sentence = (
                f"the {kind} {subject} is about {rounded:g} times the median of the other "
                f"members'; at most {limit:g} times is accepted (max-{kind}-ratio)"
            )
            yield ratio / limit, name, sentence


def _compare(
    amounts: Mapping[str, Mapping[str, float]], rare_is_suspicious: bool
) -> dict[str, dict[str, float]]:
    """Return each member's amount of each class, divided by the median of the other members'.

    Where too few others hold a class, it is compared with their typical class instead. Unless
    `rare_is_suspicious`, the larger of the two counts: a member may have many samples of a class
    that is rare elsewhere. The ratio is 0 where there is nothing to compare with.
    """
    typical_amounts = {name: median(own.values()) for name, own in amounts.items()}
    typical_of_others = _medians_of_others(typical_amounts)
    amounts_by_class: dict[str, dict[str, float]] = {}
    for name, own in amounts.items():
        for label, amount in own.items():
            amounts_by_class.setdefault(label, {})[name] = amount
    ratios: dict[str, dict[str, float]] = {name: {} for name in amounts}
    for label, holders in amounts_by_class.items():
        medians = _medians_of_others(holders)
        for name, amount in holders.items():
            reference = medians.get(name, 0.0)
            if not reference or not rare_is_suspicious:
                reference = max(reference, typical_of_others.get(name, 0.0))
            ratios[name][label] = amount / reference if reference else 0.0
    return ratios


def _medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """Return for each member the median of the others' values; nothing if there are too few."""
    others = len(values) - 1
    if others < MIN_OTHER_MEMBERS:
        return {}
    ordered = sorted(values.values())
    medians = {}
    for name, value in values.items():
        own_place = bisect_left(ordered, value)
        lower = _skip_place((others - 1) // 2, own_place)
        upper = _skip_place(others // 2, own_place)
        medians[name] = (ordered[lower] + ordered[upper]) / 2
    return medians


def _skip_place(place: int, skipped: int) -> int:
    """Return where the value at a place stands in a list that has one more value, at `skipped`."""
    return place if place < skipped else place + 1
