"""The server's mail: a reply counts only if it repeats the random word of the message it answers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedproto.deploy.flower_transport import FlowerTransport, to_record
from fedproto.deploy.messages import Message

Said = Callable[
    [dict[str, Any]], dict[str, Any]
]  # the header that was sent -> the header of the reply


class RepliesOf(FlowerTransport):
    """A server whose one node replies with a header that is made of the one it was sent."""

    def __init__(self, said: Said) -> None:
        node = SimpleNamespace(node_id=7, name="", status="online")
        self.grid = SimpleNamespace(get_nodes=lambda: [node])  # type: ignore[assignment]
        self.said = said
        self.names = {}
        self.registered = set()
        self._sent = {}

    def _replies(
        self, parcels: dict[int, Message], kind: str, timeout: float
    ) -> Iterator[tuple[int, Message, Any]]:
        for node, parcel in parcels.items():
            sent = replace(parcel, header=parcel.header | {"nonce": "the word of this message"})
            content = to_record(Message(self.said(sent.header), {}))
            yield (
                node,
                sent,
                SimpleNamespace(content=content, has_content=lambda: True, has_error=lambda: False),
            )


def honest(sent: dict[str, Any]) -> dict[str, Any]:
    return {"member": "a", "nonce": sent["nonce"]}


WRONG_WORDS: dict[str, Said] = {
    "another word": lambda sent: honest(sent) | {"nonce": "the word of another message"},
    "no word": lambda sent: {"member": "a"},
    "nothing": lambda sent: honest(sent) | {"nonce": None},
    "part of it": lambda sent: honest(sent) | {"nonce": sent["nonce"][:-1]},
    "a list of it": lambda sent: honest(sent) | {"nonce": [sent["nonce"]]},
}


def test_a_reply_that_repeats_the_word_is_believed() -> None:
    post = RepliesOf(honest)
    assert post.present() == ["a"]
    ((name, reply, size),) = post.exchange("train", {"a": Message({"round": 3}, {})}, 1)
    assert name == "a" and isinstance(reply, Message) and reply.header["member"] == "a" and size > 0


@pytest.mark.parametrize("said", WRONG_WORDS.values(), ids=list(WRONG_WORDS))
def test_a_reply_with_another_word_is_refused(said: Said) -> None:
    """Flower does not hold a reply to its sender's key: anybody could have sent it."""
    post = RepliesOf(said)
    post.names = {7: "a"}
    ((name, reply, _),) = post.exchange("train", {"a": Message({"round": 3}, {})}, 1)
    assert (
        name == "a"
        and isinstance(reply, str)
        and "does not answer the message that was sent" in reply
    )


@pytest.mark.parametrize("said", WRONG_WORDS.values(), ids=list(WRONG_WORDS))
def test_nobody_is_introduced_by_a_reply_with_another_word(said: Said) -> None:
    assert RepliesOf(said).present() == []
