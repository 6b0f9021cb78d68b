"""Pull one member's reply at a time out of Flower: limited before it is decoded.

Flower's own `grid.pull_messages` decodes all replies together and without limits: one malformed
reply loses those of all members, a small one can make it join the same chunk of an array thousands
of times, and one whose objects never arrive makes it wait for hours. `Puller` requests each reply
by itself, counts bytes as they arrive, and checks what an object says about itself before Flower
builds it. For this it uses undocumented parts of Flower 1.41, in this file only. Where they are
missing, each reply is pulled by itself with the documented function.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedproto.core.files import parse_json
from fedproto.errors import Refused

#: Of everything in a reply but the chunks of its arrays: records, and the text of the header.
MAX_DESCRIPTION_BYTES = 2**21
MAX_OBJECTS = 5_000  # in one reply: its records, its arrays, and their chunks of 5 MB
PULL_SECONDS = 5.0  # for one reply, before it is the others' turn
_RESPONSE_OVERHEAD_BYTES = 2**12  # of a response, beside the object
_JSON_OBJECTS = ("RecordDict", "ArrayRecord", "Array")
_UNREACHABLE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)


@dataclass
class _Arriving:
    """A reply whose objects are being pulled."""

    message_id: str
    missing: deque[str]  # ids of objects
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Puller:
    """Pulls replies by the id of the message they answer."""

    def __init__(self, grid: Grid, max_bytes: int) -> None:
        self.grid = grid
        self.max_bytes = max_bytes  # of everything that one reply consists of
        self._arriving: dict[str, _Arriving] = {}  # by the id of the message that was sent

    def pull(self, sent_id: str) -> FlowerMessage | None:
        """Return the reply to a message, or None if it is not complete yet.

        Raises Refused if it is too large or cannot be decoded.
        """
        try:
            if not _offers_objects(self.grid):
                return next(iter(self.grid.pull_messages([sent_id])), None)
            return self._pull_objects(sent_id)
        except Refused:
            self.forget(sent_id)
            raise
        except Exception as error:  # Flower may raise anything for what somebody sent
            self.forget(sent_id)
            raise Refused(f"its reply cannot be decoded ({type(error).__name__})") from error

    def forget(self, sent_id: str) -> bool:
        """Stop pulling a reply, and let Flower delete it; return whether some of it had arrived."""
        arriving = self._arriving.pop(sent_id, None)
        if arriving is None:
            return False
        with suppress(Exception):  # Flower deletes it at the end of the run at the latest
            self._confirm(arriving.message_id)
        return True

    def _pull_objects(self, sent_id: str) -> FlowerMessage | None:
        client: Any = self.grid._runtime_client  # type: ignore[attr-defined]
        with _limit_responses(client, self.max_bytes + _RESPONSE_OVERHEAD_BYTES):
            arriving = self._arriving.get(sent_id) or self._find_reply(client, sent_id)
            if arriving is None or not self._pull_missing(client, arriving):
                return None
        self._confirm(arriving.message_id)
        del self._arriving[sent_id]
        message = _inflate(arriving, self.max_bytes)
        if is_unreachable(message):  # nobody confirms the request, which Flower would keep
            self._confirm(sent_id)
        return message

    def _find_reply(self, client: Any, sent_id: str) -> _Arriving | None:
        """Return the reply to a message, with the ids of its objects, or None if there is none."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        found = client.PullMessages(PullAppMessagesRequest(message_ids=[sent_id]))
        if not found.messages_list:
            return None
        arriving = _Arriving(found.messages_list[0].metadata.message_id, deque())
        self._arriving[sent_id] = arriving
        object_ids = list(islice(_iterate_ids(found.message_object_trees[0]), MAX_OBJECTS + 1))
        if len(object_ids) > MAX_OBJECTS:
            raise Refused(f"its reply consists of more than {MAX_OBJECTS} objects")
        arriving.missing.extend(dict.fromkeys(object_ids))  # equal objects are one
        return arriving

    def _pull_missing(self, client: Any, arriving: _Arriving) -> bool:
        """Pull objects for a while; return whether all have arrived.

        An object that its sender has not pushed yet is requested again later.
        """
        from flwr.proto.message_pb2 import PullObjectRequest

        deadline = time.monotonic() + PULL_SECONDS
        while arriving.missing:
            object_id = arriving.missing[0]
            response = client.PullObject(PullObjectRequest(object_id=object_id, **self._origin()))
            if not response.object_found:
                raise Refused("a part of its reply is missing")
            if not response.object_available:
                return False
            arriving.contents[object_id] = response.object_content
            arriving.size += len(response.object_content)
            arriving.missing.popleft()
            if arriving.size > self.max_bytes:
                raise Refused(f"its reply has more than {self.max_bytes} bytes")
            if arriving.missing and time.monotonic() > deadline:
                return False
        return True

    def _confirm(self, message_id: str) -> None:
        """Allow Flower to delete a message with all it consists of."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        request = ConfirmMessageReceivedRequest(message_object_id=message_id, **self._origin())
        self.grid._runtime_client.ConfirmMessageReceived(request)  # type: ignore[attr-defined]

    def _origin(self) -> dict[str, Any]:
        return {"node": self.grid.node, "run_id": self.grid.run.run_id}  # type: ignore[attr-defined]


def is_unreachable(reply: FlowerMessage) -> bool:
    """Return whether a reply is Flower's own note that there is none and will be none."""
    return reply.has_error() and reply.error.code in _UNREACHABLE


