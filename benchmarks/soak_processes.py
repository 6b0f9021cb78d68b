"""The processes and files of a deployed federation, looked at from outside, by /proc.

A process belongs to the server or to a member by its FLWR_HOME, which the scripts of
`fedproto deploy init` set to `.flwr-NAME` in the federation's folder.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

#: What a process does: the first and second process of a supervisor, and what the second forks.
NODES = ("superlink", "supernode")
ROLES = ("supervisor", *NODES, "worker", "superexec", "fork")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """A process of the federation."""

    number: int
    parent: int
    owner: str  # "server", or a member's name
    role: str  # one of ROLES, or "other": a shell, or a command of Flower
    started: int  # in ticks since the machine's start
    rss: int  # bytes; pages that a fork shares with its parent are counted in both
    threads: int
    descriptors: int

    @property
    def life(self) -> str:
        """What names this process among all that ever ran."""
        return f"{self.number}-{self.started}"


class _Raw(NamedTuple):
    """A process, before it is known what it does."""

    owner: str
    words: list[str]
    fields: list[str]  # of /proc/NUMBER/stat, from the state on
    descriptors: int


def find_processes(folder: Path) -> list[Process]:
    """Return the processes of the federation in a folder, all but this one."""
    raw: dict[int, _Raw] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # somebody else's, or it has ended
            found = _read_process(entry, f"FLWR_HOME={folder.absolute()}/.flwr")
            if found is not None and int(entry.name) != os.getpid():
                raw[int(entry.name)] = found
    processes = []
    for number, each in raw.items():
        state = each.fields[0]
        if state == "Z":
            continue
        processes.append(
            Process(
                number=number,
                parent=int(each.fields[1]),
                owner=each.owner,
                role=_find_role(number, raw),
                started=int(each.fields[19]),
                rss=int(each.fields[21]) * _PAGE_BYTES,
                threads=int(each.fields[17]),
                descriptors=each.descriptors,
            )
        )
    return processes


def _read_process(entry: Path, mark: str) -> _Raw | None:
    """Return a process if its environment has the mark, which its owner's name follows."""
    owner = None
    for word in (entry / "environ").read_bytes().decode(errors="replace").split("\0"):
        if word == mark or word.startswith(f"{mark}-"):
            owner = word.removeprefix(mark).removeprefix("-")
    if owner is None:
        return None
    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    fields = (entry / "stat").read_text().rpartition(")")[2].split()
    return _Raw(owner, words, fields, len(os.listdir(entry / "fd")))


def _find_role(number: int, raw: dict[int, _Raw]) -> str:
    words = raw[number].words
    if "fedproto.deploy.supervisor" in words:
        return "supervisor"
    if "fedproto.deploy.flower_node" in words:
        return next((word for word in words if word in NODES), "other")
    if "fedproto.deploy.warm_worker" not in words:
        return "other"
    parent = int(raw[number].fields[1])
    if parent not in raw or "fedproto.deploy.supervisor" in raw[parent].words:
        return "worker"
    siblings = [each for each in raw if raw[each].fields[1] == raw[number].fields[1]]
    first = min(siblings, key=lambda each: (int(raw[each].fields[19]), each))
    return "superexec" if number == first else "fork"


def describe(process: Process) -> list[Any]:
    """Return what a sample keeps of a process: owner, role, life, KiB, threads, descriptors."""
    kilobytes = process.rss // 1024
    return [
        process.owner,
        process.role,
        process.life,
        kilobytes,
        process.threads,
        process.descriptors,
    ]


def measure_files(folder: Path) -> dict[str, list[int]]:
    """Return the number and the bytes of a federation's files, by what they are."""
    measured: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):  # it has just been replaced
                size = path.stat().st_size
                kind = _find_kind(path.relative_to(folder))
                measured[kind][0] += 1
                measured[kind][1] += size
    return {kind: measured[kind] for kind in sorted(measured)}


def _find_kind(path: Path) -> str:
    """Return what a file is, by its path in the federation's folder."""
    top = path.parts[0]
    if path.name.startswith("flower.db"):
        return "Flower's database" if path.name == "flower.db" else f"Flower's {path.suffix[1:]}"
    if top == "server":
        return "the server's state"
    if top.startswith("state-"):
        return "the members' states"
    if top == "logs":
        return "logs"
    if top.startswith(".flwr"):
        return "Flower's homes"
    if top == "tmp":
        return "temporary files"
    return "scripts, keys and data"
