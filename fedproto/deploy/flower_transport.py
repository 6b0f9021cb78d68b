"""Our messages as Flower's records, and the server's transport over a Flower grid."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from secrets import token_hex
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedproto.core import codec
from fedproto.core.client_names import is_chosen_name
from fedproto.core.files import parse_json
from fedproto.deploy.messages import Message, name_arrays
from fedproto.deploy.reply_pulling import MAX_DESCRIPTION_BYTES, Puller, is_unreachable
from fedproto.deploy.server_actions import Reply
from fedproto.errors import Refused

POLL_SECONDS = 0.2  # per pending reply, between two attempts; grid.send_and_receive waits 3 s
MAX_POLL_SECONDS = 2.0  # between two attempts, however many replies are pending
LATE_SHARE = 1.0  # of the timeout: how long a reply may be late to be noticed at all
QUERY_TIMEOUT_SECONDS = 30.0
MAX_HEADER_CHARACTERS = 2**20
DEFAULT_MAX_BYTES = 64 * 2**20  # of one reply's arrays
PAYLOAD_TYPE = "safetensors"  # how a payload is serialised
PAYLOAD = "payload"  # the name of the payload of arrays that belong to no group
MAX_PAYLOADS = 64  # of one message: an algorithm has a few groups


# --- records


def to_record(message: Message) -> RecordDict:
    """Return a message as a Flower record.

    The payload of each group is one array of bytes. The header is one text, since Flower's records
    cannot hold empty lists.
    """
    arrays = ArrayRecord()
    for group, payload in message.payloads().items():
        arrays[group or PAYLOAD] = Array("uint8", (len(payload),), PAYLOAD_TYPE, payload)
    header = ConfigRecord({"json": json.dumps(message.header, sort_keys=True)})
    return RecordDict({"arrays": arrays, "header": header})


def from_record(record: RecordDict) -> Message:
    """Return the message of a Flower record, which may come from anybody.

    Raises Refused if it is not a message of ours.
    """
    try:
        header = _read_header(record.config_records["header"]["json"])
        return Message(header, _read_arrays(record.array_records["arrays"]))
    except Refused:
        raise
    except Exception as error:  # a record can be malformed in any way
        kind = type(error).__name__
        raise Refused(f"it is not a fedproto message: {kind}: {str(error)[:200]}") from error


def _read_header(text: object) -> dict[str, object]:
    if not isinstance(text, str) or len(text) > MAX_HEADER_CHARACTERS:
        raise Refused(f"its header is not a text of at most {MAX_HEADER_CHARACTERS} characters")
    header = parse_json(text, "its header", Refused)
    if not isinstance(header, dict):
        raise Refused("its header is not a JSON object")
    return header


def _read_arrays(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays of all payloads that a record carries."""
    if len(arrays) > MAX_PAYLOADS:
        raise Refused(f"it carries {len(arrays)} payloads; at most {MAX_PAYLOADS} are accepted")
    decoded: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.stype != PAYLOAD_TYPE:
            raise Refused(f"a payload is not of type {PAYLOAD_TYPE}")
        if not array.data:
            raise Refused("its payload is empty")
        group = "" if name == PAYLOAD else name
        decoded |= name_arrays(group, codec.decode(array.data))
    return decoded


def count_bytes(record: RecordDict) -> int:
    """Return the bytes of everything a record carries."""
    return sum(part.count_bytes() for part in record.values())


# --- the server's transport


class _OpenRequest(NamedTuple):
    """A request that has no reply yet."""

    node: int
    member: str
    request: Message
    deadline: float  # by time.monotonic()


class _LateRequest(NamedTuple):
    """A request whose reply has not come in time, and may still come."""

    member: str
    deadline: float  # by time.monotonic()
    forgotten: float  # when nobody looks for it any more


class _Answer(NamedTuple):
    """A node's reply to a request, or why it was refused."""

    node: int
    request: Message
    reply: FlowerMessage | Refused


