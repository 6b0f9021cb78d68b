"""Messages as Flower's records, the names of nodes, and the nonce that a reply must repeat."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import io
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from helpers.deployment import (
    make_flower_transport,
    make_reply,
    pretend_task,
    small_state,
)
from safetensors.torch import save as save_tensors

from fedproto.core import codec
from fedproto.deploy.flower_transport import FlowerTransport, _Answer, to_record
from fedproto.deploy.messages import Message
from fedproto.errors import Refused


@pytest.fixture(autouse=True)
def _pretend_task(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_task(monkeypatch)


#: Makes the header of a reply out of the request's.
ReplyHeader = Callable[[dict[str, Any]], dict[str, Any]]


class OneNodeTransport(FlowerTransport):
    """A transport whose one node replies with a header made out of the request's."""

    def __init__(self, reply_header: ReplyHeader) -> None:
        node = SimpleNamespace(node_id=7, name="", status="online")
        self.grid = SimpleNamespace(get_nodes=lambda: [node])  # type: ignore[assignment]
        self.reply_header = reply_header
        self.names = {}
        self.registered = set()
        self._sent_bytes = {}

    def _send_and_pull(
        self, requests: dict[int, Message], kind: str, timeout: float
    ) -> Iterator[_Answer]:
        for node, request in requests.items():
            header = request.header | {"nonce": "the nonce of this request"}
            sent = replace(request, header=header)
            content = to_record(Message(self.reply_header(header), {}))
            reply: Any = SimpleNamespace(
                content=content, has_content=lambda: True, has_error=lambda: False
            )
            yield _Answer(node, sent, reply)


def repeat_nonce(sent: dict[str, Any]) -> dict[str, Any]:
    return {"member": "a", "nonce": sent["nonce"]}


WRONG_NONCES: dict[str, ReplyHeader] = {
    "another nonce": lambda sent: {"member": "a", "nonce": "the nonce of another request"},
    "no nonce": lambda sent: {"member": "a"},
    "null": lambda sent: {"member": "a", "nonce": None},
    "a part of it": lambda sent: {"member": "a", "nonce": sent["nonce"][:-1]},
    "a list of it": lambda sent: {"member": "a", "nonce": [sent["nonce"]]},
}


def test_a_reply_that_repeats_the_nonce_is_believed() -> None:
    transport = OneNodeTransport(repeat_nonce)
    assert transport.find_members() == ["a"]
    (reply,) = transport.exchange("train", {"a": Message({"round": 3}, {})}, 1)
    assert reply.member == "a"
    assert isinstance(reply.content, Message)
    assert reply.content.header["member"] == "a"
    assert reply.bytes > 0


@pytest.mark.parametrize("reply_header", WRONG_NONCES.values(), ids=list(WRONG_NONCES))
def test_a_reply_with_another_nonce_is_refused(reply_header: ReplyHeader) -> None:
    """Flower does not check that a reply comes from the node's key: anybody could have sent it."""
    transport = OneNodeTransport(reply_header)
    transport.names = {7: "a"}
    (reply,) = transport.exchange("train", {"a": Message({"round": 3}, {})}, 1)
    assert reply.member == "a"
    assert isinstance(reply.content, str)
    assert "does not answer the request that was sent" in reply.content


@pytest.mark.parametrize("reply_header", WRONG_NONCES.values(), ids=list(WRONG_NONCES))
def test_a_reply_with_another_nonce_states_no_name(reply_header: ReplyHeader) -> None:
    assert OneNodeTransport(reply_header).find_members() == []


@pytest.mark.parametrize(
    "sent",
    [
        Message({}, {}),
        Message(
            {"known": [], "n": 1, "x": 1.5, "word": "Äß\n", "none": None, "yes": True},
            {"empty": np.zeros((0, 4), np.float32)},
        ),
        Message(
            {"spoken": ["a", ""]},
            {"one": np.array(3.0, np.float32), "f8": np.ones((2, 3)), "f2": np.ones(2, "f2")},
        ),
    ],
)
def test_records_carry_messages(sent: Message) -> None:
    from fedproto.deploy.flower_transport import count_bytes, from_record, to_record

    back = from_record(to_record(sent))
    assert back.header == sent.header and set(back.arrays) == set(sent.arrays)
    for name, value in sent.arrays.items():
        assert back.arrays[name].dtype == value.dtype and back.arrays[name].shape == value.shape
        assert np.array_equal(back.arrays[name], value)
    assert count_bytes(to_record(sent)) >= sum(value.nbytes for value in sent.arrays.values())


