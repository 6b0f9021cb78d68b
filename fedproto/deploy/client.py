"""The app that Flower starts at a member, anew for every message: `clientapp = "fedproto.deploy.client:app"`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from fedproto.deploy.parcels import Parcel
    from fedproto.deploy.settings import MemberSettings

app = ClientApp()
LOG = logging.getLogger("flwr")


@app.train()
def train(message: Message, context: Context) -> Message:
    return _replied(message, context, _train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return _replied(message, context, _evaluate)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who are you?"""
    return _replied(message, context, _introduce)


def _train(asked: Parcel, own: MemberSettings) -> Parcel:
    from fedproto.deploy.member import answer

    return answer(asked, own)


def _evaluate(asked: Parcel, own: MemberSettings) -> Parcel:
    from fedproto.deploy.member import scored

    return scored(asked, own)


def _introduce(asked: Parcel, own: MemberSettings) -> Parcel:
    from fedproto.deploy.parcels import Parcel

    return Parcel({"member": own.name}, {})


def _replied(message: Message, context: Context, act: Callable[[Parcel, MemberSettings], Parcel]) -> Message:
    """The reply to a message. Of an error only its code leaves: the rest is for the member's own log.

    Every exception is caught here, because Flower sends the text of what it catches itself to the server.
    """
    from fedproto.deploy.codes import code_of
    from fedproto.deploy.parcels import Parcel, printable
    from fedproto.deploy.post import from_record, to_record
    from fedproto.errors import FedProtoError

    nonce = {}
    try:
        asked = from_record(message.content)
        nonce = {"nonce": asked.header.get("nonce")}  # shows that the answer is to this message
        if "refused" in asked.header:
            LOG.warning("The last answer did not count: %s", printable(str(asked.header["refused"])))
        reply = act(asked, _read_own_file(context.node_config))
        content = to_record(Parcel(reply.header | nonce, reply.arrays))
    except FedProtoError as error:
        LOG.error("This member cannot answer (%s): %s", code_of(error), error)
        content = to_record(Parcel({"error": code_of(error)} | nonce, {}))
    except Exception as error:
        LOG.exception("This member cannot answer (%s)", code_of(error))
        content = to_record(Parcel({"error": code_of(error)} | nonce, {}))
    return Message(content, reply_to=message)


def _read_own_file(node_config: Mapping[str, Any]) -> MemberSettings:
    from fedproto.deploy.settings import read_member
    from fedproto.errors import ConfigError

    if "member" not in node_config:
        raise ConfigError("this SuperNode was started without its file: --node-config 'member=\"PATH.toml\"'")
    return read_member(Path(str(node_config["member"])), operated=True)