class FlowerTransport:
    """The `round_protocol.Transport` over a Flower grid.

    A member has the name that its key is registered under; without a key, the name it states. A
    name that was ever registered cannot be stated by others, whether its holder is present or not.
    Of several nodes that state the same name, the first has it while it is present.

    Each reply is pulled and decoded by itself: a malformed one costs its sender the round, and
    nobody else.
    """

    def __init__(
        self, grid: Grid, registered: set[str] | None = None, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        self.grid = grid
        self.puller = Puller(grid, max_bytes + MAX_DESCRIPTION_BYTES)
        self.names: dict[int, str] = {}  # by node; no name twice
        self.registered = set() if registered is None else registered  # grows by names seen
        self._sent_bytes: dict[str, int] = {}
        self._open: dict[str, _OpenRequest] = {}  # of `send`, by the id that Flower gave them
        self._late: dict[str, _LateRequest] = {}  # of `exchange`, likewise
        self._lateness: dict[str, float] = {}  # seconds, by member, until somebody takes them
        self._next_look = 0.0  # for late replies

    def find_members(self) -> list[str]:
        """Return the names of the nodes that are online; unknown nodes are asked for theirs."""
        online = {}
        for node in self.grid.get_nodes():
            if node.status == "online":
                online[node.node_id] = node.name
        self._update_names(online)
        unnamed = [node for node in online if node not in self.names and not online[node]]
        queries = {node: Message({}, {}) for node in unnamed}
        for answer in self._send_and_pull(queries, "query", QUERY_TIMEOUT_SECONDS):
            self._accept_name(answer)
        return [self.names[node] for node in online if node in self.names]

    def _update_names(self, online: dict[int, str]) -> None:
        """Give online nodes their registered names, and keep stated names that are still free."""
        nodes_by_name: dict[str, int] = {}
        for node, name in online.items():
            if name:
                nodes_by_name.setdefault(name, node)  # of two nodes with one name, the first
        self.registered |= set(nodes_by_name)
        stated_names = {
            node: name
            for node, name in self.names.items()
            if node in online and name not in self.registered
        }
        registered_names = {node: name for name, node in nodes_by_name.items()}
        self.names = stated_names | registered_names

    def _accept_name(self, answer: _Answer) -> None:
        """Note the name that a node without a registered one states, if it is free."""
        content, _ = _read_reply(answer)
        if not isinstance(content, Message):
            return
        name = content.header.get("member")
        taken = {*self.names.values(), *self.registered}
        if is_chosen_name(name) and name not in taken:
            self.names[answer.node] = name

    def exchange(self, kind: str, requests: dict[str, Message], timeout: float) -> Iterator[Reply]:
        """Send requests, and yield each reply until all have come or `timeout` seconds are over."""
        nodes = {name: node for node, name in self.names.items()}
        requests_by_node = {nodes[name]: request for name, request in requests.items()}
        self._sent_bytes = {}
        for answer in self._send_and_pull(requests_by_node, kind, timeout):
            content, size = _read_reply(answer)
            yield Reply(self.names[answer.node], content, size)

    def send(self, kind: str, requests: dict[str, Message], timeout: float) -> None:
        """Send requests whose replies `receive` returns, if they come within `timeout` seconds."""
        nodes = {name: node for node, name in self.names.items()}
        names = {nodes[name]: name for name in requests}
        marked = _mark({nodes[name]: request for name, request in requests.items()})
        deadline = time.monotonic() + timeout
        for sent_id, node in self._push(marked, kind, timeout).items():
            self._open[sent_id] = _OpenRequest(node, names[node], marked[node], deadline)

    def receive(self) -> list[Reply]:
        """Return the replies to `send` that have come since; if there are none, after a pause."""
        replies = []
        for sent_id, sent in list(self._open.items()):
            reply = self._pull(sent_id)
            if reply is None and time.monotonic() > sent.deadline:
                del self._open[sent_id]
                if self.puller.forget(sent_id):
                    reply = Refused("its reply did not arrive completely in time")
            if reply is not None:
                self._open.pop(sent_id, None)
                content, size = _read_reply(_Answer(sent.node, sent.request, reply))
                replies.append(Reply(sent.member, content, size))
        if not replies:
            time.sleep(min(POLL_SECONDS * max(1, len(self._open)), MAX_POLL_SECONDS))
        return replies

    def sent_bytes(self) -> dict[str, int]:
        """Return how many bytes each member was sent by the last `exchange` or `send`."""
        return self._sent_bytes

    def _send_and_pull(
        self, requests: dict[int, Message], kind: str, timeout: float
    ) -> Iterator[_Answer]:
        """Send a request to each node, and yield the replies as they come.

        The sender is the node whose request a reply answers: Flower's own errors state no sender.
        A reply that comes later does not count, but it is noticed: see `take_lateness`.
        """
        marked = _mark(requests)
        pending = self._push(marked, kind, timeout * (1 + LATE_SHARE))
        deadline = time.monotonic() + timeout
        while pending and time.monotonic() < deadline:
            for sent_id in list(pending):
                reply = self._pull(sent_id)
                if reply is not None:
                    node = pending.pop(sent_id)
                    yield _Answer(node, marked[node], reply)
            self._look_for_late_replies()
            time.sleep(min(POLL_SECONDS * len(pending), MAX_POLL_SECONDS))
        forgotten = deadline + LATE_SHARE * timeout
        for sent_id, node in pending.items():
            if self.puller.forget(sent_id):
                late = Refused("its reply did not arrive completely in time")
                yield _Answer(node, marked[node], late)
            elif node in self.names:
                self._late[sent_id] = _LateRequest(self.names[node], deadline, forgotten)

    def _look_for_late_replies(self) -> None:
        """Note how late a reply is that comes after its round; what it says does not count.

        Flower's own word that no reply will come, about an expired request or a member that is
        gone, is no reply.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + MAX_POLL_SECONDS
        for sent_id, late in list(self._late.items()):
            reply = self._pull(sent_id)
            if reply is not None:
                del self._late[sent_id]
                if isinstance(reply, Refused) or not is_unreachable(reply):
                    self._lateness[late.member] = now - late.deadline
            elif now > late.forgotten:
                self.puller.forget(sent_id)
                del self._late[sent_id]

    def take_lateness(self) -> dict[str, float]:
        """Return by how many seconds members were late whose reply has come since the last call."""
        taken = self._lateness
        self._lateness = {}
        return taken

    def _push(self, requests: dict[int, Message], kind: str, timeout: float) -> dict[str, int]:
        """Send the requests; return the nodes by the id that Flower gave their message."""
        messages = []
        self._sent_bytes = {}
        for node, request in requests.items():
            message = FlowerMessage(to_record(request), node, kind, ttl=timeout)
            messages.append(message)
            self._sent_bytes[self.names.get(node, "")] = count_bytes(message.content)
        sent_ids = self.grid.push_messages(messages)
        nodes_by_id = dict(zip(sent_ids, requests, strict=True))
        nodes_by_id.pop("", None)  # a node that has gone since
        return nodes_by_id

    def _pull(self, sent_id: str) -> FlowerMessage | Refused | None:
        try:
            return self.puller.pull(sent_id)
        except Refused as refusal:
            return refusal


def _mark(requests: dict[int, Message]) -> dict[int, Message]:
    """Return requests with a random word each, which its reply must repeat."""
    marked = {}
    for node, request in requests.items():
        header = request.header | {"nonce": token_hex(16)}
        marked[node] = replace(request, header=header)
    return marked


def _read_reply(answer: _Answer) -> tuple[Message | str, int]:
    """Return what a reply says, or why it is not believed, and its bytes.

    Nothing in a reply makes this raise.
    """
    reply = answer.reply
    if isinstance(reply, Refused):
        return str(reply), 0
    size = 0
    try:
        if reply.has_error():  # its text is the sender's, and is not repeated
            code = "unreachable" if is_unreachable(reply) else "app-failed"
            return Message({"error": code}, {}), 0
        size = count_bytes(reply.content)
        message = from_record(reply.content)
        # Flower does not check that a reply comes from the holder of the node's key.
        if message.header.get("nonce") != answer.request.header["nonce"]:
            raise Refused(
                "it does not answer the request that was sent: somebody else may have sent it"
            )
        return message, size
    except Refused as refusal:
        return str(refusal), size
    except Exception as error:  # a message whose content is not what Flower says it is
        return f"its reply cannot be read ({type(error).__name__})", size