def _offers_objects(grid: Grid) -> bool:
    """Return whether the grid has what `_pull_objects` uses, as that of Flower 1.41 does."""
    client = getattr(grid, "_runtime_client", None)
    needed = ("PullMessages", "PullObject", "ConfirmMessageReceived")
    return all(callable(getattr(client, name, None)) for name in needed)


@contextmanager
def _limit_responses(client: Any, max_bytes: int) -> Iterator[None]:
    """Refuse larger responses by their stated length, before they are read.

    HTTPX calls its hooks before it reads a response.
    """

    def refuse_large(response: Any) -> None:
        if int(response.headers.get("content-length", 0)) > max_bytes:
            raise Refused(f"its reply has more than {max_bytes} bytes")

    http = getattr(client, "_client", None)
    hooks: dict[str, list[Callable[..., Any]]] | None = getattr(http, "event_hooks", None)
    if http is None or hooks is None:
        yield
        return
    http.event_hooks = {**hooks, "response": [*hooks["response"], refuse_large]}
    try:
        yield
    finally:
        http.event_hooks = hooks


def _iterate_ids(tree: Any) -> Iterator[str]:
    """Yield the ids of a tree of objects, children first."""
    for child in tree.children:
        yield from _iterate_ids(child)
    yield tree.object_id


def _inflate(arriving: _Arriving, max_bytes: int) -> FlowerMessage:
    """Return the message that the objects make up, once their sizes are checked."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    _refuse_absurd_objects(arriving.contents, max_bytes)
    message = inflate_object_from_contents(arriving.message_id, arriving.contents)
    if not isinstance(message, FlowerMessage):
        raise Refused("its reply is not a message")
    return message


def _refuse_absurd_objects(contents: dict[str, bytes], max_bytes: int) -> None:
    """Refuse large or deeply nested descriptions, and arrays that repeat their chunks."""
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_head_values_from_object_content,
    )

    array_bytes = 0
    description_bytes = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == "ArrayChunk":
            continue
        description_bytes += len(content)
        if description_bytes > MAX_DESCRIPTION_BYTES:
            raise Refused(
                f"its reply has more than {MAX_DESCRIPTION_BYTES} bytes beside its arrays"
            )
        if kind not in _JSON_OBJECTS:
            continue
        body = content[content.index(b"\0") + 1 :]
        description = parse_json(body, "the description of its reply", Refused)
        if kind == "Array":
            chunks = [children[place] for place in description["arraychunk_ids"]]
            array_bytes += sum(len(contents[chunk]) for chunk in chunks)
            if array_bytes > max_bytes:
                raise Refused(f"its reply has more than {max_bytes} bytes of arrays")
