"""What happened to a federation beside its rounds: restores, renamed members, changed settings.

The history is part of the state it belongs to, the server's or a member's, so it is written and
restored with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedproto.core.entries import Entry, find_wrong_entry
from fedproto.deploy.messages import make_printable

Event = dict[str, Any]
RESTORED = "restored"
PASSED = "passed over"
RENAMED = "renamed"
MOVED = "data moved"
CHANGED = "settings changed"
REBUILT = "rebuilt"

_ENTRIES = {
    "time": Entry(lambda value: type(value) is float, "seconds since 1970"),
    "round": Entry(lambda value: type(value) is int, "a whole number"),
    "event": Entry(lambda value: isinstance(value, str), "a text"),
    "what": Entry(lambda value: isinstance(value, str), "a text"),
}


def make_event(event: str, round: int, what: str) -> Event:
    """Return an entry of a history; `round` is the last one that was closed before it."""
    return {"time": time.time(), "round": round, "event": event, "what": make_printable(what)}


def read_history(header: Mapping[str, Any]) -> list[Event]:
    """Return the history in the header of a state; ValueError if it is not one."""
    history = header.get("history", [])
    if not isinstance(history, list):
        raise ValueError("its history is not a list")
    for event in history:
        if not isinstance(event, dict) or find_wrong_entry(event, _ENTRIES) is not None:
            raise ValueError("its history has an entry that is not one")
    return history


def is_just_restored(history: Sequence[Event], round: int) -> bool:
    """Return whether a state was restored, and no round was closed since."""
    restores = [event for event in history if event["event"] in (RESTORED, REBUILT)]
    return bool(restores) and restores[-1]["round"] == round
