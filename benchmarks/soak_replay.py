"""Replay a soak's rounds in one process, and hold every round to what the federation left.

The replay is the package's own server and members, without Flower and without any kill: in each
round, those train who were seen to train, and those count who counted. If a reply was lost, counted
twice, or answered from a wrong state, the hashes of that round and of all later ones differ. A
second check shares no code with the package: it adds the members' uploads by numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak_record import Line, Round, note_member, note_server
from fedproto.deploy.member import train_round
from fedproto.deploy.member_checkpoint import find_state_file
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import MemberSettings, ServerSettings, TrainingTerms

MAX_PROBLEMS = 20  # that are listed


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
    for round in rounds:
        requests = {name: server.make_request(name) for name in round.trained}
        expected = server.expect_replies(frozenset(round.counted))
        for name in round.trained:
            reply = train_round(requests[name], members[name])
            trained = note_member(find_state_file(members[name]))
            if trained["hash"] != uploads[name, round.number]["hash"]:
                problems.append(f"round {round.number}: {name} trained something else")
            if name in round.counted:
                server.accept_reply(name, reply, expected)
        server.close_round()
        server.save()
        found = note_server(server.path)
        if found["hash"] != round.hash:
            problems.append(f"round {round.number}: the server's prototypes differ")
        if len(problems) >= MAX_PROBLEMS:
            break
    return problems


def add_by_hand(lines: list[Line], rounds: list[Round], classes: list[str]) -> float:
    """Return the largest difference of a prototype from the mean of what members sent.

    A prototype is the mean over all who ever spoke of its class, by their latest upload that
    counted, weighted by their number of samples (Eq. 6).
    """
    uploads = {(line["name"], line["round"]): line for line in lines if line["what"] == "member"}
    servers = {line["round"]: line for line in lines if line["what"] == "server"}
    latest: dict[str, Line] = {}
    largest = 0.0
    for round in rounds:
        for name in round.counted:
            latest[name] = uploads[name, round.number]
        expected = _mean_of_uploads(list(latest.values()), classes)
        found = np.array(servers[round.number]["prototypes"])
        spoken = ~np.isnan(expected[:, 0])
        if not np.array_equal(spoken, np.array(servers[round.number]["known"]) > 0):
            return float("inf")
        largest = max(largest, float(np.abs(found[spoken] - expected[spoken]).max()))
    return largest


def _mean_of_uploads(uploads: list[Line], classes: list[str]) -> np.ndarray:
    """Return each class's weighted mean; nan where nobody spoke."""
    dim = len(uploads[0]["sums"][0])
    sums = np.zeros((len(classes), dim))
    weights = np.zeros(len(classes))
    for upload in uploads:
        for place, name in enumerate(upload["spoken"]):
            row = classes.index(name)
            sums[row] += np.array(upload["sums"][place])
            weights[row] += upload["weights"][place]
    with np.errstate(invalid="ignore"):
        return sums / weights[:, None]


def count_uploads(rounds: list[Round], members: list[str]) -> dict[str, Any]:
    """Return how many of all members' rounds counted, were trained in vain, or were missed."""
    counted = sum(len(round.counted) for round in rounds)
    trained = sum(len(round.trained) for round in rounds)
    total = len(rounds) * len(members)
    return {
        "member-rounds": total,
        "counted": counted,
        "trained, but not counted": trained - counted,
        "not trained": total - trained,
    }
