"""No reply can spoil another, and none is decoded before its size is known."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedproto.deploy import flower_transport as posting
from fedproto.deploy import reply_pulling
from fedproto.deploy.flower_transport import PAYLOAD_TYPE, FlowerTransport, from_record, to_record
from fedproto.deploy.messages import Message
from fedproto.errors import Refused

MAX_BYTES = 2**16
NODES = {1: "a", 2: "b", 3: "c"}


@pytest.fixture(autouse=True)
def _as_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only where it has started the app."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity.{name}", 1)
    monkeypatch.setattr(posting, "POLL_SECONDS", 0.0)


class Reply:
    """A reply as the SuperLink stores it: objects by id, and a tree of ids."""

    def __init__(self, message: FlowerMessage) -> None:
        message.metadata.__dict__["_message_id"] = message.object_id
        self.message_id = message.object_id
        self.proto = message_to_proto(remove_content_from_message(message))
        self.tree = get_object_tree(message)
        self.objects = {
            key: each.deflate() for key, each in get_all_nested_objects(message).items()
        }
        self.unavailable: set[str] = set()

    def rewrite(self, kind: str, change: Callable[[bytes], bytes]) -> None:
        """Change the body of all objects of one kind; their parents keep the old ids."""
        for key, content in self.objects.items():
            head, _, body = content.partition(b"\0")
            name, children, _ = head.split(b" ")
            if name.decode() == kind:
                new = change(body)
                self.objects[key] = b"%s %s %d\0%s" % (name, children, len(new), new)


class Link:
    """The part of the Runtime API that pulling needs; `spoil` changes the replies of nodes."""

    def __init__(self, spoil: dict[int, Callable[[Reply], Any]]) -> None:
        self.spoil = spoil
        self.replies: dict[str, Reply] = {}
        self.confirmed: list[str] = []
        self.pulled: list[str] = []

    def answer(self, message: FlowerMessage) -> str:
        node = message.metadata.dst_node_id
        sent_id = f"m{len(self.replies)}"
        header = from_record(message.content).header
        values = (
            np.arange(100, dtype=np.float32) + node
        )  # equal objects of two replies would be one
        told = Message({"member": NODES[node], "nonce": header["nonce"]}, {f"v{node}": values})
        message.metadata.__dict__["_message_id"] = sent_id
        reply = Reply(FlowerMessage(to_record(told), reply_to=message))
        spoilt = self.spoil[node](reply) if node in self.spoil else None
        self.replies[sent_id] = spoilt if isinstance(spoilt, Reply) else reply
        return sent_id

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        (sent_id,) = request.message_ids
        reply = self.replies[sent_id]
        return PullAppMessagesResponse(
            messages_list=[reply.proto], message_object_trees=[reply.tree]
        )

    def PullObject(self, request: Any) -> PullObjectResponse:
        self.pulled.append(request.object_id)
        for reply in self.replies.values():
            if request.object_id in reply.unavailable:
                return PullObjectResponse(object_found=True, object_available=False)
            if request.object_id in reply.objects:
                content = reply.objects[request.object_id]
                return PullObjectResponse(
                    object_found=True, object_available=True, object_content=content
                )
        return PullObjectResponse(object_found=False)

    def ConfirmMessageReceived(self, request: Any) -> ConfirmMessageReceivedResponse:
        self.confirmed.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


class RealGrid(HttpGrid):
    """Flower's own grid, over a link in this process."""

    def __init__(self, spoil: dict[int, Callable[[Reply], Any]]) -> None:
        super().__init__(token="t")
        self.link = Link(spoil)
        self._client = self.link  # type: ignore[assignment]
        self._run = object.__new__(Run)
        self._run.__dict__ |= dict.fromkeys(Run.__dataclass_fields__) | {"run_id": 1}

    def get_nodes(self) -> Any:
        return [
            SimpleNamespace(node_id=node, name=name, status="online")
            for node, name in NODES.items()
        ]

    def push_messages(self, messages: Any) -> list[str]:
        return [self.link.answer(message) for message in messages]


