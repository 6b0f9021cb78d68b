"""What a user should know about the data of a federation before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from fedproto.core.federation import Federation
from fedproto.data import Source
from fedproto.data.shared.data_notices import list_names


def collect_notices(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the notices of all sources, each once."""
    notices: dict[str, None] = {}
    for source in sources:
        notices |= dict.fromkeys(source.notices)
    return tuple(notices)


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
        return [
            f"{len(names)} classes have training rows with one client alone ({list_names(names)}): "
            "the prototype of each is that client's alone"
        ]
    (client,) = federation.own_classes[:, lonely[0]].nonzero().flatten().tolist()
    return [
        f"class {names[0]!r} has training rows with client {client} alone, so its prototype is "
        "that client's alone"
    ]
