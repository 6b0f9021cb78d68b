"""The federation of a soak: its members, their data, and the settings of its runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers import flower

from fedproto.deploy.settings import (
    MemberSettings,
    ServerSettings,
    TrainingTerms,
    read_member,
)

CLASSES = list(flower.CLASSES)
MEMBERS = "abcde"
QUORUM = 3
DIM = 10
MODEL = "mlp(hidden=8,width=10)"
TIMEOUT_SECONDS = 25.0  # of a round, for members that are gone
RETRY_SECONDS = 1.0  # of the supervisors, and until a dead supervisor is started again
#: Seconds between two looks of a SuperExec for a task. Six of them share this machine, where 0.1 s,
#: as the scripts have it, would take a third of a core.
POLL_SECONDS = 0.5


def write_data(folder: Path, members: list[str]) -> dict[str, dict[str, str]]:
    """Write each member's data, some 60 images, and return the settings of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    files, _ = flower.digits(folder, "".join(members))
    for own in files.values():
        own["model"] = MODEL
    return files


def configure_run(rounds: int, state: str) -> dict[str, Any]:
    """Return the settings of a run, as `flwr run --run-config` takes them."""
    return {
        "rounds": rounds,
        "quorum": QUORUM,
        "timeout": TIMEOUT_SECONDS,
        "dim": DIM,
        "state": state,
    }


def prepare_replay(
    folder: Path, files: dict[str, dict[str, str]]
) -> tuple[dict[str, MemberSettings], ServerSettings, TrainingTerms]:
    """Return members, server and terms of the same federation, with empty states in a folder."""
    folder.mkdir(parents=True)
    members = {}
    for name, own in files.items():
        settings = own | {"name": name, "state": str(folder / name)}
        lines = [f'{key} = "{value}"\n' for key, value in settings.items()]
        (folder / f"{name}.toml").write_text("".join(lines))
        members[name] = read_member(folder / f"{name}.toml")
    state = str(folder / "server")
    settings = ServerSettings(state=state, classes=",".join(CLASSES), quorum=QUORUM)
    return members, settings, TrainingTerms(dim=DIM)