def exchange(grid: Any, timeout: float = 0.3) -> dict[str, Any]:
    """What each member's reply became: the message, or why it was refused."""
    post = FlowerTransport(grid, max_bytes=MAX_BYTES)
    post.find_members()
    requests = {name: Message({"round": 1}, {}) for name in NODES.values()}
    return {name: found for name, found, _ in post.exchange("train", requests, timeout)}


def without_arrays(reply: Reply) -> None:
    reply.rewrite("RecordDict", lambda body: b"{}")


def with_repeated_chunks(reply: Reply) -> None:
    """One chunk of 500 bytes, named a million times: 500 MB."""

    def repeat(body: bytes) -> bytes:
        return json.dumps(json.loads(body) | {"arraychunk_ids": [0] * 500_000}).encode()

    reply.rewrite("Array", repeat)


def with_many_objects(reply: Reply) -> None:
    for number in range(reply_pulling.MAX_OBJECTS + 1):
        reply.tree.children.append(ObjectTree(object_id=f"{number:064x}"))


def with_a_large_chunk(reply: Reply) -> None:
    reply.rewrite("ArrayChunk", lambda body: bytes(3 * 2**20))


def with_a_large_header(reply: Reply) -> None:
    reply.rewrite("ConfigRecord", lambda body: bytes(reply_pulling.MAX_DESCRIPTION_BYTES + 1))


def as_a_record(reply: Reply) -> Reply:
    """A message whose content is a record of another kind."""
    reply.rewrite("Message", lambda body: body)
    config = next(
        key for key, content in reply.objects.items() if content.startswith(b"ConfigRecord")
    )
    _, _, body = reply.objects[reply.message_id].partition(b"\0")
    reply.objects[reply.message_id] = b"Message %s %d\0%s" % (config.encode(), len(body), body)
    return reply


def as_an_array(reply: Reply) -> None:
    """An object that is not a message at all."""
    reply.message_id = next(
        key for key, content in reply.objects.items() if content.startswith(b"ArrayChunk")
    )
    reply.proto.metadata.message_id = reply.message_id


def in_a_circle(reply: Reply) -> None:
    _, _, body = reply.objects[reply.message_id].partition(b"\0")
    reply.objects[reply.message_id] = b"Message %s %d\0%s" % (
        reply.message_id.encode(),
        len(body),
        body,
    )


