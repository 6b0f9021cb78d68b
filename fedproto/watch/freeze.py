"""Everything a page shows of some runs, as one value: for a page that needs no server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedproto.plots.labels import hide_folders
from fedproto.watch.deployed_view import DeployedView
from fedproto.watch.discovery import Place
from fedproto.watch.run_view import RunView

#: Counts in the confusion matrices of single clients that a page holds; about 4 MB of text.
MAX_CONFUSION_CELLS = 2_000_000
#: Hard test rows of single clients that a page holds; about 2 MB of text.
MAX_HARD_ROWS = 6000


def freeze(folders: Sequence[Path], servers: Sequence[Path]) -> dict[str, Any]:
    """Return what a page shows of run folders and of the state files of deployed servers."""
    names = name_folders([*folders, *(server.parent for server in servers)])
    views: list[RunView | DeployedView] = []
    for number, folder in enumerate(folders):
        views.append(RunView(Place(f"run-{number}", names[number], folder)))
    for number, server in enumerate(servers, len(folders)):
        views.append(DeployedView(Place(f"run-{number}", names[number], server, True)))
    runs = []
    clients = {}
    cells_left = MAX_CONFUSION_CELLS
    hard_rows_left = MAX_HARD_ROWS
    for view in views:
        view.refresh()
        run = view.describe()
        _hide_paths(run)
        runs.append(run)
        details = {}
        for client in run["clients"]:
            found = view.describe_client(client["id"])
            if found is None:
                continue
            cells_left -= _count_cells(found)
            if cells_left < 0:
                found["confusion"] = None
            if found["hard_rows"] is not None:
                hard_rows_left -= len(found["hard_rows"]["rows"])
            if hard_rows_left < 0:
                found["hard_rows"] = None
            found["client"] = client
            details[str(client["id"])] = found
        clients[view.place.id] = details
    return {"runs": runs, "clients": clients}


def _hide_paths(run: dict[str, Any]) -> None:
    """Leave the folders of absolute paths out: a frozen page is read on other machines."""
    run["dataset"] = hide_folders(run["dataset"])
    run["settings"] = {key: hide_folders(value) for key, value in run["settings"].items()}
    for client in run["clients"]:
        client["dataset"] = hide_folders(client["dataset"])


def _count_cells(details: dict[str, Any]) -> int:
    confusion = details["confusion"]
    if confusion is None:
        return 0
    return sum(len(matrix) ** 2 for matrix in confusion["ways"].values())


def name_folders(folders: Sequence[Path]) -> list[str]:
    """Return short names: the last part of each path, and more of it where two would be equal.

    >>> name_folders([Path("/home/me/a/run"), Path("/home/me/b/run"), Path("/home/me/c")])
    ['a/run', 'b/run', 'c']
    """
    parts = [folder.resolve().parts[1:] for folder in folders]
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(part[-length:]) for part, length in zip(parts, lengths, strict=True)]
        clashing = [
            index
            for index, name in enumerate(names)
            if names.count(name) > 1 and lengths[index] < len(parts[index])
        ]
        if not clashing:
            return [name or "run" for name in names]
        for index in clashing:
            lengths[index] += 1
