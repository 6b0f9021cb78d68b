"""What a page shows of a deployed federation, from the state file of its server."""

from __future__ import annotations

import time
from typing import Any

from fedproto.deploy.server_state import read_state, title_member
from fedproto.errors import FedProtoError, RunFolderError
from fedproto.plots.colours import look_of_method
from fedproto.watch.discovery import Place
from fedproto.watch.numbers import to_count, to_number, to_numbers
from fedproto.watch.plain_files import require_plain, stamp_of
from fedproto.watch.prototype_map import PrototypeMap

#: A server that wrote this recently counts as running.
RECENT_SECONDS = 300.0


class DeployedView:
    """A deployed federation; its rounds are those that were seen while the page was open."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.version = 0
        self._stamp: object = ()
        self._status: dict[str, Any] | None = None
        self._problem = ""
        self._map = PrototypeMap()
        self._rounds: list[int] = []
        self._columns: dict[str, list[Any]] = {}

    def refresh(self) -> bool:
        """Read the state file if it changed; return whether it did."""
        stamp = stamp_of(self.place.path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.version += 1
        self._problem = ""
        try:
            require_plain(self.place.path, self.place.name)
            _, header = read_state(self.place.path)
            self._status = _check(header, self.place.name)
            self._map.refresh_server(self.place.path, self.place.name, self._status["round"])
        except FedProtoError as error:
            self._problem = str(error).replace(str(self.place.path), self.place.name)
        if self._status is not None and not self._problem:
            self._add_round(self._status)
        return True

    def _add_round(self, status: dict[str, Any]) -> None:
        if self._rounds and status["round"] <= self._rounds[-1]:
            return
        members = status["members"].values()
        values: dict[str, Any] = {
            "bytes_up": sum(member["bytes_up"] for member in members),
            "bytes_down": sum(member["bytes_down"] for member in members),
            "participants": sum(member["last_round"] == status["round"] for member in members),
        }
        for way, spread in _summarise(status).items():
            for part, value in spread.items():
                values[f"accuracy/{way}/{part}"] = value
        known = len(self._rounds)
        self._rounds.append(status["round"])
        for name, value in values.items():
            self._columns.setdefault(name, [None] * known).append(to_number(value))
        for column in self._columns.values():
            if len(column) <= known:
                column.append(None)

    @property
    def state(self) -> str:
        """`running` if the server wrote its file lately, else `stopped`, or `damaged`."""
        if self._status is None:
            return "damaged"
        stamp = stamp_of(self.place.path)
        changed = 0.0 if stamp is None else stamp.changed_ns / 1e9
        return "running" if time.time() - changed < RECENT_SECONDS else "stopped"

    def summarise(self) -> dict[str, Any]:
        """Return a line of the list of runs."""
        status = self._status or {"round": 0, "algorithm": "", "classes": [], "members": {}}
        members = status["members"].values()
        stamp = stamp_of(self.place.path)
        method = str(status["algorithm"]).partition("(")[0].partition(" ")[0]
        return {
            "id": self.place.id,
            "name": self.place.name,
            "kind": "deployed",
            "version": self.version,
            "state": self.state,
            "method": method,
            "look": look_of_method(method)._asdict(),
            "dataset": "",
            "seed": None,
            "rounds_planned": 0,
            "rounds_done": status["round"],
            "seconds_per_round": None,
            "seconds_left": None,
            "changed": 0 if stamp is None else round(stamp.changed_ns / 1e9),
            "accuracy": _summarise(status),
            "bytes_up": sum(member["bytes_up"] for member in members),
            "bytes_down": sum(member["bytes_down"] for member in members),
            "problems": [self._problem] if self._problem else [],
        }

    def describe(self, after_round: int = 0, epoch: int = -1) -> dict[str, Any]:
        """Return everything that a page shows of the federation."""
        status = self._status or {"round": 0, "algorithm": "", "classes": [], "members": {}}
        summary = self.summarise()
        clients = _list_clients(status)
        names = [str(name) for name in status["classes"]]
        return summary | {
            "after": 0,
            "series": {"epoch": 0, "rounds": self._rounds, "columns": self._columns},
            "is_validation": False,
            "main": next(iter(summary["accuracy"]), None),
            "classes": names,
            "clients": clients,
            "metrics": {"ways": {}, "baselines": {}},
            "settings": {"algorithm": str(status["algorithm"])},
            "rows": {"train": 0, "test": 0},
            "partition": "",
            "seconds": None,
            "map": self._map.describe(self._map.name_classes(names, [])),
            "notes": [],
            "failures": _list_failures(status),
            "best_round": None,
            "validation": None,
        }

    def describe_client(self, number: int) -> dict[str, Any] | None:
        """Return what a page shows of one member; None if there is no such member."""
        if self._status is None:
            return None
        clients = [each for each in _list_clients(self._status) if each["id"] == number]
        if not clients:
            return None
        names = [str(name) for name in self._status["classes"]]
        return {
            "client": clients[0],
            "confusion": None,
            "hard_rows": None,
            "prototypes": self._map.compare_client(number, self._map.name_classes(names, [])),
            "problem": None,
        }


def _check(status: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a status whose entries have the types that a page relies on."""
    members = status["members"]
    is_valid = to_count(status["round"]) is not None and isinstance(status["classes"], list)
    is_valid = is_valid and isinstance(members, dict)
    if not is_valid or not all(_is_member(member) for member in members.values()):
        raise RunFolderError(f"{where} is not a server's state")
    return status


def _is_member(member: Any) -> bool:
    """Whether an entry has what a page shows of a member."""
    if not isinstance(member, dict) or not isinstance(member.get("spoken"), list):
        return False
    counts = ("number", "bytes_up", "bytes_down", "last_round", "refused", "failed")
    return all(to_count(member.get(name)) is not None for name in counts)


def _list_clients(status: dict[str, Any]) -> list[dict[str, Any]]:
    clients = []
    for name, member in status["members"].items():
        metrics = member.get("metrics")
        client = {
            "id": member["number"],
            "name": title_member(str(name), str(member.get("site", ""))),
            "model": str(member.get("architecture", "")),
            "dataset": "",
            "classes": [str(each) for each in member["spoken"]],
            "rows": None,
            "train": None,
            "test": None,
            "accuracy": to_numbers(member.get("accuracy")),
            "recall": {},
            "metrics": metrics if isinstance(metrics, dict) else {},
            "last_round": member["last_round"],
            "last_seen": to_number(member.get("last_seen")) or None,
            "times": None,
            "diverged": False,
            "refused": member["refused"],
            "failed": member["failed"],
            "reason": str(member.get("reason", "")),
            "traffic": {"bytes_up": member["bytes_up"], "bytes_down": member["bytes_down"]},
        }
        clients.append(client)
    return clients


def _list_failures(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the members whose latest reply was refused or failed, and why."""
    failures = []
    for client in _list_clients(status):
        if client["refused"] or client["failed"]:
            counts = f"{client['refused']} refused, {client['failed']} failed"
            reason = client["reason"] or "replies again"
            failures.append({"who": client["name"], "text": f"{counts}: {reason}"})
    return failures


def _summarise(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return mean and population deviation over the members of each accuracy."""
    values: dict[str, list[float]] = {}
    for member in status["members"].values():
        for way, value in to_numbers(member.get("accuracy")).items():
            if value is not None:
                values.setdefault(way, []).append(float(value))
    summary = {}
    for way, found in values.items():
        mean = sum(found) / len(found)
        variance = sum((value - mean) ** 2 for value in found) / len(found)
        summary[way] = {"mean": to_number(mean), "std": to_number(variance**0.5)}
    return summary
