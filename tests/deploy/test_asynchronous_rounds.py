"""Asynchronous rounds of a deployed server: late members, refusals, restarts, and identities."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.deployment import (
    SUMS,
    WEIGHT,
    WRONG_REPLIES,
    Deployment,
    LocalTransport,
    clone_tree,
    make_reply,
    small_state,
    trees_equal,
    without_changes,
)

from fedproto.core.tensors import flatten_state
from fedproto.core.types import Tree
from fedproto.deploy.messages import Message
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_actions import Reply
from fedproto.deploy.server_backup import back_up_server, restore_server
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import split_run_config
from fedproto.errors import ConfigError, Refused, TrainingError


@dataclass
class LateTransport(LocalTransport):
    """Members in this process whose replies come after some calls of `receive`: 1 if not named."""

    delays: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    waiting: list[tuple[int, Reply]] = field(default_factory=list)
    servers: dict[int, Tree] = field(default_factory=dict)  # by the round that was requested

    def send(self, kind: str, requests: dict[str, Message], timeout: float) -> None:
        self.servers[self.state.round + 1] = clone_tree(self.state.server)
        for reply in self.exchange(kind, requests, timeout):
            due = self.calls + self.delays.get(reply.member, 1)
            self.waiting.append((due, reply))

    def receive(self) -> list[Reply]:
        self.calls += 1
        arrived = [reply for due, reply in self.waiting if due <= self.calls]
        self.waiting = [each for each in self.waiting if each[0] > self.calls]
        return arrived


def serve_late(
    deployment: Deployment, state: ServerState | None = None, **transport: Any
) -> tuple[ServerState, LateTransport]:
    state = state or deployment.state()
    late = LateTransport(deployment.members, state, **transport)
    serve(state, late, deployment.said.append)
    return state, late


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedproto.deploy.asynchronous_rounds.FIRST_PAUSE_SECONDS", 0.0)


#: Those whose server, members or uploads have several trees.
NESTED = ["fedadam", "scaffold", "feddyn", "fednh", "fedgh", "fedtgp(server_epochs=3)"]


@pytest.mark.parametrize(
    "algorithm", ["fedproto", "fedproto(absent=drop)", "fedavg", "fedper", *NESTED]
)
def test_waiting_for_everybody_is_synchronous(algorithm: str, make_deployment: Any) -> None:
    synchronous = make_deployment(algorithm).serve()
    state, _ = serve_late(make_deployment(algorithm, buffer=3, where="late"))
    assert trees_equal(flatten_state(state.server), flatten_state(synchronous.server))
    assert [record.last_round for record in state.members.values()] == [4, 4, 4]
    for name, record in state.members.items():
        assert record.accuracy == synchronous.members[name].accuracy
        assert record.bytes_up == synchronous.members[name].bytes_up
        assert record.bytes_down == synchronous.members[name].bytes_down


@pytest.mark.parametrize("algorithm", NESTED)
def test_a_late_member_counts_with_all_its_groups(algorithm: str, make_deployment: Any) -> None:
    deployment = make_deployment(algorithm, buffer=2, quorum=2, rounds=4)
    state, _ = serve_late(deployment, delays={"b": 3})
    assert state.round == 4 and state.members["b"].last_round == 3
    assert [record.refused + record.failed for record in state.members.values()] == [0, 0, 0]
    for name, value in flatten_state(state.server).items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_what_an_always_late_member_knows_is_learned(absent: str, make_deployment: Any) -> None:
    """Only b has class 3, and b takes three times as long as a round lasts.

    In synchronous rounds, which close with a quorum of two, it is never heard; in asynchronous ones
    it is heard every third round, and its class has a prototype.
    """
    algorithm = f"fedproto(absent={absent})"
    synchronous = make_deployment(algorithm, quorum=2, rounds=6)
    lost = synchronous.serve(heard=lambda name, round: name != "b")
    place = lost.classes.index("3")
    assert not lost.server["known"][place]
    deployment = make_deployment(algorithm, quorum=2, rounds=6, buffer=2, where="late")
    state, transport = serve_late(deployment, delays={"b": 3})
    assert state.server["known"][state.classes.index("3")] == 1
    assert state.members["b"].last_round == 6 and state.members["b"].staleness == 2
    asked = [request.header["round"] for name, request in transport.invitations if name == "b"]
    assert asked[:3] == [1, 4, 7], "b is asked again when the round of its reply is closed"
    assert "(late: b by 2)" in "\n".join(deployment.said)


def test_a_late_model_counts_by_its_change_and_less(make_deployment: Any) -> None:
    """Round 3 is made of a and c, asked in round 3, and of b, asked in round 1."""
    deployment = make_deployment("fedavg", buffer=2, quorum=2, rounds=3)
    replies: dict[tuple[str, int], Message] = {}

    def note(name: str, reply: Message, round: int) -> list[Message]:
        replies[name, round] = reply
        return [reply]

    state, transport = serve_late(deployment, delays={"b": 3}, rewrite=note)
    now = transport.servers[3]
    start = transport.servers[1]
    for name, found in state.server.items():
        total = torch.zeros_like(found, dtype=torch.float64)
        weights = 0.0
        for member, round in (("a", 3), ("c", 3), ("b", 1)):
            arrays = replies[member, round].groups()["model"]
            weight = float(arrays["extra.weight"])
            value = torch.from_numpy(arrays[f"value.{name}"]).double() / weight
            if round == 1:
                value = value - start[name] + now[name]
                weight *= (1 + 2) ** -0.5
            total += weight * value
            weights += weight
        torch.testing.assert_close(found.double(), total / weights, rtol=0, atol=1e-6)


def test_a_reply_that_is_too_late_is_refused_and_its_member_asked_anew(
    make_deployment: Any,
) -> None:
    deployment = make_deployment(buffer=2, quorum=2, rounds=6, max_staleness=1)
    state, transport = serve_late(deployment, delays={"b": 3})
    record = state.members["b"]
    assert record.refused >= 1 and record.last_round == 0
    assert "it was requested 2 rounds ago; at most 1 are accepted" in "\n".join(deployment.said)
    asked = [request.header["round"] for name, request in transport.invitations if name == "b"]
    assert len(asked) >= 2 and asked[1] > 1


@pytest.mark.parametrize("kind", ["NaN", "1e30", "negative weight", "another's name"])
def test_a_bad_member_changes_no_bit(kind: str, make_deployment: Any) -> None:
    """Refused replies of b change nothing for a and c: it is as if b had not replied."""

    def spoil(name: str, reply: Message, round: int) -> list[Any]:
        if name != "b":
            return [reply]
        wrong = WRONG_REPLIES[kind]
        return [wrong(reply), reply, "not a message", Message({"error": "x"}, {})]

    one = make_deployment(where="1", buffer=2, quorum=2)
    other = make_deployment(where="2", buffer=2, quorum=2)
    bad, _ = serve_late(one, rewrite=spoil)
    silent, _ = serve_late(other, heard=lambda name, round: name != "b")
    assert trees_equal(bad.server, silent.server)
    assert bad.members["b"].last_round == 0 and bad.members["b"].refused >= 2


def test_a_member_without_a_request_cannot_reply(make_deployment: Any) -> None:
    class Odd(LateTransport):
        def receive(self) -> list[Reply]:
            stranger = Reply("stranger", make_reply("stranger"), 10)
            return [stranger, *super().receive()]

    deployment = make_deployment(rounds=1, buffer=3)
    state = deployment.state()
    serve(state, Odd(deployment.members, state), deployment.said.append)
    assert state.round == 1 and "stranger" not in state.members


def test_a_reply_to_an_older_request_is_refused(tmp_path: Any) -> None:
    """A member that was asked again since answers the newer request, or not at all."""
    state = small_state(tmp_path, buffer=1)
    pending = frozenset("ab")
    state.accept_reply("a", make_reply("a"), state.expect_reply("a", pending))
    state.close_round()
    state.make_request("b")
    with pytest.raises(Refused, match="it is of round 1, but this is round 2"):
        state.accept_reply("b", make_reply("b", 1), state.expect_reply("b", pending))
    state.accept_reply("b", make_reply("b", 2), state.expect_reply("b", pending))


@pytest.mark.parametrize("spoken", [("x", "y"), ("x", "v")])
def test_a_late_reply_counts_though_classes_came_since(
    spoken: tuple[str, str], tmp_path: Any
) -> None:
    """Class w came in round 1; b, asked before it was known, may bring another one in round 2."""
    state = small_state(tmp_path, buffer=1, new_classes=True)
    pending = frozenset("ab")
    state.accept_reply("a", make_reply("a", 1, ("x", "w")), state.expect_reply("a", pending))
    state.close_round()
    reply = make_reply("b", 1, spoken)
    state.accept_reply("b", reply, state.expect_reply("b", pending))
    state.close_round()
    assert state.members["b"].staleness == 1
    place = state.classes.index(spoken[1])
    found = state.server["prototypes"][place]
    expected = reply.arrays[SUMS][1] / reply.arrays[WEIGHT][1]  # it is the only one of its class
    assert torch.allclose(found, torch.from_numpy(expected))
    assert state.server["known"][state.classes.index("w")] == 1


def test_a_killed_server_asks_everybody_anew(make_deployment: Any) -> None:
    """Open requests are not in its file; members that trained the round answer from theirs."""
    deployment = make_deployment(buffer=2, quorum=2, rounds=2)
    state, _ = serve_late(deployment, delays={"b": 9})
    assert state.members["b"].last_round == 0
    again, transport = serve_late(deployment, deployment.state(rounds=4))
    trained = [name for name, request in transport.invitations if request.header["round"] == 3]
    assert trained == ["a", "b", "c"]
    assert again.round == 4 and again.members["b"].last_round >= 3
    assert all(record.refused == 0 for record in again.members.values())


def test_too_few_replies_end_the_run_and_can_be_waited_for_again(make_deployment: Any) -> None:
    deployment = make_deployment(buffer=3, quorum=2, rounds=1, timeout=0.05, patience=0.05)
    with pytest.raises(TrainingError, match="round 1: 2 replies accepted, but 3 are needed"):
        serve_late(deployment, heard=lambda name, round: name != "b")
    state, _ = serve_late(deployment)
    assert state.round == 1


def test_a_member_that_does_not_reply_in_time_is_asked_again(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedproto.deploy.asynchronous_rounds.PRESENCE_SECONDS", 0.0)
    deployment = make_deployment(buffer=3, quorum=2, rounds=1, timeout=0.05, patience=600.0)
    attempts: list[str] = []

    def hear(name: str, round: int) -> bool:
        attempts.append(name)
        return name != "b" or attempts.count("b") > 1

    state, _ = serve_late(deployment, heard=hear)
    assert attempts.count("b") == 2 and attempts.count("a") == 1
    assert "round 1: b did not reply in time" in deployment.said
    assert state.members["b"].last_round == 1


def test_a_refused_member_is_left_alone_for_longer_each_time(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("fedproto.deploy.asynchronous_rounds.FIRST_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked: list[float] = []

    class Ticking(LateTransport):
        def receive(self) -> list[Reply]:
            now[0] += 0.25
            return super().receive()

    def spoil(name: str, reply: Message, round: int) -> Iterator[Message]:
        if name == "b":
            asked.append(now[0])
        yield WRONG_REPLIES["NaN"](reply) if name == "b" and len(asked) < 4 else reply

    deployment = make_deployment(buffer=3, quorum=2, rounds=1, timeout=60.0, patience=60.0)
    state = deployment.state()
    serve(state, Ticking(deployment.members, state, rewrite=spoil), deployment.said.append)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(asked) == 4 and pauses == sorted(pauses) and pauses[-1] >= 2 * pauses[0]


def test_a_buffer_of_more_replies_than_members_is_refused() -> None:
    settings, _ = split_run_config({"buffer": 2, "members": "a,b", "max-staleness": 3}, "here")
    assert (settings.buffer, settings.staleness, settings.max_staleness) == (2, 0.5, 3)
    with pytest.raises(ConfigError, match="buffer is 3, but `members` lists only 2"):
        split_run_config({"buffer": 3, "members": "a,b"}, "here")
    with pytest.raises(ConfigError, match="buffer must be a"):
        split_run_config({"buffer": -1}, "here")


def test_a_restored_server_goes_on_after_the_rounds_of_its_members(make_deployment: Any) -> None:
    deployment = make_deployment(buffer=3)
    state, _ = serve_late(deployment, deployment.state(rounds=1))
    backup = back_up_server(state.path, deployment.folder / "backups").path
    serve_late(deployment, deployment.state(rounds=3))
    state.path.unlink()
    restore_server(backup, state.path.parent)
    state, _ = serve_late(deployment, deployment.state(rounds=4))
    assert [event["event"] for event in without_changes(state.history)] == [
        "restored",
        "passed over",
    ]
    assert [member.last_round for member in state.members.values()] == [4, 4, 4]
    assert [member.staleness for member in state.members.values()] == [0, 0, 0]