def hostile_records() -> dict[str, Any]:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedproto.deploy.flower_transport import MAX_HEADER_CHARACTERS, MAX_PAYLOADS

    def record(text: Any = "{}", arrays: Any = None) -> Any:
        found = {"header": ConfigRecord({"json": text})} if text is not None else {}
        return RecordDict(found | {"arrays": ArrayRecord() if arrays is None else arrays})

    def array(data: bytes, kind: str = "safetensors") -> Any:
        return ArrayRecord({"payload": Array("uint8", (len(data),), kind, data)})

    good = codec.encode({"x": np.ones(4, np.float32)})
    half = save_tensors({"x": torch.ones(4, dtype=torch.bfloat16)})
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    long = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}' + b" " * 2**20 + b"}"
    one = Array("uint8", (len(good),), "safetensors", good)
    return {
        "no header": record(None),
        "nothing": RecordDict({}),
        "no arrays": RecordDict({"header": ConfigRecord({"json": "{}"})}),
        "header of another name": RecordDict(
            {"header": ConfigRecord({"text": "{}"}), "arrays": ArrayRecord()}
        ),
        "header as arrays": RecordDict({"header": ArrayRecord(), "arrays": ArrayRecord()}),
        "arrays as header": RecordDict(
            {"header": ConfigRecord({"json": "{}"}), "arrays": ConfigRecord({"x": 1})}
        ),
        "no JSON": record("{"),
        "a list": record("[]"),
        "a number": record("1"),
        "bytes": record(b"{}"),
        "a number for a text": record(1),
        "huge": record('{"x": "' + "w" * MAX_HEADER_CHARACTERS + '"}'),
        "deep": record('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "a number of many digits": record('{"x": 1' + "0" * 5000 + "}"),
        "no array": record(arrays=array(b"")),
        "noise": record(arrays=array(b"\x00" * 100)),
        "cut off": record(arrays=array(good[:-4])),
        "more than it says": record(arrays=array(good + b"1234")),
        "half floats": record(arrays=array(half)),
        "a long description": record(
            arrays=array(len(long).to_bytes(8, "little") + long + b"1234")
        ),
        "a description without end": record(arrays=array(b"\xff" * 8 + good[8:])),
        "pickled": record(arrays=array(pickled.getvalue())),
        "too many payloads": record(
            arrays=ArrayRecord({str(number): one for number in range(MAX_PAYLOADS + 1)})
        ),
        "a good payload and noise": record(
            arrays=ArrayRecord({"payload": one, "more": array(b"\x00" * 100)["payload"]})
        ),
        "another kind": record(arrays=array(good, "numpy.ndarray")),
    }


def test_hostile_records_are_refused() -> None:
    from fedproto.deploy.flower_transport import from_record

    believed, raised = [], {}
    for name, record in hostile_records().items():
        try:
            from_record(record)
            believed.append(name)
        except Refused:
            pass
        except BaseException as error:
            raised[name] = repr(error)
    assert (believed, raised) == ([], {})


@pytest.mark.parametrize("names", [["payload"], ["x"], ["prototypes", "payload"], ["x", "y"]])
def test_a_record_of_other_payloads_is_refused(names: list[str], tmp_path: Path) -> None:
    """A record may carry any groups; the server believes only those of its algorithm."""
    from fedproto.deploy.flower_transport import from_record, to_record

    good = make_reply("a")
    record = to_record(good)
    payload = record.array_records["arrays"]["prototypes"]
    for name in list(record.array_records["arrays"]):
        del record.array_records["arrays"][name]
    for name in names:
        record.array_records["arrays"][name] = payload
    state = small_state(tmp_path)
    with pytest.raises(Refused, match="not those of this algorithm"):
        state.accept_reply("a", from_record(record), state.expect_replies(frozenset("a")))
    assert state.replies == {}


def test_members_have_their_registered_names(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = make_flower_transport(
        {1: ("a", "liar"), 2: ("", "b"), 3: ("", "a"), 4: ("", "b"), 5: ("", "")}
    )
    assert sorted(transport.find_members()) == ["a", "b"]
    found = {
        name: reply.header["x"]
        for name, reply, _ in transport.exchange(
            "train", {n: Message({"x": n}, {}) for n in "ab"}, 1
        )
    }
    assert (
        found == {"a": "a", "b": "b"}
        and set(transport.sent_bytes()) == {"a", "b"}
        and min(transport.sent_bytes().values()) > 0
    )


def test_a_restarted_member_without_a_key_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower gives it another number; the one it had is gone."""
    nodes = {1: ("", "a"), 2: ("", "b")}
    transport = make_flower_transport(nodes)
    assert sorted(transport.find_members()) == ["a", "b"]
    del nodes[1]
    assert transport.find_members() == ["b"]
    nodes[9] = ("", "a")
    assert sorted(transport.find_members()) == ["a", "b"]
    assert [name for name, _, _ in transport.exchange("train", {"a": Message({}, {})}, 1)] == ["a"]


def test_a_node_cannot_state_a_registered_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 is registered as a; node 2 states that name while node 1 is online, and after."""
    nodes = {1: ("a", "a"), 2: ("", "a"), 3: ("", "b")}
    state = small_state(tmp_path)
    transport = make_flower_transport(nodes, state.registered)
    assert sorted(transport.find_members()) == ["a", "b"] and transport.names == {1: "a", 3: "b"}
    del nodes[1]
    assert transport.find_members() == ["b"], "a is away, and its name is not free"
    state.save()
    restarted = small_state(tmp_path)
    restarted.load()
    assert make_flower_transport(nodes, restarted.registered).find_members() == ["b"], (
        "nor after a restart of the server"
    )


def test_a_registered_node_gets_its_name_back_from_a_node_that_stated_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {2: ("", "a"), 3: ("", "b")}
    transport = make_flower_transport(nodes)
    assert sorted(transport.find_members()) == ["a", "b"]
    nodes[7] = ("a", "a")
    assert sorted(transport.find_members()) == ["a", "b"] and transport.names == {3: "b", 7: "a"}
    answers = list(transport.exchange("train", {"a": Message({}, {})}, 1))
    assert [name for name, _, _ in answers] == ["a"] and transport.names[7] == "a"


def test_a_name_stated_twice_stays_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {5: ("", "a")}
    transport = make_flower_transport(nodes)
    transport.find_members()
    nodes.clear()
    nodes.update({1: ("", "a"), 5: ("", "a"), 9: ("", "a")})
    assert transport.find_members() == ["a"] and transport.names == {5: "a"}
    twice = make_flower_transport({1: ("a", "a"), 2: ("a", "a")})
    assert twice.find_members() == ["a"] and twice.names == {1: "a"}


def test_a_node_that_is_not_a_member_gets_no_record(make_deployment: Any) -> None:
    deployment = make_deployment(names="abcd", members="a,b,c", rounds=1)
    state = deployment.serve()
    assert set(state.members) == set("abc") and state.round == 1


# --- requests that stay open


def test_an_open_request_is_answered_later_and_once() -> None:
    transport = make_flower_transport({1: ("", "a"), 2: ("", "b")})
    assert transport.find_members() == ["a", "b"]
    replies = transport.grid.pull_messages
    transport.grid.pull_messages = lambda ids: []
    transport.send("train", {"a": Message({"round": 3}, {}), "b": Message({"round": 3}, {})}, 60)
    assert set(transport.sent_bytes()) == {"a", "b"}
    assert transport.receive() == []
    transport.send("train", {"a": Message({"round": 4}, {})}, 60)
    transport.grid.pull_messages = replies
    found = transport.receive()
    assert [(reply.member, reply.content.header["round"]) for reply in found] == [
        ("a", 3),
        ("b", 3),
        ("a", 4),
    ]
    assert transport.receive() == []


def test_an_open_request_that_is_too_old_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = make_flower_transport({1: ("", "a")})
    transport.find_members()
    replies = transport.grid.pull_messages
    transport.grid.pull_messages = lambda ids: []
    transport.send("train", {"a": Message({"round": 3}, {})}, 0.01)
    time.sleep(0.02)
    assert transport.receive() == []
    transport.grid.pull_messages = replies
    assert transport.receive() == []


def test_the_reply_to_an_open_request_must_repeat_its_nonce() -> None:
    transport = make_flower_transport({1: ("", "a")})
    transport.find_members()
    transport.send("train", {"a": Message({"round": 3}, {})}, 60)
    (sent_id,) = transport._open
    request = transport._open[sent_id]
    marked = replace(request.request, header=request.request.header | {"nonce": "another"})
    transport._open[sent_id] = request._replace(request=marked)
    (reply,) = transport.receive()
    assert reply.member == "a" and "does not answer the request" in reply.content


# --- replies that come too late


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowMember:
    """In place of a puller: replies come at their own time."""

    def __init__(self, clock: Clock, seconds: dict[str, float]) -> None:
        self.clock = clock
        self.arrives = {sent_id: clock.now + after for sent_id, after in seconds.items()}
        self.reply: Any = Refused("not read")

    def pull(self, sent_id: str) -> Any:
        return self.reply if self.clock.now >= self.arrives[sent_id] else None

    def forget(self, sent_id: str) -> bool:
        return False


def exchange_slowly(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]
) -> tuple[FlowerTransport, Clock]:
    """Return a transport after requests to members of which each takes so long, and the clock."""
    clock = Clock()
    monkeypatch.setattr("fedproto.deploy.flower_transport.time", clock)
    sent: list[Any] = []

    def push(messages: list[Any]) -> list[str]:
        sent.extend(messages)
        return list(seconds)

    transport = FlowerTransport(SimpleNamespace(push_messages=push))  # type: ignore[arg-type]
    transport.names = dict(enumerate(seconds, 1))
    transport.puller = SlowMember(clock, seconds)  # type: ignore[assignment]
    requests = {name: Message({}, {}) for name in seconds}
    came = {reply.member for reply in transport.exchange("train", requests, 10)}
    assert came == {name for name, after in seconds.items() if after < 10}
    assert all(message.metadata.ttl == 20 for message in sent)
    return transport, clock


def test_a_late_reply_says_by_how_much_it_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, clock = exchange_slowly(monkeypatch, {"a": 1.0, "b": 15.0, "c": 1e9})
    assert transport.take_lateness() == {}
    while clock.now < 1000 + 19:
        transport._look_for_late_replies()
        clock.sleep(0.5)
    lateness = transport.take_lateness()
    assert list(lateness) == ["b"]
    assert 5 <= lateness["b"] <= 5 + 2.5  # by the pause between two looks
    assert transport.take_lateness() == {}


def test_a_note_of_flower_is_no_late_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a member that is gone, Flower itself answers, with an error, once the request expires."""
    transport, clock = exchange_slowly(monkeypatch, {"a": 15.0, "b": 15.0, "c": 15.0})
    errors = {"a": ErrorCode.NODE_UNAVAILABLE, "b": ErrorCode.MESSAGE_UNAVAILABLE}
    errors["c"] = ErrorCode.CLIENT_APP_RAISED_EXCEPTION  # which its member sends

    def pull(sent_id: str) -> Any:
        return SimpleNamespace(has_error=lambda: True, error=Error(errors[sent_id], "gone"))

    monkeypatch.setattr(transport.puller, "pull", pull)
    clock.sleep(5)
    transport._look_for_late_replies()
    assert transport._late == {}
    assert list(transport.take_lateness()) == ["c"]


def test_a_reply_that_never_comes_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, clock = exchange_slowly(monkeypatch, {"a": 1.0, "c": 1e9})
    clock.sleep(11)  # twice the timeout are over
    transport._look_for_late_replies()
    assert transport._late == {} and transport.take_lateness() == {}


def test_a_failure_at_a_member_that_comes_late_is_a_late_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, clock = exchange_slowly(monkeypatch, {"a": 1.0, "c": 15.0})
    asked = FlowerMessage(to_record(Message({}, {})), 1, "train")
    failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "failed")
    transport.puller.reply = FlowerMessage(failure, reply_to=asked)  # type: ignore[attr-defined]
    while clock.now < 1000 + 19:
        transport._look_for_late_replies()
        clock.sleep(0.5)
    assert list(transport.take_lateness()) == ["c"]
