"""Rounds of deployed federations: parity with the simulator, quorums, absent members, bytes."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deployment import (
    DIM,
    EQUAL,
    MIXED,
    WEIGHTS,
    WRONG_REPLIES,
    LocalTransport,
    make_reply,
    simulate,
    trees_equal,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedproto.core import codec
from fedproto.core.metrics import ACCURACIES
from fedproto.core.tensors import flatten_state
from fedproto.core.types import Group, Task, per_class
from fedproto.deploy import round_protocol
from fedproto.deploy.member import train_round
from fedproto.deploy.member_checkpoint import STATE_FILE as MEMBER_FILE
from fedproto.deploy.messages import Message, pack_upload, place_rows, unpack_upload
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_actions import Reply
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.status import read_status
from fedproto.errors import ConfigError, TrainingError
from fedproto.runs.api import _begin
from fedproto.runs.execution import proceed


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedproto",
        "fedproto(weighting=uniform)",
        "fedproto(weighting=eq6)",
        "fedproto(absent=drop)",
        "fedproto(collect=during,regularise=class)",
        "fedavg",
        "fedprox",
        "fedper",
        "fedrep",
        "lg-fedavg",
        "feddistill",
        "fedavgm",
        "fedadam",
        "scaffold",
        "ditto",
        "moon",
        "feddyn",
        "fednh",
        "fedgh",
        "fedtgp(server_epochs=5)",
    ],
)
def test_every_round_gives_the_simulators_numbers(
    algorithm: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    deployment = make_deployment(algorithm)
    models = EQUAL if algorithm in WEIGHTS else MIXED
    servers, result, classes = simulate(member_files, algorithm, models)
    assert classes == tuple("012345")
    for number, expected in enumerate(servers, 1):
        state = deployment.state(rounds=number)
        deployment.serve(state)
        served = flatten_state(state.server)
        simulated = flatten_state(expected)
        assert state.round == number and set(served) == set(simulated)
        for name, value in simulated.items():
            assert served[name].dtype == value.dtype
            torch.testing.assert_close(served[name], value, rtol=0, atol=1e-7)
    for name, client in zip("abc", result.clients, strict=True):
        assert state.members[name].accuracy == pytest.approx(client["accuracy"])


@pytest.mark.parametrize(
    ("algorithm", "balance"),
    [
        ("fedproto", {"sampling": "balanced"}),
        ("fedrep", {"class_weights": "balanced"}),
        ("fedproto", {"local_steps": 5}),
    ],
)
def test_members_are_told_how_to_train_and_the_rate_of_the_round(
    algorithm: str, balance: dict[str, Any], make_deployment: Any, member_files: dict[str, Any]
) -> None:
    """The server's schedule reaches the members as the rate of each request."""
    told = {"optimiser": "adamw", "weight_decay": 0.1, "clip_norm": 0.5, "lr": 0.02, **balance}
    deployment = make_deployment(algorithm, schedule="cosine", warmup=1)
    deployment.terms = replace(deployment.terms, **told)
    models = EQUAL if algorithm in WEIGHTS else MIXED
    settings = {**told, "schedule": "cosine", "warmup": 1}
    servers, _, _ = simulate(member_files, algorithm, models, **settings)
    state = deployment.serve()
    assert state.round == 4
    for name, value in servers[-1].items():
        torch.testing.assert_close(state.server[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["local", "fesem"])
def test_algorithms_that_cannot_be_deployed_are_refused(
    algorithm: str, make_deployment: Any
) -> None:
    with pytest.raises(ConfigError, match=algorithm):
        make_deployment(algorithm, model="mlp", shape="1,8,8").state()


def test_fixed_prototypes_are_refused(make_deployment: Any) -> None:
    """`fixed` is a newcomer's option: its server has one more tensor, which no reply carries."""
    with pytest.raises(ConfigError, match="fixed"):
        make_deployment("fedproto(fixed=true)").state()


def test_weights_need_architecture_and_shape(make_deployment: Any) -> None:
    for missing in ("model", "shape"):
        with pytest.raises(ConfigError, match="model"):
            make_deployment("fedavg", **{missing: ""}).state()


def test_a_size_of_prototypes_is_needed(make_deployment: Any) -> None:
    deployment = make_deployment()
    with pytest.raises(ConfigError, match="dim"):
        ServerState(deployment.settings, replace(deployment.terms, dim=0))


def test_all_classes_can_come_with_the_members(
    make_deployment: Any, member_files: dict[str, Any]
) -> None:
    """Nothing named beforehand: the classes come with those who have them."""
    state = make_deployment(classes="", new_classes=True, rounds=1).serve()
    _, _, classes = simulate(member_files, "fedproto", MIXED, count=1)
    assert sorted(state.classes) == sorted(classes)
    assert state.server["prototypes"].shape == (6, DIM)


def test_a_server_that_trains_prototypes_takes_new_classes(
    make_deployment: Any, member_files: dict[str, Any]
) -> None:
    """The generator has one more embedding for each; those of other classes stay."""
    algorithm = "fedtgp(server_epochs=5)"
    state = make_deployment(algorithm, classes="", new_classes=True, rounds=2).serve()
    assert sorted(state.classes) == list("012345")
    assert state.server["known"].tolist() == [1] * 6
    assert state.server["generator"]["embedding"].shape == (6, DIM)
    assert int(state.server["round"]) == 2


def test_a_trained_head_takes_no_new_classes(make_deployment: Any) -> None:
    with pytest.raises(ConfigError, match=r"^fedgh needs all classes from the start"):
        make_deployment("fedgh", new_classes=True).state()


def test_a_member_leaves_out_classes_where_weights_travel(make_deployment: Any) -> None:
    """Of its data's classes it takes part with two; the third is none of the federation's."""
    deployment = make_deployment("fedavg", classes="0,2,3,4,5", rounds=1)
    deployment.members["a"] = replace(deployment.members["a"], classes="0,2")
    state = deployment.serve()
    assert [record.refused for record in state.members.values()] == [0, 0, 0], "\n".join(
        deployment.said
    )


def test_a_bad_member_changes_no_bit_of_a_federation(make_deployment: Any) -> None:
    """Refused replies of b change nothing for a and c: it is as if b had not replied."""
    kinds = iter(["NaN", "1e30", "negative weight", "another's name"])

    def spoilt(name: str, reply: Message, round: int) -> list[Any]:
        if name != "b":
            return [reply]
        return [
            WRONG_REPLIES[next(kinds)](Message(reply.header, reply.arrays)),
            reply,
            "not a message",
            Message({"error": "x"}, {}),
        ]

    one, other = make_deployment(where="1", quorum=2), make_deployment(where="2", quorum=2)
    bad = one.serve(rewrite=spoilt)
    silent = other.serve(heard=lambda name, round: name != "b")
    assert trees_equal(bad.server, silent.server)
    assert (bad.members["b"].refused, bad.members["b"].failed, bad.members["b"].last_round) == (
        12,
        4,
        0,
    )
    assert (silent.members["b"].refused, silent.members["b"].failed) == (0, 0)


def test_a_reply_of_a_stranger_is_ignored(make_deployment: Any) -> None:
    class Odd(LocalTransport):
        def exchange(
            self, kind: str, requests: dict[str, Message], timeout: float
        ) -> Iterator[Reply]:
            yield Reply("stranger", make_reply("stranger"), 10)
            yield from super().exchange(kind, requests, timeout)

    deployment = make_deployment(rounds=1)
    state = deployment.state()
    serve(state, Odd(deployment.members, state), deployment.said.append)
    assert state.round == 1 and "stranger" not in state.members


def test_a_round_without_replies_stays_open_and_can_be_repeated(make_deployment: Any) -> None:
    deployment, whole = make_deployment(rounds=2), make_deployment(rounds=2, where="whole")
    with pytest.raises(
        TrainingError, match="round 2: 0 replies accepted; a, b, c did not reply, but 3 are needed"
    ):
        deployment.serve(heard=lambda name, round: round == 1)
    assert deployment.state().round == 1
    assert trees_equal(deployment.serve().server, whole.serve().server)


def test_without_a_quorum_no_round_begins(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    deployment = make_deployment(patience=0.01)
    state = deployment.state()
    with pytest.raises(TrainingError, match="2 members are present, but 3 are needed"):
        deployment.serve(state, there=lambda name, round: name != "b")
    assert state.round == 0 and not state.members


def test_one_member_present_twice_is_not_a_quorum_of_two(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    deployment = make_deployment(names="a", quorum=2, patience=0.01)
    state = deployment.state()
    transport = LocalTransport(deployment.members, state)
    transport.find_members = lambda: ["a", "a"]  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="1 members"):
        serve(state, transport, deployment.said.append)


def test_the_server_waits_for_a_quorum(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(round_protocol.time, "sleep", looks.append)
    state = make_deployment(rounds=1).serve(
        there=lambda name, round: name != "b" or len(looks) >= 2
    )
    assert state.round == 1 and len(looks) >= 2 and set(state.members) == set("abc")


def test_only_listed_members_take_part(make_deployment: Any) -> None:
    deployment = make_deployment(members="a, c", quorum=2, rounds=2)
    state = deployment.serve()
    assert set(state.members) == {"a", "c"} and state.members_with_upload() == ["a", "c"]


def test_a_former_member_is_sent_nothing(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1)
    deployment.serve()
    state = deployment.state(rounds=2, members="a,c", quorum=2)
    transport = LocalTransport(deployment.members, state)
    serve(state, transport, deployment.said.append)
    assert {name for name, _ in transport.invitations} == {"a", "c"}


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_a_silent_member_counts_with_its_latest_upload_or_not_at_all(
    absent: str, make_deployment: Any
) -> None:
    """Only b has class 3; a and c share 2 and 4 with it, where b counts only if remembered."""
    deployment = make_deployment(f"fedproto(absent={absent})", rounds=2, quorum=2)
    state = deployment.serve(heard=lambda name, round: name != "b" or round == 1)
    assert state.members["b"].last_round == 1 and state.members["a"].last_round == 2
    uploads = {name: state.upload_of(name) for name in "abc"}
    speakers = "abc" if absent == "remember" else "ac"
    groups = {name: upload["prototypes"] for name, upload in uploads.items()}
    sums = torch.stack([groups[name].sums["prototypes"] for name in speakers]).sum(0)
    weight = torch.stack([groups[name].weight for name in speakers]).sum(0)
    for row in (0, 1, 2, 4, 5):
        torch.testing.assert_close(state.server["prototypes"][row], sums[row] / weight[row])
    three = groups["b"].sums["prototypes"][3] / groups["b"].weight[3]
    torch.testing.assert_close(state.server["prototypes"][3], three)
    assert state.server["known"].all()


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_a_member_that_comes_back_continues_from_its_state(
    absent: str, make_deployment: Any
) -> None:
    deployment = make_deployment(f"fedproto(absent={absent})", rounds=4, quorum=2)
    state = deployment.serve(there=lambda name, round: name != "b" or round in (1, 4))
    assert [state.members[n].last_round for n in "abc"] == [4, 4, 4]
    assert [state.members[n].number for n in "abc"] == [0, 1, 2]
    assert all(record.refused == 0 for record in state.members.values())


def test_a_member_whose_reply_was_late_counts_in_the_next_round(make_deployment: Any) -> None:
    state = make_deployment(rounds=3, quorum=2).serve(
        heard=lambda name, round: name != "b" or round != 2
    )
    assert state.members["b"].last_round == 3 and state.members["b"].refused == 0


def test_a_newcomer_brings_a_class_if_new_classes_are_accepted(make_deployment: Any) -> None:
    deployment = make_deployment(names="abcd", rounds=4, new_classes=True)
    state = deployment.serve(there=lambda name, round: name != "d" or round >= 3)
    assert (
        state.classes == tuple("0123456")
        and state.server["known"].all()
        and state.members["d"].number == 3
    )
    assert state.members["d"].last_round == 4 and state.server["prototypes"].shape == (7, DIM)
    heads = load_file(Path(deployment.members["a"].state) / MEMBER_FILE)
    assert any(name.startswith("state.head.") and len(value) == 7 for name, value in heads.items())


def test_a_newcomer_with_a_new_class_is_refused_if_they_are_not_accepted(
    make_deployment: Any,
) -> None:
    deployment, without = (
        make_deployment(names="abcd", rounds=4),
        make_deployment(rounds=4, where="without"),
    )
    state = deployment.serve(there=lambda name, round: name != "d" or round >= 3)
    assert (
        state.classes == tuple("012345")
        and state.members["d"].refused == 2
        and "'6'" in state.members["d"].reason
    )
    assert trees_equal(state.server, without.serve().server)


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_a_round_with_too_few_replies_is_not_closed(absent: str, make_deployment: Any) -> None:
    """Two of three reply in time: the third is asked again, and the other replies are kept."""
    deployment = make_deployment(f"fedproto(absent={absent})", rounds=2)
    whole = make_deployment(f"fedproto(absent={absent})", rounds=2, where="whole").serve()
    state = deployment.state()
    attempts: list[str] = []

    def late(name: str, round: int) -> bool:
        attempts.append(f"{name}{round}")
        return name != "b" or attempts.count(f"b{round}") > 1

    deployment.serve(state, heard=late)
    assert attempts == ["a1", "b1", "c1", "b1", "a2", "b2", "c2", "b2"]
    assert trees_equal(state.server, whole.server) and state.round == 2
    assert "round 1: 2 replies accepted; b did not reply, but 3 are needed" in "\n".join(
        deployment.said
    )
    assert "round 1: 3 of 3 replies accepted" in deployment.said


def test_a_round_without_a_quorum_ends_the_run_and_can_be_repeated(
    make_deployment: Any,
) -> None:
    deployment, whole = (
        make_deployment(rounds=2, patience=0.01),
        make_deployment(rounds=2, where="whole"),
    )
    deployment.serve(deployment.state(rounds=1))
    with pytest.raises(
        TrainingError, match="round 2: 2 replies accepted; b did not reply, but 3 are needed"
    ):
        deployment.serve(heard=lambda name, round: name != "b")
    kept = deployment.state()
    assert kept.round == 1 and [record.last_round for record in kept.members.values()] == [1, 1, 1]
    assert trees_equal(deployment.serve().server, whole.serve().server)


def test_refused_replies_do_not_count_towards_the_quorum(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1, patience=0.01)
    with pytest.raises(TrainingError, match="round 1: 2 replies accepted, but 3 are needed"):
        deployment.serve(
            rewrite=lambda name, reply, round: [
                WRONG_REPLIES["NaN"](reply) if name == "b" else reply
            ]
        )
    assert deployment.state().round == 0 and "finite" in deployment.state().members["b"].reason


def test_a_member_that_replied_and_went_away_still_counts(make_deployment: Any) -> None:
    """b is late; a, whose answer is here, is gone when b is asked again."""
    deployment = make_deployment(rounds=1)
    asked: list[str] = []

    def late(name: str, round: int) -> bool:
        asked.append(name)
        return name != "b" or asked.count("b") > 1

    state = deployment.serve(heard=late, there=lambda name, round: name != "a" or "b" not in asked)
    assert state.round == 1 and {record.last_round for record in state.members.values()} == {1}


def ledgers(
    member_files: dict[str, Any], algorithm: str, models: dict[str, str], rounds: int
) -> list[list[list[int]]]:
    """Return the simulator's ledger after each round: (values, bytes) up and down per client."""
    data = [member_files["arrays"][name] for name in "abc"]
    options = {"rounds": rounds, "dim": DIM, "engine": "reference"}
    experiment, _ = _begin(
        algorithm, data, ",".join(f"{models[name]}*1" for name in "abc"), None, options
    )
    steps = proceed([experiment], [None], threading.Event())
    found = [experiment.progress.ledger.counts.tolist() for _ in steps]
    return found[:rounds]


@pytest.mark.parametrize(
    "algorithm", ["fedproto", "fedproto(weighting=eq6,absent=drop)", "fedavg", "fedrep"]
)
def test_the_bytes_of_a_round_are_those_of_the_simulators_ledger(
    algorithm: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    """For each member in each round; headers and the last evaluation are counted separately."""
    expected = ledgers(member_files, algorithm, EQUAL if algorithm in WEIGHTS else MIXED, 3)
    deployment = make_deployment(algorithm)
    state = deployment.state(rounds=3)
    transport = LocalTransport(deployment.members, state)
    serve(state, transport, deployment.said.append)
    seats = state.members.values()
    assert [[record.bytes_up, record.bytes_down] for record in seats] == [
        [row[1], row[3]] for row in expected[-1]
    ]
    for number in (1, 2, 3):
        sent = dict(transport.invitations[3 * number - 3 : 3 * number])
        before = expected[number - 2] if number > 1 else [[0] * 4] * 3
        down = [
            after[3] - earlier[3]
            for after, earlier in zip(expected[number - 1], before, strict=True)
        ]
        assert [sent[name].count_bytes() for name in "abc"] == down, f"round {number}"
    assert all(record.beside_up > 0 and record.beside_down > 0 for record in seats)
    shown = read_status(state.path)["members"]["a"]
    assert (
        shown["bytes_up"] == expected[-1][0][1]
        and shown["beside_up"] == state.members["a"].beside_up
    )


def test_a_member_is_sent_the_prototypes_of_its_own_classes(make_deployment: Any) -> None:
    """It is sent all of them for the last evaluation, and when its classes are not known yet."""
    deployment = make_deployment(names="abcd", rounds=3, new_classes=True)
    state = deployment.state()
    transport = LocalTransport(
        deployment.members, state, there=lambda name, round: name != "d" or round > 1
    )
    serve(state, transport, deployment.said.append)
    known = {
        (name, request.header["round"]): request.header["known"]
        for name, request in transport.invitations
    }
    assert (
        known["a", 1] == []
        and known["a", 2] == ["0", "1", "2"]
        and known["b", 3] == ["2", "3", "4"]
    )
    assert known["d", 2] == list("012345") and known["d", 3] == ["1", "6"]
    assert known["a", 4] == list("0123456"), "to measure over all classes"
    assert set(state.members["a"].accuracy) == set(ACCURACIES)


def test_flowers_record_carries_the_bytes_of_the_codec(make_deployment: Any) -> None:
    pytest.importorskip("flwr")
    from fedproto.deploy.flower_transport import to_record

    deployment = make_deployment(rounds=1)
    state = deployment.state()
    reply = train_round(state.make_request("a"), deployment.members["a"])
    record = to_record(reply).array_records["arrays"]
    payloads = reply.payloads()
    assert list(record) == ["prototypes"] and record["prototypes"].data == payloads["prototypes"]
    spoken = reply.header["spoken"]
    upload = place_rows(unpack_upload(reply), spoken, state.classes, state.layouts)
    assert payloads == codec.encode_upload(upload)
    assert not to_record(state.make_request("a")).array_records["arrays"], (
        "nothing is known, and nothing is sent"
    )


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 40))
def test_numpy_and_torch_write_the_same_message(speaks: list[bool], dim: int) -> None:
    weight = torch.tensor([3.0 if each else 0.0 for each in speaks])
    sums = {"prototypes": torch.randn(len(speaks), dim)}
    upload = {"prototypes": Group(sums, weight, {"holders": weight})}
    layouts = per_class(Task(len(speaks), dim, 1, 0), ("holders",), prototypes=(dim,))
    sent = pack_upload(upload, tuple(map(str, range(len(speaks)))), layouts)
    payloads = sent.payloads()
    assert payloads == codec.encode_upload(upload)
    assert sent.count_bytes() == len(payloads["prototypes"])
    back = codec.decode(payloads["prototypes"])
    assert {f"prototypes/{name}" for name in back} == set(sent.arrays)
    for name, value in back.items():
        assert np.array_equal(sent.arrays[f"prototypes/{name}"], value)


def test_a_member_that_is_late_is_told_by_how_much(make_deployment: Any) -> None:
    """In round 2 that nothing came of it; once its reply has come, in round 3, how late it was."""
    deployment = make_deployment(rounds=3, timeout=600.0, quorum=2)
    said: list[str] = []
    state = deployment.state()
    transport = LocalTransport(
        deployment.members, state, heard=lambda name, round: name != "c" or round == 3
    )

    def arrive_late(name: str, round: int) -> None:
        if (name, round) == ("b", 2):
            transport.lateness = {"c": 212.4}

    transport.after = arrive_late
    serve(state, transport, said.append)
    told = {}
    for name, request in transport.invitations:
        if name == "c" and "refused" in request.header:
            told[request.header["round"]] = request.header["refused"]
    late = "its reply came 212 s after the 600 s that a round waits"
    assert told[2] == "it did not reply within 600 s"
    assert told[3].startswith(late)
    assert any(f"c: {late}" in sentence for sentence in said)
    record = read_status(deployment.folder)["members"]["c"]
    assert (record["late"], record["late_seconds"], record["reason"]) == (2, 212.4, "")


def test_evaluations_that_are_too_large_together_are_asked_for_in_turns(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = make_deployment(rounds=1, where="together").serve()
    deployment = make_deployment(rounds=1)
    state = deployment.state()
    batches = []

    class Watching(LocalTransport):
        def exchange(
            self, kind: str, requests: dict[str, Message], timeout: float
        ) -> Iterator[Reply]:
            if kind == "evaluate":
                batches.append("".join(requests))
            yield from super().exchange(kind, requests, timeout)

    request_bytes = (4 * DIM + 4) * len(state.classes)  # with the numbers of the rows
    monkeypatch.setattr(round_protocol, "EVALUATION_BYTES", request_bytes)
    serve(state, Watching(deployment.members, state), deployment.said.append)
    assert batches == ["ab", "c"]
    for name in "abc":
        assert state.members[name].accuracy == together.members[name].accuracy
        assert state.members[name].beside_down == together.members[name].beside_down
