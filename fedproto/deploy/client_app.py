"""The app that Flower starts at a member, anew for every message: `clientapp = "fedproto.deploy.client_app:app"`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from fedproto.deploy.messages import Message
    from fedproto.deploy.settings import MemberSettings

app = ClientApp()
LOG = logging.getLogger("flwr")


@app.train()
def train(message: FlowerMessage, context: Context) -> FlowerMessage:
    return _replied(message, context, _train)


@app.evaluate()
def evaluate(message: FlowerMessage, context: Context) -> FlowerMessage:
    return _replied(message, context, _evaluate)


@app.query()
def query(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Who are you?"""
    return _replied(message, context, _introduce)


def _train(asked: Message, own: MemberSettings) -> Message:
    from fedproto.deploy.member import answer

    return answer(asked, own)


def _evaluate(asked: Message, own: MemberSettings) -> Message:
    from fedproto.deploy.member import scored

    return scored(asked, own)


def _introduce(asked: Message, own: MemberSettings) -> Message:
    from fedproto.deploy.messages import Message

    return Message({"member": own.name}, {})


def _replied(
    message: FlowerMessage, context: Context, act: Callable[[Message, MemberSettings], Message]
) -> FlowerMessage:
    """The reply to a message. Of an error only its code leaves: the rest is for the member's own log.

    Every exception is caught here, because Flower sends the text of what it catches itself to the server.
    """
    from fedproto.deploy.error_codes import code_of
    from fedproto.deploy.flower_transport import from_record, to_record
    from fedproto.deploy.messages import Message, printable
    from fedproto.errors import FedProtoError

    nonce = {}
    try:
        asked = from_record(message.content)
        nonce = {"nonce": asked.header.get("nonce")}  # shows that the answer is to this message
        if "refused" in asked.header:
            LOG.warning(
                "The last answer did not count: %s", printable(str(asked.header["refused"]))
            )
        reply = act(asked, _read_own_file(context.node_config))
        content = to_record(Message(reply.header | nonce, reply.arrays))
    except FedProtoError as error:
        LOG.error("This member cannot answer (%s): %s", code_of(error), error)
        content = to_record(Message({"error": code_of(error)} | nonce, {}))
    except Exception as error:
        LOG.exception("This member cannot answer (%s)", code_of(error))
        content = to_record(Message({"error": code_of(error)} | nonce, {}))
    return FlowerMessage(content, reply_to=message)


def _read_own_file(node_config: Mapping[str, Any]) -> MemberSettings:
    from fedproto.deploy.settings import read_member
    from fedproto.errors import ConfigError

    if "member" not in node_config:
        raise ConfigError(
            "this SuperNode was started without its file: --node-config 'member=\"PATH.toml\"'"
        )
    return read_member(Path(str(node_config["member"])), operated=True)
