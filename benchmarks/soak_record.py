"""What a soak writes down while it runs, so that it can be replayed and taken up again.

The journal is a file of JSON lines. A thread looks at the files of server and members, which are
replaced atomically, and writes a line for each new version: who counted in which round, what each
member sent, and hashes of the tensors.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedproto.core.files import hash_tensors, read_tensors
from fedproto.core.types import Tree
from fedproto.deploy.member_checkpoint import STATE_FILE as MEMBER_FILE
from fedproto.deploy.member_checkpoint import STATE_FORMAT as MEMBER_FORMAT
from fedproto.deploy.server_state import STATE_FILE, read_state

LOOK_SECONDS = 0.05  # between two looks at all files
Line = dict[str, Any]


class Journal:
    """A file of JSON lines; a line is written as a whole, also if two threads write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def write(self, what: str, **values: Any) -> Line:
        """Append a line with the time, and return it."""
        line = {"what": what, "time": round(time.time(), 3), **values}
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def read(self) -> list[Line]:
        """Return all lines; the last one may have been cut off by a kill."""
        if not self.path.exists():
            return []
        texts = self.path.read_text().splitlines()
        return [json.loads(text) for text in texts if text.endswith("}")]


def note_server(path: Path) -> Line:
    """Return what the journal keeps of a server's file."""
    tensors, header = read_state(path)
    members = header["members"]
    counted = [name for name in members if members[name]["last_round"] == header["round"]]
    return {
        "round": header["round"],
        "counted": sorted(counted) if header["round"] else [],
        "hash": hash_tensors(select(tensors, "server.")),
        "prototypes": tensors["server.prototypes"].tolist(),
        "known": tensors["server.known"].tolist(),
        "numbers": {name: members[name]["number"] for name in members},
        "reasons": {name: members[name]["reason"] for name in members if members[name]["reason"]},
    }


def note_member(path: Path) -> Line:
    """Return what the journal keeps of a member's file."""
    tensors, header = read_tensors(path, MEMBER_FORMAT)
    reply = select(tensors, "reply.prototypes/")
    return {
        "name": header["reply"]["member"],
        "round": header["round"],
        "hash": hash_tensors(select(tensors, "state.", "reply.")),
        "spoken": header["reply"]["spoken"],
        "sums": reply["reply.prototypes/value.prototypes"].to(torch.float64).tolist(),
        "weights": reply["reply.prototypes/extra.weight"].to(torch.float64).tolist(),
    }


def select(tensors: Tree, *prefixes: str) -> Tree:
    """Return the tensors whose names begin with one of the prefixes."""
    return {name: value for name, value in tensors.items() if name.startswith(prefixes)}


class Watcher:
    """A thread that writes a line for every new version of the server's and members' files."""

    def __init__(self, folder: Path, members: Iterable[str], journal: Journal) -> None:
        self.server = folder / "server" / STATE_FILE
        self.members = {name: folder / f"state-{name}" / MEMBER_FILE for name in members}
        self.journal = journal
        self.round = 0
        self.closed = time.monotonic()  # when the last round was
        self.counted: dict[str, int] = {}  # the last round in which each member counted
        self._copy = folder.parent / "watched"
        self._seen: dict[Path, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and end."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()
        self.look()

    def look(self) -> None:
        """Write a line for each file that has changed."""
        if self._has_changed(self.server):
            note = note_server(self._copy)
            if note["round"] > self.round:
                self.round = note["round"]
                self.closed = time.monotonic()
                self.counted |= dict.fromkeys(note["counted"], self.round)
            self.journal.write("server", **note)
        for path in self.members.values():
            if self._has_changed(path):
                self.journal.write("member", **note_member(self._copy))

    def _has_changed(self, path: Path) -> bool:
        """Copy a file if it is a new one; return whether it is."""
        if not path.exists():
            return False
        with path.open("rb") as file:
            status = _identify(file.fileno())
            if self._seen.get(path) == status:
                return False
            self._seen[path] = status
            with self._copy.open("wb") as copy:
                shutil.copyfileobj(file, copy)
        return True


def _identify(descriptor: int) -> tuple[int, int]:
    """Return what tells two versions of a file apart: its place on disk and its time."""
    status = os.fstat(descriptor)
    return status.st_ino, status.st_mtime_ns


class Round(NamedTuple):
    """A round that was closed, as the journal tells it."""

    number: int
    counted: list[str]
    trained: list[str]  # including those whose reply did not count
    hash: str  # of the server's tensors afterwards
    time: float


def collect_rounds(lines: list[Line]) -> tuple[list[Round], dict[tuple[str, int], Line], list[str]]:
    """Return the rounds, what each member sent in each, and what contradicts itself.

    A round that is missing, or two versions of one round, are contradictions.
    """
    problems: list[str] = []
    uploads: dict[tuple[str, int], Line] = {}
    servers: dict[int, Line] = {}
    for line in lines:
        if line["what"] == "member":
            key = (line["name"], line["round"])
            before = uploads.setdefault(key, line)
            if before["hash"] != line["hash"]:
                problems.append(f"{line['name']} has two versions of round {line['round']}")
        if line["what"] == "server":
            before = servers.setdefault(line["round"], line)
            if before["hash"] != line["hash"] or before["counted"] != line["counted"]:
                problems.append(f"the server has two versions of round {line['round']}")
    rounds = []
    for number in range(1, max(servers, default=0) + 1):
        if number not in servers:
            problems.append(f"round {number} was not seen")
            continue
        trained = sorted(name for name, round in uploads if round == number)
        line = servers[number]
        rounds.append(Round(number, line["counted"], trained, line["hash"], line["time"]))
        untrained = sorted(set(line["counted"]) - set(trained))
        if untrained:
            names = ", ".join(untrained)
            problems.append(f"round {number}: {names} counted without having been seen to train")
    return rounds, uploads, problems
