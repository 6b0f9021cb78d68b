"""Replay a soak's rounds in one process, and hold every round to what the federation left.

The replay is the package's own server and members, without Flower and without any kill: in each
round, those train who were seen to train, and those count who counted. If a reply was lost, counted
twice, or answered from a wrong state, the hashes of that round and of all later ones differ. A
second check shares no code with the package: it adds the members' uploads by numpy.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak_federation import CLASSES, prepare_replay
from benchmarks.soak_record import Line, Round, collect_rounds, note_member, note_server
from fedproto.deploy.member import train_round
from fedproto.deploy.member_checkpoint import find_state_file
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import MemberSettings, ServerSettings, TrainingTerms

MAX_PROBLEMS = 20  # that are listed


def verify(lines: list[Line], files: dict[str, dict[str, str]], folder: Path) -> dict[str, Any]:
    """Return what a journal says, and whether it is what it must be.

    files   the settings of each member's file
    folder  for the replay; what is there is deleted
    """
    rounds, uploads, problems = collect_rounds(lines)
    by_hand = None
    if not problems:
        by_hand = add_by_hand(uploads, lines, rounds)
        shutil.rmtree(folder, ignore_errors=True)
        members, settings, terms = prepare_replay(folder, files)
        numbers = next(line["numbers"] for line in lines if line.get("numbers"))
        problems = replay(rounds, uploads, numbers, members, settings, terms)
    rows = []
    for each in rounds:
        counted, trained = "".join(each.counted), "".join(each.trained)
        rows.append([each.number, counted, trained, each.hash[:16], round(each.time, 2)])
    return {
        "machine": {
            "cores": os.cpu_count(),
            "platform": platform.machine(),
            "python": platform.python_version(),
        },
        "rounds": rows,
        "uploads": count_uploads(rounds, list(files)),
        "reasons": count_reasons(lines),
        "problems": problems,
        "largest difference from numpy": by_hand,
        "journal": [line for line in lines if line["what"] not in ("server", "member")],
    }


def replay(
    rounds: list[Round],
    uploads: dict[tuple[str, int], Line],
    numbers: dict[str, int],
    members: dict[str, MemberSettings],
    settings: ServerSettings,
    terms: TrainingTerms,
) -> list[str]:
    """Return the rounds and uploads that differ from the replay, in any bit; none if all is well.

    numbers  the members' numbers, by which their random numbers are drawn
    members  whose states are written to new folders
    """
    server = ServerState(settings, terms)
    for name in sorted(numbers, key=lambda each: numbers[each]):
        server.make_request(name)
    problems: list[str] = []
    for each in rounds:
        requests = {name: server.make_request(name) for name in each.trained}
        expected = server.expect_replies(frozenset(each.counted))
        for name in each.trained:
            reply = train_round(requests[name], members[name])
            trained = note_member(find_state_file(members[name]))
            if trained["hash"] != uploads[name, each.number]["hash"]:
                problems.append(f"round {each.number}: {name} trained something else")
            if name in each.counted:
                server.accept_reply(name, reply, expected)
        server.close_round()
        server.save()
        if note_server(server.path)["hash"] != each.hash:
            problems.append(f"round {each.number}: the server's prototypes differ")
        if len(problems) >= MAX_PROBLEMS:
            break
    return problems


def add_by_hand(
    uploads: dict[tuple[str, int], Line], lines: list[Line], rounds: list[Round]
) -> float:
    """Return the largest difference of a prototype from the mean of what members sent.

    A prototype is the mean over all who ever spoke of its class, by their latest upload that
    counted, weighted by their number of samples. If another class is known, this is infinity.
    """
    servers = {line["round"]: line for line in lines if line["what"] == "server"}
    latest: dict[str, Line] = {}
    largest = 0.0
    for each in rounds:
        for name in each.counted:
            latest[name] = uploads[name, each.number]
        expected, weights = _add_uploads(list(latest.values()))
        found = np.array(servers[each.number]["prototypes"])
        spoken = weights > 0
        if not np.array_equal(spoken, np.array(servers[each.number]["known"]) > 0):
            return float("inf")
        differences = found[spoken] - expected[spoken] / weights[spoken, None]
        largest = max(largest, float(np.abs(differences).max()))
    return largest


def _add_uploads(uploads: list[Line]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of embeddings and the number of samples, by class."""
    sums = np.zeros((len(CLASSES), len(uploads[0]["sums"][0])))
    weights = np.zeros(len(CLASSES))
    for upload in uploads:
        for place, name in enumerate(upload["spoken"]):
            row = CLASSES.index(name)
            sums[row] += np.array(upload["sums"][place])
            weights[row] += upload["weights"][place]
    return sums, weights


def count_uploads(rounds: list[Round], members: list[str]) -> dict[str, int]:
    """Return how many of all members' rounds counted, were trained in vain, or were missed."""
    counted = sum(len(each.counted) for each in rounds)
    trained = sum(len(each.trained) for each in rounds)
    total = len(rounds) * len(members)
    return {
        "member-rounds": total,
        "counted": counted,
        "trained, but not counted": trained - counted,
        "not trained": total - trained,
    }


def count_reasons(lines: list[Line]) -> dict[str, int]:
    """Return how often the server gave each reason why a reply did not count, once per round."""
    counts: Counter[str] = Counter()
    seen: set[tuple[int, str]] = set()
    for line in lines:
        if line["what"] != "server":
            continue
        for name, reason in line["reasons"].items():
            if name not in line["counted"] and (line["round"], name) not in seen:
                seen.add((line["round"], name))
                counts[re.sub(r"\d+(\.\d+)?", "N", reason)] += 1
    return dict(counts.most_common())
