"""theory.json, in a run folder or elsewhere: written once measured, read by reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedproto.core.files import check_version, read_json, write_atomically
from fedproto.errors import RunFolderError
from fedproto.theory.summary import STATEMENTS
from fedproto.theory.words import explain, list_rows

#: The file in a run folder, or in another one, that the measurements are written to.
THEORY = "theory.json"
VERSION = 1

FIGURE = "theory.png"


def write_theory(folder: Path, content: dict[str, Any], figure: bytes | None) -> None:
    """Write theory.json, and theory.png where there is a figure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / THEORY, (json.dumps(content) + "\n").encode())
        if figure is not None:
            write_atomically(folder / FIGURE, figure)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error}") from error


def read_theory(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's theory.json, or None if there is none."""
    path = folder / THEORY
    if not path.exists():
        return None
    content = read_json(path)
    if not isinstance(content, dict) or not _is_measured(content.get("settings")):
        raise RunFolderError(f"{path} is not a file of `fedproto theory`: measure it again")
    check_version(content, VERSION, str(path), RunFolderError)
    return content


def _is_measured(settings: Any) -> bool:
    """Return whether everything that is shown of measured settings is there."""
    if not isinstance(settings, dict):
        return False
    try:
        for setting in settings.values():
            list_rows(setting["summary"])
            explain(setting)
            " ".join(setting["departures"])
            for record in setting["rounds"]:
                int(record["round"])
                for client in record["clients"]:
                    _read_shown(client)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return True


def _read_shown(client: dict[str, Any]) -> None:
    """Read the numbers of a client that figures show; fail where one is not there."""
    for name in STATEMENTS:
        if client[name] is not None:
            for side in ("change", "bound", "bound_of_means"):
                float(client[name][side])
    for name in ("lambda_first", "lambda_sum", "eta_without_lambda"):
        float(client["corollary_1"][name])
