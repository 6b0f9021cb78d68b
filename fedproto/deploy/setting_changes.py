"""Settings that change between the rounds of a deployed federation: recorded, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedproto.deploy.history import CHANGED, Event, make_event
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.errors import RunFolderError, shown

#: Settings that a state belongs to: another value needs another state.
FIXED = ("dim", "model", "shape")
#: Settings that say where and for how long the server works, not what it computes.
_UNRECORDED = ("state", "timeout", "patience", "trust_plugins")
#: Those of which `ServerState` says itself whether they changed, with all their options.
_DESCRIBED = ("algorithm", "transform", "teacher", "feature_map")
MAX_SHOWN_CHARACTERS = 60


def list_settings(settings: ServerSettings, terms: TrainingTerms) -> dict[str, Any]:
    """Return the settings that are kept with a state, to notice when one of them changes."""
    unrecorded = {*_UNRECORDED, *_DESCRIBED}
    every = {**vars(settings), **vars(terms)}
    return {name: value for name, value in every.items() if name not in unrecorded}


def find_changes(stored: Any, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that are not what they were: their values before and now.

    A setting that only one of both has is not a change: another version of fedproto wrote the
    state. Raises ValueError if `stored` are not settings.
    """
    if not isinstance(stored, dict):
        raise ValueError("its settings are not those of a server")
    changes = {}
    for name, value in now.items():
        if name in stored and stored[name] != value:
            changes[name] = (stored[name], value)
    return changes


def refuse_fixed(changes: Mapping[str, tuple[Any, Any]], where: str) -> None:
    """Raise RunFolderError if one of the changes needs another state."""
    for name in FIXED:
        if name in changes:
            before, now = changes[name]
            raise RunFolderError(
                f"{name.replace('_', '-')} cannot be changed after the first round: in {where} it "
                f"is {_show(before)}, not {_show(now)}; change it back, or name another state"
            )


def describe_changes(changes: Mapping[str, tuple[Any, Any]], round: int) -> Event:
    """Return an entry of the history; `round` is the last one with the settings as they were."""
    texts = []
    for name, (before, now) in changes.items():
        texts.append(f"{name.replace('_', '-')} from {_show(before)} to {_show(now)}")
    return make_event(CHANGED, round, f"from round {round + 1} on: {', '.join(texts)}")


def _show(value: Any) -> str:
    return shown(value, MAX_SHOWN_CHARACTERS)
