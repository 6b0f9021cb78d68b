"""What the server's file says about its members, for people and scripts.

It says nothing about numbers of samples, which are the members' own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedproto.core.files import read_tensors
from fedproto.deploy.history import Event, read_history
from fedproto.deploy.member_checkpoint import STATE_FORMAT, find_state_file
from fedproto.deploy.privacy_ledger import PrivacyLedger
from fedproto.deploy.server_backup import read_last_backup
from fedproto.deploy.server_files import find_server_file
from fedproto.deploy.server_state import read_state, title_member
from fedproto.deploy.settings import MemberSettings, read_member

#: Units of time and their seconds, the longest first.
_UNITS = (("days", 86400), ("h", 3600), ("min", 60))


def read_status(path: Path) -> dict[str, Any]:
    """Return a federation's round, algorithm, classes and members.

    `path` is the server's file, its folder, or the folder that `deploy init` made.
    """
    file = find_server_file(path)
    _, header = read_state(file)
    members = {}
    for name, record in header["members"].items():
        members[name] = {key: value for key, value in record.items() if key != "number"}
    return {
        "round": header["round"],
        "algorithm": header["algorithm"],
        "classes": header["classes"],
        "members": members,
        "privacy": header.get("privacy"),
        "history": read_history(header),
        "backup": read_last_backup(file),
    }


def make_history_rows(history: list[Event]) -> list[list[str]]:
    """Return the cells of a table with a row for each entry of a history."""
    rows = []
    for event in history:
        moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(event["time"]))
        rows.append([moment, str(event["round"]), event["event"], event["what"]])
    return rows


def make_rows(status: dict[str, Any]) -> list[list[str]]:
    """Return the cells of a table with a row for each member."""
    rows = []
    for name, record in status["members"].items():
        title = title_member(name, str(record.get("site", "")))
        rows.append([title, *_describe_member(record)])
    return rows


def _describe_member(record: dict[str, Any]) -> list[str]:
    last_heard = "never"
    if record["last_seen"]:
        last_heard = describe_age(record["last_seen"])
    other_bytes = record["beside_up"] + record["beside_down"]
    return [
        last_heard,
        str(record["last_round"]),
        ", ".join(record["spoken"]),
        _describe_accuracy(record["accuracy"]),
        _describe_metrics(record.get("metrics", {})),  # older files have none
        _describe_epsilon(record.get("epsilon")),
        f"{record['bytes_up']:,}",
        f"{record['bytes_down']:,}",
        f"{other_bytes:,}",
        str(record["refused"]),
        str(record["failed"]),
        record["reason"],
    ]


def _describe_accuracy(accuracy: dict[str, float]) -> str:
    """Return accuracies over all classes; one over own classes only if the other is missing."""
    texts = []
    for name, value in accuracy.items():
        is_second = name.endswith("_own") and name.removesuffix("_own") in accuracy
        if not is_second:
            texts.append(f"{name} {value:.1%}")
    return ", ".join(texts)


def _describe_metrics(metrics: dict[str, dict[str, float]]) -> str:
    """Return balanced accuracy and AUROC by the nearest prototype if there is one, or by head."""
    values = metrics.get("prototype", metrics.get("head", {}))
    texts = []
    for name, label in (("balanced_accuracy", "balanced"), ("auroc", "AUROC")):
        if name in values:
            texts.append(f"{label} {values[name]:.1%}")
    return ", ".join(texts)


def _describe_epsilon(epsilon: float | None) -> str:
    """Return what the member says this federation has cost its records; empty if it says none."""
    return "" if epsilon is None else f"{epsilon:.3g}"


def read_ledger(path: Path) -> dict[str, Any]:
    """Return what a member has spent, on its own machine; `path` is the member's TOML file."""
    own = read_member(path, operated=True)
    ledger = PrivacyLedger.read(own)
    now = time.time()
    federations: dict[str, dict[str, Any]] = {}
    for entry in ledger.entries:
        known = federations.setdefault(entry.federation, {"rounds": 0, "last_round": 0})
        known["rounds"] += 1
        known["last_round"] = max(known["last_round"], entry.round)
    for name, known in federations.items():
        known["epsilon"] = ledger.epsilon(now, federation=name)
    return {
        "member": own.name,
        "ledger": str(ledger.path),
        "epsilon": ledger.epsilon(now),
        "delta": own.epsilon_delta,
        "max_epsilon_per_year": own.max_epsilon_per_year,
        "federations": federations,
        "history": _read_own_history(own),
    }


def _read_own_history(own: MemberSettings) -> list[Event]:
    """Return what happened to a member beside its rounds, whatever settings its state is of."""
    path = find_state_file(own)
    if not path.exists():
        return []
    _, header = read_tensors(path, STATE_FORMAT)
    return read_history(header)


def make_ledger_rows(spent: dict[str, Any]) -> list[list[str]]:
    """Return the cells of a table with a row for each federation of a member's ledger."""
    rows = []
    for name, known in spent["federations"].items():
        epsilon = f"{known['epsilon']:.4g}"
        rows.append([name, str(known["rounds"]), str(known["last_round"]), epsilon])
    return rows


def describe_age(moment: float) -> str:
    """Return how long ago a moment was, given in seconds since 1970."""
    return _describe_seconds(time.time() - moment)


def _describe_seconds(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
