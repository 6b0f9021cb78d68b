"""All runs and deployed federations in a folder, as a page asks for them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from fedproto.errors import RunFolderError
from fedproto.watch.deployed_view import DeployedView
from fedproto.watch.discovery import find_places
from fedproto.watch.run_view import RunView

#: How often the folder is searched for new runs, and how often known ones are looked at.
SEARCH_SECONDS = 5.0
LOOK_SECONDS = 0.9

View = RunView | DeployedView


class Collection:
    """The views of what is in a folder; several requests may ask at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._views: dict[str, View] = {}
        self._lock = threading.Lock()
        self._searched = 0.0
        self._looked = 0.0

    def open(self) -> None:
        """Search the folder; raise a RunFolderError if there is nothing to show."""
        with self._lock:
            self._refresh(is_forced=True)
        if not self._views:
            raise RunFolderError(
                f"{self.root} holds neither a run nor the state of a deployed server: name the "
                "folder of a run, of several, or the one that `fedproto deploy init` made"
            )

    def list(self) -> list[dict[str, Any]]:
        """Return a summary per run, in the order of their names."""
        with self._lock:
            self._refresh()
            return [view.summarise() for view in self._views.values()]

    def describe(self, run: str, after_round: int = 0, epoch: int = -1) -> dict[str, Any] | None:
        """Return everything about one run; None if there is no such run."""
        with self._lock:
            self._refresh()
            view = self._views.get(run)
            return None if view is None else view.describe(after_round, epoch)

    def describe_client(self, run: str, number: int) -> dict[str, Any] | None:
        """Return the details of one client; None if there is no such client."""
        with self._lock:
            view = self._views.get(run)
            return None if view is None else view.describe_client(number)

    def _refresh(self, is_forced: bool = False) -> None:
        now = time.monotonic()
        if is_forced or now - self._searched >= SEARCH_SECONDS:
            self._search()
            self._searched = now
        if is_forced or now - self._looked >= LOOK_SECONDS:
            for view in self._views.values():
                view.refresh()
            self._looked = now

    def _search(self) -> None:
        views: dict[str, View] = {}
        for place in find_places(self.root):
            known = self._views.get(place.id)
            if known is not None and known.place == place:
                views[place.id] = known
            elif place.is_deployed:
                views[place.id] = DeployedView(place)
            else:
                views[place.id] = RunView(place)
                views[place.id].refresh()
        self._views = views
