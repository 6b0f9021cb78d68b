"""Parcels by Flower: records there and back, and the server's mail."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from secrets import token_hex

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedproto import wire
from fedproto.deploy.parcels import Parcel
from fedproto.errors import Refused

POLL = 0.2  # seconds; grid.send_and_receive asks every 3
PAYLOAD = "safetensors"  # how a payload is written
LONGEST_HEADER = 2**22  # bytes


def to_record(parcel: Parcel) -> RecordDict:
    """The payload as one array of bytes; the header as one text, since Flower's records know no empty lists."""
    payload = parcel.payload()
    arrays = ArrayRecord({"payload": Array("uint8", (len(payload),), PAYLOAD, payload)} if payload else {})
    return RecordDict({"arrays": arrays, "header": ConfigRecord({"json": json.dumps(parcel.header)})})


def from_record(record: RecordDict) -> Parcel:
    """Refused where it is none of ours: it may come from anybody."""
    try:
        text = record.config_records["header"]["json"]
        if not isinstance(text, str) or len(text) > LONGEST_HEADER:
            raise Refused(f"its header is no text of at most {LONGEST_HEADER} letters")
        header = json.loads(text)
        if not isinstance(header, dict):
            raise Refused("its header is no object")
        return Parcel(header, _decode(record.array_records["arrays"]))
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
    return wire.decode(arrays["payload"].data)


def size(record: RecordDict) -> int:
    """The bytes of what it carries."""
    return sum(part.count_bytes() for part in record.values())


class FlowerPost:
    """`rounds.Post` by a Flower grid. A member is called what its key was registered as; without keys, what it says.

    A name that was ever a registered one is nobody else's to say, whether its holder is there or not; `registered`
    grows by those that are seen. Of the others the first who says a name holds it while it is there.
    """

    def __init__(self, grid: Grid, registered: set[str] | None = None) -> None:
        self.grid = grid
        self.names: dict[int, str] = {}  # by node; no name twice
        self.registered = set() if registered is None else registered
        self._sent: dict[str, int] = {}

    def present(self) -> list[str]:
        online = {node.node_id: node.name for node in self.grid.get_nodes() if node.status == "online"}
        by_key = {name: node for node, name in reversed(online.items()) if name}  # of two, the first
        self.registered |= set(by_key)
        said = {node: name for node, name in self.names.items() if node in online and name not in self.registered}
        self.names = said | {node: name for name, node in by_key.items()}
        unnamed = [node for node, name in online.items() if not name and node not in self.names]
        for node, sent, reply in self._replies({node: Parcel({}, {}) for node in unnamed}, "query", 30):
            if reply.has_content():
                self._introduce(node, sent, reply)
        return [self.names[node] for node in online if node in self.names]

    def _introduce(self, node: int, sent: Parcel, reply: Message) -> None:
        """A node that has no registered name says one; of two that say the same, the first is believed."""
        try:
            name = _answer(sent, reply).header.get("member")
        except Refused:
            return
        if isinstance(name, str) and name and name not in self.names.values() and name not in self.registered:
            self.names[node] = name

    def exchange(
        self, kind: str, parcels: dict[str, Parcel], timeout: float
    ) -> Iterator[tuple[str, Parcel | str, int]]:
        nodes = {name: node for node, name in self.names.items()}
        self._sent = {}
        for node, parcel, reply in self._replies({nodes[n]: p for n, p in parcels.items()}, kind, timeout):
            name = self.names[node]
            if reply.has_error():
                error = f"Flower reports error {reply.error.code}: {str(reply.error.reason)[:300]}"
                yield name, Parcel({"error": error}, {}), 0
                continue
            try:
                yield name, _answer(parcel, reply), size(reply.content)
            except Refused as refusal:
                yield name, str(refusal), size(reply.content)

    def sent(self) -> dict[str, int]:
        return self._sent

    def _replies(self, parcels: dict[int, Parcel], kind: str, timeout: float) -> Iterator[tuple[int, Parcel, Message]]:
        """Each reply as it comes, with the node that was asked and what it was sent.

        Whom a reply is of is told by the message it answers: errors of Flower's own come from nobody. Those that come
        later belong to no question any more, and Flower drops them.
        """
        marked = {node: replace(p, header=p.header | {"nonce": token_hex(16)}) for node, p in parcels.items()}
        messages = [Message(to_record(p), node, kind, ttl=timeout) for node, p in marked.items()]
        self._sent = {self.names.get(node, ""): size(m.content) for node, m in zip(marked, messages, strict=True)}
        asked = dict(zip(self.grid.push_messages(messages), marked, strict=True))
        asked.pop("", None)  # a node that has gone since
        ends = time.monotonic() + timeout
        while asked and time.monotonic() < ends:
            for reply in self.grid.pull_messages(list(asked)):
                node = asked.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    yield node, marked[node], reply
            time.sleep(POLL if asked else 0)


def _answer(sent: Parcel, reply: Message) -> Parcel:
    """What a reply says, if it is an answer to what was sent: Flower does not hold a reply to its sender's key."""
    found = from_record(reply.content)
    if found.header.get("nonce") != sent.header["nonce"]:
        raise Refused("it does not answer the message that was sent: somebody else may have sent it")
    return found
