"""Where the files of a server are: its state, and the settings of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedproto.config.config_file import read_tables
from fedproto.deploy.server_state import STATE_FILE
from fedproto.errors import ConfigError, RunFolderError

APP_FILE = "pyproject.toml"


def find_server_file(path: Path) -> Path:
    """Return the server's file: `path` itself, or where it is in this folder."""
    candidates = [path, path / STATE_FILE, path / "server" / STATE_FILE]
    files = [candidate for candidate in candidates if candidate.is_file()]
    if files:
        return files[0]
    if (path / "run.sh").exists():
        raise RunFolderError(
            f"the federation in {path} has not started: {STATE_FILE} appears when ./run.sh "
            "begins its first round"
        )
    raise RunFolderError(
        f"{path} holds no {STATE_FILE}, which the server writes before its first round: name "
        "the folder that `fedproto deploy init` made, on the server's machine"
    )


def choose_server_file(path: Path) -> Path:
    """Return where the server's file is or would be, given what `find_server_file` is given."""
    if path.name == STATE_FILE:
        return path
    config = read_app_config(path)
    if "state" in config:
        return path / str(config["state"]) / STATE_FILE  # an absolute path stays as it is
    return path / STATE_FILE


def read_app_config(folder: Path) -> dict[str, Any]:
    """Return the server's settings in a folder of `deploy init`; {} if it is not one."""
    path = folder / APP_FILE
    if not path.is_file():
        return {}
    table: Any = read_tables(path)
    for key in ("tool", "flwr", "app", "config"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path} has no table [tool.flwr.app.config]")
    return table
