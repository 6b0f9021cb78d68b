"""What the server's file says about its members, for people and scripts; no counts of images, which are theirs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedproto.deploy.server_state import STATE, read_state
from fedproto.errors import RunFolderError


def read_status(path: Path) -> dict[str, Any]:
    places = [path, path / STATE, path / "server" / STATE]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise RunFolderError(
            f"{path} holds no {STATE}: the server keeps one from its first round on"
        )
    _, of = read_state(file)
    members = {
        name: {key: value for key, value in seat.items() if key != "number"}
        for name, seat in of["seats"].items()
    }
    return {
        "round": of["round"],
        "algorithm": of["algorithm"],
        "classes": of["classes"],
        "members": members,
    }


def rows(status: dict[str, Any]) -> list[list[str]]:
    return [[name, *_row(seat)] for name, seat in status["members"].items()]


def _row(seat: dict[str, Any]) -> list[str]:
    told = seat["accuracy"]
    shown = {
        name: value
        for name, value in told.items()
        if name.removesuffix("_own") not in told or "own" not in name
    }
    accuracy = ", ".join(f"{name} {value:.1%}" for name, value in shown.items())
    beside = seat["beside_up"] + seat["beside_down"]
    traffic = (f"{seat['bytes_up']:,}", f"{seat['bytes_down']:,}", f"{beside:,}")
    heard = _ago(time.time() - seat["last_seen"]) if seat["last_seen"] else "never"
    return [
        heard,
        str(seat["last_round"]),
        ", ".join(seat["spoken"]),
        accuracy,
        *traffic,
        str(seat["refused"]),
        str(seat["failed"]),
        seat["reason"],
    ]


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
