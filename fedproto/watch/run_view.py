"""What a page shows of one run, as JSON: computed from its folder, whatever state it is in."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any

from fedproto.config.config_file import VERSION as CONFIG_VERSION
from fedproto.config.config_file import flatten_tables, require_recorded
from fedproto.core.best_round import main_accuracy
from fedproto.core.class_names import sort_names
from fedproto.core.files import LOCK_NAME, check_version, parse_json, parse_toml, unseal
from fedproto.errors import FedProtoError, RunFolderError
from fedproto.plots.colours import look_of_method
from fedproto.runs.folder import CONFIG, DIVERGED, PARTITION, RESULT, VERSION
from fedproto.runs.result_file import check_result
from fedproto.watch.clients import describe_metrics, describe_planned, describe_trained
from fedproto.watch.confusion import count_confusions
from fedproto.watch.discovery import Place
from fedproto.watch.hard_rows import describe_hard_rows
from fedproto.watch.numbers import to_number, to_numbers
from fedproto.watch.plain_files import read_plain, stamp_of
from fedproto.watch.prototype_map import PrototypeMap
from fedproto.watch.series import Series

#: What `hold_lock` writes about the process that holds a run folder.
HOLDER = re.compile(r"process (\d+) on (\S+) since ")
#: Without a known process, a run whose files changed this recently counts as running.
RECENT_SECONDS = 120.0


class RunView:
    """A run folder, read again where it changed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._series = Series(place.path, place.name)
        self._map = PrototypeMap()
        self._stamps: dict[str, object] = {}
        self._files: dict[str, Any] = {}
        self._problems: dict[str, str] = {}  # by file
        self.version = 0  # grows with every change

    # --- reading

    def refresh(self) -> bool:
        """Read what changed in the folder; return whether anything did."""
        before = self.version
        state = self.state if self.version else ""
        self._refresh_file(CONFIG, self._parse_config)
        self._refresh_file(PARTITION, self._parse_partition)
        self._refresh_file(RESULT, self._parse_result)
        self._refresh_file(DIVERGED, self._parse_sealed)
        if self._series.refresh() or not self.version:
            self.version += 1
        if self.version != before:
            self._refresh_map()
        elif self.state != state:
            self.version += 1
        return self.version != before

    def _refresh_file(self, name: str, parse: Callable[[bytes, str], Any]) -> None:
        path = self.place.path / name
        stamp = stamp_of(path)
        if stamp == self._stamps.get(name):
            return
        self._stamps[name] = stamp
        self.version += 1
        self._files.pop(name, None)
        self._problems.pop(name, None)
        if stamp is None:
            return
        where = f"{self.place.name}/{name}"
        try:
            self._files[name] = parse(read_plain(path, where), where)
        except FedProtoError as error:
            self._problems[name] = str(error)

    def _refresh_map(self) -> None:
        self._problems.pop("prototypes", None)
        is_finished = RESULT in self._files
        rounds = self._series.rounds[-1] if self._series.rounds else 0
        try:
            self._map.refresh_run(self.place.path, self.place.name, rounds, is_finished)
        except (FedProtoError, OSError) as error:
            self._problems["prototypes"] = str(error)

    def _parse_config(self, content: bytes, where: str) -> dict[str, Any]:
        tables = parse_toml(content, where)
        check_version(tables, CONFIG_VERSION, where)
        settings = flatten_tables(tables, where)
        require_recorded(settings, self.place.path.relative_to(self.place.path.parent) / CONFIG)
        return settings

    def _parse_partition(self, content: bytes, where: str) -> dict[str, Any]:
        found = parse_json(content, where)
        clients = found.get("clients") if isinstance(found, dict) else None
        if not isinstance(clients, list) or not all(_is_client(each) for each in clients):
            raise RunFolderError(f"{where} is not a partition file")
        return {"clients": clients, "sha256": str(found.get("sha256", ""))}

    def _parse_sealed(self, content: bytes, where: str) -> dict[str, Any]:
        return unseal(parse_json(content, where), VERSION, where)

    def _parse_result(self, content: bytes, where: str) -> dict[str, Any]:
        return check_result(self._parse_sealed(content, where), where)

    # --- what is shown

    @property
    def _config(self) -> dict[str, Any]:
        return self._files.get(CONFIG, {})

    @property
    def _result(self) -> dict[str, Any] | None:
        return self._files.get(RESULT)

    @property
    def state(self) -> str:
        """`finished`, `diverged`, `running`, `stopped` or, if nothing can be read, `damaged`."""
        if self._result is not None:
            return "finished"
        if DIVERGED in self._files:
            return "diverged"
        if CONFIG not in self._files:
            return "damaged"
        return "running" if self._is_held() else "stopped"

    def _is_held(self) -> bool:
        """Whether a process writes to the folder, as far as one can know without its lock."""
        holder = self.place.path / f"{LOCK_NAME}-holder"
        try:
            found = HOLDER.match(read_plain(holder, "", max_bytes=1000).decode(errors="replace"))
        except FedProtoError:
            return False
        if found is not None and found[2] == socket.gethostname():
            return os.path.exists(f"/proc/{found[1]}") or _is_alive(int(found[1]))
        return time.time() - self._changed() < RECENT_SECONDS

    def _changed(self) -> float:
        """Return when the folder's files last changed, in seconds since 1970."""
        names = (CONFIG, "metrics.jsonl", RESULT)
        stamps = [stamp_of(self.place.path / name) for name in names]
        return max((stamp.changed_ns / 1e9 for stamp in stamps if stamp is not None), default=0.0)

    def summarise(self) -> dict[str, Any]:
        """Return a line of the list of runs."""
        series = self._series
        planned = self._config.get("rounds", 0)
        planned = planned if isinstance(planned, int) else 0
        done = series.rounds[-1] if series.rounds else 0
        state = self.state
        pace = series.seconds_per_round()
        method = str((self._result or self._config).get("algorithm", ""))
        left = None
        if state == "running" and pace is not None:
            left = to_number(max(0, planned - done) * pace)
        return {
            "id": self.place.id,
            "name": self.place.name,
            "kind": "run",
            "version": self.version,
            "state": state,
            "method": method,
            "dataset": _to_text((self._result or self._config).get("dataset", "")),
            "seed": to_number(self._config.get("seed")),
            "look": look_of_method(method)._asdict(),
            "rounds_planned": planned,
            "rounds_done": done,
            "seconds_per_round": to_number(pace) if pace is not None else None,
            "seconds_left": left,
            "changed": to_number(round(self._changed())),
            "accuracy": self._latest_accuracy(),
            "bytes_up": series.total("bytes_up"),
            "bytes_down": series.total("bytes_down"),
            "problems": [*self._problems.values(), *series.problems],
        }

    def _latest_accuracy(self) -> dict[str, Any]:
        """Return mean and deviation per way to predict, of the result or the latest evaluation."""
        if self._result is not None:
            return {way: to_numbers(spread) for way, spread in self._result["accuracy"].items()}
        latest: dict[str, dict[str, Any]] = {}
        for name, value in self._series.latest("accuracy/").items():
            way, _, part = name.rpartition("/")
            latest.setdefault(way, {})[part] = value
        return latest

    def describe(self, after_round: int = 0, epoch: int = -1) -> dict[str, Any]:
        """Return everything that a page shows of the run but the details of its clients.

        A page that has the rounds up to one, of the same epoch, gets the later ones only.
        """
        summary = self.summarise()
        if epoch != self._series.epoch:
            after_round = 0
        clients = self._describe_clients()
        return summary | {
            "after": after_round,
            "series": self._series.after(after_round),
            "is_validation": self._series.is_validation,
            "main": main_accuracy(summary["accuracy"]) if summary["accuracy"] else None,
            "classes": self._list_classes(clients),
            "clients": clients,
            "metrics": describe_metrics(self._result or {}),
            "settings": {key: _to_text(value) for key, value in self._config.items()},
            "rows": _count_rows(clients),
            "partition": self._files.get(PARTITION, {}).get("sha256", ""),
            "seconds": to_number(self._series.total("seconds")),
            "map": self._map.describe(self._name_prototypes(clients)),
            "notes": self._series.notes,
            "failures": self._list_failures(),
            "best_round": to_number((self._result or {}).get("best_round")),
            "validation": self._read_validation_score(),
        }

    def _read_validation_score(self) -> float | int | None:
        """Return the score of the best round on validation rows; None without such rows."""
        if self._result is None or "validation" not in self._result:
            return None
        return to_number(self._result["validation"]["score"])

    def describe_client(self, number: int) -> dict[str, Any] | None:
        """Return what a page shows of one client only; None if there is no such client."""
        clients = self._describe_clients()
        chosen = [client for client in clients if client["id"] == number]
        if not chosen:
            return None
        problem = None
        confusion = None
        hard_rows = None
        path = self.place.path
        name = self.place.name
        try:
            confusion = count_confusions(path, name, number, self._map.values())
            if self._result is not None:
                hard_rows = describe_hard_rows(path, name, number, self._result["classes"])
        except FedProtoError as error:
            problem = str(error)
        names = self._name_prototypes(clients)
        return {
            "client": chosen[0],
            "confusion": confusion,
            "hard_rows": hard_rows,
            "prototypes": self._map.compare_client(number, names),
            "problem": problem,
        }

    def _name_prototypes(self, clients: list[dict[str, Any]]) -> list[str]:
        """Return the class of each row of the prototypes."""
        names = [] if self._result is None else self._result["classes"]
        return self._map.name_classes(names, [client["classes"] for client in clients])

    def _describe_clients(self) -> list[dict[str, Any]]:
        if self._result is not None:
            return describe_trained(self._result, self._series)
        if PARTITION in self._files:
            return describe_planned(self._files[PARTITION], self._series)
        return []

    def _list_classes(self, clients: list[dict[str, Any]]) -> list[str]:
        """Return the classes of the run; those of its clients, sorted, until it has finished."""
        if self._result is not None:
            return self._result["classes"]
        names: dict[str, None] = {}
        for client in clients:
            names |= dict.fromkeys(client["classes"])
        return list(sort_names(names))

    def _list_failures(self) -> list[dict[str, Any]]:
        """Return why a run ended early, and which clients diverged."""
        failures = []
        if DIVERGED in self._files:
            text = _to_text(self._files[DIVERGED].get("error", "it diverged"))
            failures.append({"who": "the run", "text": text})
        diverged = [f"client {number}" for number in self._series.diverged]
        return failures + [{"who": who, "text": "its loss exploded"} for who in diverged]


def _is_client(value: Any) -> bool:
    """Whether an entry of a partition file has what a page shows."""
    if not isinstance(value, dict) or not isinstance(value.get("dataset"), str):
        return False
    classes = value.get("classes")
    has_names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    has_rows = isinstance(value.get("train"), list) and isinstance(value.get("test"), list)
    return has_names and has_rows


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _to_text(value: Any) -> str:
    """Return a setting as text: names of plug-ins are lists where clients differ."""
    if isinstance(value, (list, tuple)):
        return ", ".join(_to_text(each) for each in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _count_rows(clients: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "train": sum(client["train"] or 0 for client in clients),
        "test": sum(client["test"] or 0 for client in clients),
    }