HOSTILE: dict[str, tuple[Callable[[Reply], Any], str]] = {
    "JSON cut off": (lambda reply: reply.rewrite("RecordDict", lambda body: body[:-3]), "JSON"),
    "JSON that is a list": (
        lambda reply: reply.rewrite("ArrayRecord", lambda body: b"[1]"),
        "decoded",
    ),
    "JSON that is a number": (lambda reply: reply.rewrite("Array", lambda body: b"1"), "decoded"),
    "deep JSON": (lambda reply: reply.rewrite("Array", lambda body: b"[" * 1_000_000), "nested"),
    "not UTF-8": (lambda reply: reply.rewrite("RecordDict", lambda body: b"\xff\xfe"), "JSON"),
    "no records": (without_arrays, "decoded"),
    "chunks again and again": (with_repeated_chunks, "bytes"),
    "chunks that are not there": (
        lambda reply: reply.rewrite("Array", lambda body: body.replace(b"[0]", b"[7]")),
        "decoded",
    ),
    "many objects": (with_many_objects, "objects"),
    "a large chunk": (with_a_large_chunk, "bytes"),
    "a large header": (with_a_large_header, "bytes"),
    "another head": (lambda reply: reply.objects.update({reply.message_id: b"Message"}), "decoded"),
    "another type": (
        lambda reply: reply.objects.update({reply.message_id: b"os.system  0\0"}),
        "decoded",
    ),
    "protobuf of noise": (
        lambda reply: reply.rewrite("ConfigRecord", lambda body: b"\xff" * 50),
        "decoded",
    ),
    "a message of noise": (
        lambda reply: reply.rewrite("Message", lambda body: b"\xff" * 50),
        "decoded",
    ),
    "a part that is missing": (lambda reply: reply.objects.popitem(), "missing"),
    "a record as content": (as_a_record, "read|decoded"),
    "an array as message": (as_an_array, "not a message|decoded"),
    "a message that holds itself": (in_a_circle, "decoded"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_reply_costs_its_sender_the_round_and_nobody_else(what: str) -> None:
    change, reason = HOSTILE[what]
    grid = RealGrid({2: change})
    tracemalloc.start()
    try:
        found = exchange(grid)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found["b"], str), what
    assert any(word in found["b"] for word in reason.split("|")), found["b"]
    assert len(found["b"]) < 300 and found["b"].isprintable()
    assert peak < 40 * 2**20, f"{peak} bytes for a reply of at most {MAX_BYTES}"
    for node, name in ((1, "a"), (3, "c")):
        assert found[name].header["member"] == name
        assert found[name].arrays[f"v{node}"].tolist() == list(range(node, 100 + node))
    ids = {reply.message_id for reply in grid.link.replies.values()}
    assert len(grid.link.confirmed) == len(ids) == 3, "Flower may delete all of them"


def test_a_reply_whose_objects_never_come_is_waited_for_to_the_end_and_no_longer() -> None:
    def never_pushed(reply: Reply) -> None:
        reply.unavailable = {next(iter(reply.objects))}

    found = exchange(RealGrid({2: never_pushed}))
    assert found["b"] == "its reply did not arrive completely in time"
    assert found["a"].header["member"] == "a" and found["c"].header["member"] == "c"


def test_a_reply_whose_objects_come_later_counts() -> None:
    grid = RealGrid({})
    looks: list[str] = []

    def late(reply: Reply) -> None:
        reply.unavailable = {next(iter(reply.objects))}

    pull = grid.link.PullObject

    def pull_object(request: Any) -> Any:
        looks.append(request.object_id)
        if len(looks) > 20:
            for reply in grid.link.replies.values():
                reply.unavailable = set()
        return pull(request)

    grid.link.spoil = {2: late}
    grid.link.PullObject = pull_object  # type: ignore[method-assign]
    assert exchange(grid, 10)["b"].header["member"] == "b"


def test_one_long_reply_leaves_the_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time to spare, one object is pulled at a time, and all replies still come."""
    monkeypatch.setattr(reply_pulling, "PULL_SECONDS", -1.0)
    grid = RealGrid({})
    assert {name: found.header["member"] for name, found in exchange(grid, 10).items()} == {
        n: n for n in "abc"
    }
    first = next(iter(grid.link.replies.values()))
    places = [place for place, key in enumerate(grid.link.pulled) if key in first.objects]
    assert places == list(range(0, 3 * len(places), 3)), "the three took turns"


def test_a_large_response_is_refused_by_its_length_before_it_is_read() -> None:
    """Flower's HTTP client calls our hook when the headers are there, and the body is not."""
    read: list[int] = []

    class Body(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            read.append(1)
            yield bytes(2**20)

    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-length": str(2**40)}, stream=Body())

    http = httpx.Client(transport=httpx.MockTransport(respond))
    client = SimpleNamespace(_client=http)
    with pytest.raises(Refused, match="1000 bytes"), reply_pulling._limit_responses(client, 1000):
        http.post("http://here/")
    assert read == []
    assert http.post("http://here/").content == bytes(2**20), "afterwards all is as before"


def test_flower_still_has_what_we_use_of_it() -> None:
    """These parts of Flower are undocumented: this test fails if another version lacks them."""
    from flwr.supercore.protobuf.client import ProtobufClient

    assert reply_pulling._offers_objects(RealGrid({}))
    assert isinstance(ProtobufClient("http://here")._client.event_hooks, dict)
    assert not reply_pulling._offers_objects(SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [json.JSONDecodeError("x", "y", 0), MemoryError(), RecursionError(), KeyError("k")]
)
def test_with_another_flower_too_one_reply_costs_nobody_else(error: Exception) -> None:
    """A grid without those parts: its pull raises for one of three messages, as Flower's does."""

    class Plain:
        def __init__(self) -> None:
            self.said: dict[str, FlowerMessage] = {}

        def get_nodes(self) -> Any:
            return [
                SimpleNamespace(node_id=node, name=name, status="online")
                for node, name in NODES.items()
            ]

        def push_messages(self, messages: Any) -> list[str]:
            for message in messages:
                node = message.metadata.dst_node_id
                message.metadata.__dict__["_message_id"] = str(node)
                told = Message({"member": NODES[node], **from_record(message.content).header}, {})
                self.said[str(node)] = FlowerMessage(to_record(told), reply_to=message)
            return list(self.said)

        def pull_messages(self, ids: list[str]) -> list[FlowerMessage]:
            if "2" in ids:
                raise error
            return [self.said[each] for each in ids]

    found = exchange(Plain())
    assert found["b"] == f"its reply cannot be decoded ({type(error).__name__})"
    assert found["a"].header["member"] == "a" and found["c"].header["member"] == "c"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (ErrorCode.NODE_UNAVAILABLE, "unreachable"),
        (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "app-failed"),
        (77, "app-failed"),
    ],
)
def test_the_text_of_flowers_own_errors_is_not_repeated(code: int, shown: str) -> None:
    from flwr.app import Error

    def failed(reply: Reply) -> Reply:
        asked = FlowerMessage(RecordDict(), 2, "train", ttl=60.0)
        asked.metadata.__dict__["_message_id"] = "m"
        return Reply(
            FlowerMessage(Error(code, "<class 'KeyError'>:<'SMITH John'>"), reply_to=asked)
        )

    grid = RealGrid({2: failed})
    assert exchange(grid)["b"].header == {"error": shown}
    assert ("m1" in grid.link.confirmed) == (shown == "unreachable"), "or Flower keeps the request"


