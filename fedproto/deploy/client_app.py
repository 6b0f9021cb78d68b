"""The app that Flower starts at a member, in a new process for every message.

It is named in pyproject.toml as `clientapp = "fedproto.deploy.client_app:app"`.
"""

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
    """Train a round, and reply with the upload."""
    return _reply(message, context, _train)


@app.evaluate()
def evaluate(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Reply with the member's accuracies."""
    return _reply(message, context, _evaluate)


@app.query()
def query(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Reply with the member's name."""
    return _reply(message, context, _introduce)


def _train(request: Message, own: MemberSettings) -> Message:
    from fedproto.deploy.messages import SECURE_SUM

    if SECURE_SUM in request.header:
        from fedproto.deploy.secure_stages import take_stage

        return take_stage(request, own)
    from fedproto.deploy.member import train_round

    return train_round(request, own)


def _evaluate(request: Message, own: MemberSettings) -> Message:
    from fedproto.deploy.member import evaluate_member

    return evaluate_member(request, own)


def _introduce(request: Message, own: MemberSettings) -> Message:
    from fedproto.deploy.messages import Message

    return Message({"member": own.name}, {})


def _reply(
    message: FlowerMessage, context: Context, act: Callable[[Message, MemberSettings], Message]
) -> FlowerMessage:
    """Return the reply to a message; of an error, only its code leaves the member.

    Every exception is caught here and written to the member's own log, because Flower would send
    the text of those it catches to the server.
    """
    from fedproto.deploy.error_codes import describe_error
    from fedproto.deploy.flower_transport import from_record, to_record
    from fedproto.deploy.messages import Message, make_printable
    from fedproto.errors import FedProtoError

    nonce = {}
    try:
        request = from_record(message.content)
        nonce = {"nonce": request.header.get("nonce")}  # shows what the reply answers
        if "refused" in request.header:
            reason = make_printable(str(request.header["refused"]))
            LOG.warning("The last reply did not count: %s", reason)
        reply = act(request, _read_settings(context.node_config))
        content = to_record(Message(reply.header | nonce, reply.arrays))
    except FedProtoError as error:
        told = describe_error(error)
        LOG.error("This member cannot reply (%s): %s", told["error"], error)
        content = to_record(Message(told | nonce, {}))
    except Exception as error:
        told = describe_error(error)
        LOG.exception("This member cannot reply (%s)", told["error"])
        content = to_record(Message(told | nonce, {}))
    return FlowerMessage(content, reply_to=message)


def _read_settings(node_config: Mapping[str, Any]) -> MemberSettings:
    """Return the settings in the file that the member's operator started it with."""
    from fedproto.deploy.settings import read_member
    from fedproto.errors import ConfigError

    if "member" not in node_config:
        raise ConfigError(
            "this SuperNode was started without its file: --node-config 'member=\"PATH.toml\"'"
        )
    return read_member(Path(str(node_config["member"])), operated=True)
