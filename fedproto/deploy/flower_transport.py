"""Parcels by Flower: records there and back, and the server's mail."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from secrets import token_hex

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedproto.core import codec
from fedproto.core.files import parse_json
from fedproto.deploy.messages import Message
from fedproto.deploy.reply_pulling import MAX_DESCRIPTION_BYTES, Puller
from fedproto.errors import Refused

POLL = 0.2  # seconds between two questions to Flower; grid.send_and_receive asks every 3
LONGEST_PAUSE = 2.0  # seconds before all are asked for again, however many they are
LONGEST_HEADER = 2**20  # letters
DEFAULT_MAX_BYTES = 64 * 2**20  # of one reply's arrays
PAYLOAD = "safetensors"  # how a payload is written
_UNREACHABLE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)


def to_record(parcel: Message) -> RecordDict:
    """The payload as one array of bytes; the header as one text, since Flower's records know no empty lists."""
    payload = parcel.payload()
    arrays = ArrayRecord(
        {"payload": Array("uint8", (len(payload),), PAYLOAD, payload)} if payload else {}
    )
    return RecordDict(
        {
            "arrays": arrays,
            "header": ConfigRecord({"json": json.dumps(parcel.header, sort_keys=True)}),
        }
    )


def from_record(record: RecordDict) -> Message:
    """Refused where it is none of ours: it may come from anybody."""
    try:
        text = record.config_records["header"]["json"]
        if not isinstance(text, str) or len(text) > LONGEST_HEADER:
            raise Refused(f"its header is no text of at most {LONGEST_HEADER} letters")
        header = parse_json(text, "its header", Refused)
        if not isinstance(header, dict):
            raise Refused("its header is no object")
        return Message(header, _decode(record.array_records["arrays"]))
    except Refused:
        raise
    except Exception as error:  # of any kind
        raise Refused(f"it is no parcel: {type(error).__name__}: {str(error)[:200]}") from error


def _decode(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """The arrays of the one payload that a record may carry."""
    if not arrays:
        return {}
    if list(arrays) != ["payload"] or arrays["payload"].stype != PAYLOAD:
        raise Refused("what it carries is not one payload")
    if not arrays["payload"].data:
        raise Refused("its payload is empty")
    return codec.decode(arrays["payload"].data)


def size(record: RecordDict) -> int:
    """The bytes of what it carries."""
    return sum(part.count_bytes() for part in record.values())


class FlowerTransport:
    """`round_protocol.Transport` by a Flower grid.

    A member is called what its key was registered as; without keys, what it says.

    Each reply is pulled and decoded by itself: what is wrong with one costs its sender the round, and nobody else.
    A name that was ever a registered one is nobody else's to say, whether its holder is there or not; `registered`
    grows by those that are seen. Of the others the first who says a name holds it while it is there.
    """

    def __init__(
        self, grid: Grid, registered: set[str] | None = None, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        self.grid = grid
        self.puller = Puller(grid, max_bytes + MAX_DESCRIPTION_BYTES)
        self.names: dict[int, str] = {}  # by node; no name twice
        self.registered = set() if registered is None else registered
        self._sent: dict[str, int] = {}

    def present(self) -> list[str]:
        online = {
            node.node_id: node.name for node in self.grid.get_nodes() if node.status == "online"
        }
        by_key = {
            name: node for node, name in reversed(online.items()) if name
        }  # of two, the first
        self.registered |= set(by_key)
        said = {
            node: name
            for node, name in self.names.items()
            if node in online and name not in self.registered
        }
        self.names = said | {node: name for name, node in by_key.items()}
        unnamed = [node for node, name in online.items() if not name and node not in self.names]
        for node, sent, reply in self._replies(
            {node: Message({}, {}) for node in unnamed}, "query", 30
        ):
            self._introduce(node, sent, reply)
        return [self.names[node] for node in online if node in self.names]

    def _introduce(self, node: int, sent: Message, reply: FlowerMessage | Refused) -> None:
        """A node that has no registered name says one; of two that say the same, the first is believed."""
        found, _ = _read(sent, reply)
        name = found.header.get("member") if isinstance(found, Message) else None
        taken = {*self.names.values(), *self.registered}
        if isinstance(name, str) and name and name not in taken:
            self.names[node] = name

    def exchange(
        self, kind: str, parcels: dict[str, Message], timeout: float
    ) -> Iterator[tuple[str, Message | str, int]]:
        nodes = {name: node for node, name in self.names.items()}
        self._sent = {}
        for node, parcel, reply in self._replies(
            {nodes[n]: p for n, p in parcels.items()}, kind, timeout
        ):
            found, bytes_up = _read(parcel, reply)
            yield self.names[node], found, bytes_up

    def sent(self) -> dict[str, int]:
        return self._sent

    def _replies(
        self, parcels: dict[int, Message], kind: str, timeout: float
    ) -> Iterator[tuple[int, Message, FlowerMessage | Refused]]:
        """Each reply as it comes, or why it was refused, with the node that was asked and what it was sent.

        Whose reply it is is told by the message it answers: errors of Flower's own come from nobody. Those that come
        later belong to no question any more, and Flower drops them.
        """
        marked = {
            node: replace(p, header=p.header | {"nonce": token_hex(16)})
            for node, p in parcels.items()
        }
        messages = [
            FlowerMessage(to_record(p), node, kind, ttl=timeout) for node, p in marked.items()
        ]
        self._sent = {
            self.names.get(node, ""): size(m.content)
            for node, m in zip(marked, messages, strict=True)
        }
        asked = dict(zip(self.grid.push_messages(messages), marked, strict=True))
        asked.pop("", None)  # a node that has gone since
        ends = time.monotonic() + timeout
        while asked and time.monotonic() < ends:
            for sent_id in list(asked):
                reply = self._pull(sent_id)
                if reply is not None:
                    node = asked.pop(sent_id)
                    yield node, marked[node], reply
            time.sleep(min(POLL * len(asked), LONGEST_PAUSE))
        for sent_id, node in asked.items():
            if self.puller.forget(sent_id):
                yield node, marked[node], Refused("its reply did not arrive completely in time")

    def _pull(self, sent_id: str) -> FlowerMessage | Refused | None:
        try:
            return self.puller.pull(sent_id)
        except Refused as refusal:
            return refusal


def _read(sent: Message, reply: FlowerMessage | Refused) -> tuple[Message | str, int]:
    """What a reply says, or why it is not believed, and its bytes. Nothing in a reply makes this raise."""
    if isinstance(reply, Refused):
        return str(reply), 0
    bytes_up = 0
    try:
        if reply.has_error():  # whose text is its sender's
            return Message(
                {"error": "unreachable" if reply.error.code in _UNREACHABLE else "app-failed"}, {}
            ), 0
        bytes_up = size(reply.content)
        return _answer(sent, reply), bytes_up
    except Refused as refusal:
        return str(refusal), bytes_up
    except Exception as error:  # a message whose content is not what Flower says it is
        return f"its reply cannot be read ({type(error).__name__})", bytes_up


def _answer(sent: Message, reply: FlowerMessage) -> Message:
    """What a reply says, if it is an answer to what was sent: Flower does not hold a reply to its sender's key."""
    found = from_record(reply.content)
    if found.header.get("nonce") != sent.header["nonce"]:
        raise Refused(
            "it does not answer the message that was sent: somebody else may have sent it"
        )
    return found