# --- records


def record(payload: bytes) -> RecordDict:
    arrays = ArrayRecord({"payload": Array("uint8", (len(payload),), PAYLOAD_TYPE, payload)})
    return RecordDict({"header": ConfigRecord({"json": "{}"}), "arrays": arrays})


def payload_of(description: str, data: bytes) -> bytes:
    """A safetensors message with any description."""
    return len(description).to_bytes(8, "little") + description.encode() + data


def test_a_payload_that_states_gigabytes_takes_no_memory() -> None:
    description = '{"x": {"dtype": "F32", "shape": [1073741824], "data_offsets": [0, 4294967296]}}'
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="it is not a safetensors message"):
            from_record(record(payload_of(description, bytes(40))))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5, np.float32),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
    ],
)
def test_arrays_come_back_as_they_were(value: np.ndarray) -> None:
    found = from_record(to_record(Message({}, {"x": value}))).arrays["x"]
    assert (
        found.dtype == value.dtype and found.shape == value.shape and np.array_equal(found, value)
    )


WHOLE = '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


@pytest.mark.parametrize(
    "payload",
    [
        payload_of(WHOLE, bytes(8)) + b"more",
        payload_of(WHOLE, bytes(4)),
        payload_of(WHOLE.replace("[2]", "[-2]"), bytes(8)),
        payload_of(WHOLE.replace("F32", "OBJECT"), bytes(8)),
        payload_of(WHOLE.replace("F32", "F8_E4M3"), bytes(2)),
        payload_of("[" * 100_000, b""),
        payload_of(" " * (2**20 + 1), b""),
        (2**60).to_bytes(8, "little") + b"{}",
        b"PK\x03\x04",
    ],
    ids=range(9),
)
def test_payloads_that_are_none_are_refused(payload: bytes) -> None:
    with pytest.raises(Refused):
        from_record(record(payload))


def test_a_deep_header_is_refused_for_its_depth() -> None:
    deep = '{"x": ' + "[" * 400_000 + "]" * 400_000 + "}"
    with pytest.raises(Refused, match="more than 100 nested brackets"):
        from_record(RecordDict({"header": ConfigRecord({"json": deep}), "arrays": ArrayRecord()}))


def test_object_ids_are_of_the_contents() -> None:
    """What `Reply` assumes of Flower: a message is named by its content."""
    message = FlowerMessage(RecordDict(), 2, "train", ttl=60.0)
    assert get_object_id(message.deflate()) == message.object_id
