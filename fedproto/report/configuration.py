"""The configuration of the runs, as text: the settings as TOML, and the commands to repeat them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.config.plugins import FOLDERS
from fedproto.plots.labels import hide_folders
from fedproto.report.groups import Group
from fedproto.report.read import Run
from fedproto.report.summary import join_names

REPEAT_NOTE = (
    "The commands repeat each run into a new folder; --out names it. They are to be typed beside "
    "the run folders. Of paths only the last part is shown."
)
_MISSING = object()


@dataclass(frozen=True)
class Block:
    """Settings as TOML, commands for a shell and a note, under a heading; each may be empty."""

    heading: str = ""
    settings: str = ""
    command: str = ""
    note: str = ""


def describe_configuration(groups: Sequence[Group]) -> list[Block]:
    """Return the whole configuration of a single run, or what is common and what differs."""
    if len(groups) == 1 and len(groups[0].runs) == 1:
        settings = Block(settings=hide_folders(groups[0].first.toml))
        repeat = Block("To run it again", command=_repeat_command(groups[0]), note=REPEAT_NOTE)
        return [settings, repeat]
    blocks = [Block("Common to all runs", settings=common_settings(groups))]
    blocks += [_describe_group(group, groups) for group in groups]
    blocks.append(Block(note=REPEAT_NOTE))
    return blocks


def _describe_group(group: Group, groups: Sequence[Group]) -> Block:
    """Return what a group does not share with the others, and how to repeat it."""
    return Block(
        heading=group.label,
        settings=own_settings(group, groups),
        command=_repeat_command(group),
    )


def common_settings(groups: Sequence[Group]) -> str:
    """Return the settings that all runs share, as lines of a configuration file."""
    return _to_toml(_shared_settings(_all_runs(groups)))


def own_settings(group: Group, groups: Sequence[Group]) -> str:
    """Return the settings of a group that not all runs share, as lines of a configuration file.

    Together with the common settings, and a seed if there are several, they are a whole file.
    """
    common = _shared_settings(_all_runs(groups))
    shared = _shared_settings(group.runs)
    own = {key: shared[key] for key in shared if key not in common}
    lines = _to_toml(own)
    if len(group.runs) == 1:
        return lines
    seeds = join_names(str(seed) for seed in group.seeds)
    return f"# seed = {seeds}\n{lines}"


def _all_runs(groups: Iterable[Group]) -> list[Run]:
    """Return the runs of all groups, in their order."""
    return [run for group in groups for run in group.runs]


def _shared_settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the settings that have the same value in all runs."""
    first = runs[0].config
    keys = [key for key in first if _is_shared(key, runs)]
    return {key: first[key] for key in keys}


def _is_shared(key: str, runs: Sequence[Run]) -> bool:
    """Whether a setting is present in all runs and has the value of the first run."""
    value = runs[0].config[key]
    return all(run.config.get(key, _MISSING) == value for run in runs)


def _to_toml(settings: dict[str, Any]) -> str:
    """Return TOML with dotted keys, so that the lines of two texts can be mixed in any order."""
    lines = []
    for key, value in settings.items():
        name = f"{key}.name" if key in FOLDERS else key
        # JSON and TOML write the values of a configuration alike.
        text = hide_folders(json.dumps(value, ensure_ascii=False))
        lines.append(f"{name} = {text}")
    return "\n".join(lines)


def _repeat_command(group: Group) -> str:
    """Return the commands that repeat the runs of a group, or a comment if there is none."""
    config = group.first.config
    if "python" in (config.get("dataset"), config.get("model")):
        return "# started from Python with arrays or modules of its own, which no file can name"
    commands = []
    for run in group.runs:
        path = shlex.quote(f"{run.path.resolve().name}/config.toml")
        commands.append(f"fedproto run {path}")
    return "\n".join(commands)
