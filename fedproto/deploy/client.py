"""The app that Flower starts at a member, anew for every message: `clientapp = "fedproto.deploy.client:app"`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from fedproto.deploy.parcels import Parcel
    from fedproto.deploy.settings import MemberSettings

app = ClientApp()
LOG = logging.getLogger("flwr")


@app.train()
def train(message: Message, context: Context) -> Message:
    from fedproto.deploy.member import answer

    return _replied(message, context, answer)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    from fedproto.deploy.member import scored

    return _replied(message, context, scored)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who are you?"""
    from fedproto.deploy.parcels import Parcel

    return _replied(message, context, lambda parcel, own: Parcel({"member": own.name}, {}))


def _replied(message: Message, context: Context, act: Callable[[Parcel, MemberSettings], Parcel]) -> Message:
    """An error meant for people becomes the answer, so that the server can say it; others are Flower's to report.

    What went wrong is said here, too, where the member's own people look.
    """
    from fedproto.deploy.parcels import Parcel, printable
    from fedproto.deploy.post import from_record, to_record
    from fedproto.deploy.settings import read_member
    from fedproto.errors import FedProtoError

    nonce = {}
    try:
        asked = from_record(message.content)
        nonce = {"nonce": asked.header.get("nonce")}  # shows that the answer is to this message
        if "refused" in asked.header:
            LOG.warning("The last answer did not count: %s", printable(str(asked.header["refused"])))
        reply = act(asked, read_member(Path(str(context.node_config["member"])), operated=True))
    except FedProtoError as error:
        LOG.error("This member cannot answer: %s", error)
        reply = Parcel({"error": str(error)}, {})
    return Message(to_record(Parcel(reply.header | nonce, reply.arrays)), reply_to=message)
