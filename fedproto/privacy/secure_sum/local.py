"""A secure sum of members that are all in this process, and what each of them would send."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np

from fedproto.privacy.secure_sum.member import KeyStage, MaskedStage, ShareStage, start_member
from fedproto.privacy.secure_sum.messages import (
    COMMITMENT_BYTES,
    KEYS_BYTES,
    NUMBER_BYTES,
    SEALED_BYTES,
)
from fedproto.privacy.secure_sum.primitives import Draw
from fedproto.privacy.secure_sum.server import STAGES, SumServer
from fedproto.privacy.secure_sum.shamir import SHARE_BYTES
from fedproto.privacy.secure_sum.terms import SumTerms


class Outcome(NamedTuple):
    """What became of a secure sum."""

    total: np.ndarray  # (length,) the sum, as float64
    arrived: list[int]  # the members in it
    sent: np.ndarray  # (members, stages) bytes that each member sent
    received: np.ndarray  # (members, stages) bytes that each was sent after each stage


def add_securely(
    terms: SumTerms,
    values: Mapping[int, np.ndarray],
    members: int,
    silent: Mapping[str, Set[int]] | None = None,
    neighbours: int = 0,
    draw: Draw = os.urandom,
) -> Outcome:
    """Run the protocol; TrainingError if too few members are left at the end of a stage.

    values   (length,) by member
    members  how many there are; those who are silent before they mask need no values
    silent   whose messages do not arrive, by the first stage that they are missing from
    """
    silent = silent or {}
    server = SumServer(terms, members, neighbours, draw)
    states: dict[int, KeyStage | ShareStage | MaskedStage] = {}
    sent = np.zeros((members, len(STAGES)), dtype=np.int64)
    received = np.zeros_like(sent)
    replies = dict.fromkeys(range(members), b"")
    for column, stage in enumerate(STAGES):
        for number, reply in replies.items():
            if number in silent.get(stage, ()):
                continue
            message = _take_stage(terms, states, number, values.get(number), reply, draw)
            sent[number, column] = len(message)
            server.receive(number, message)
        replies = server.close()
        for number, reply in replies.items():
            received[number, column] = len(reply)
    assert server.total is not None
    return Outcome(server.total, server.arrived, sent, received)


def _take_stage(
    terms: SumTerms,
    states: dict[int, KeyStage | ShareStage | MaskedStage],
    number: int,
    values: np.ndarray | None,
    reply: bytes,
    draw: Draw,
) -> bytes:
    """Return what a member sends next, and replace its state."""
    state = states.get(number)
    if state is None:
        states[number], message = start_member(terms, number, draw)
    elif isinstance(state, KeyStage):
        states[number], message = state.share(reply, draw)
    elif isinstance(state, ShareStage):
        assert values is not None
        states[number], message = state.mask(values, reply)
    else:
        message = state.unmask(reply)
        del states[number]
    return message


def count_bytes(
    terms: SumTerms, members: int, lost: Set[int] = frozenset()
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each member sends and receives, if all are neighbours.

    They are those of `add_securely` with `silent={"masked": lost}`, and the masked values of the
    lost members, which were sent and did not arrive.
    """
    key_list = members * (NUMBER_BYTES + KEYS_BYTES)
    sealed = (members - 1) * (NUMBER_BYTES + SEALED_BYTES)
    masked = terms.length * terms.fixed_point.dtype.itemsize
    arrived = (members - len(lost)) * NUMBER_BYTES
    unmasking = members * (NUMBER_BYTES + SHARE_BYTES)
    sent = np.full(members, KEYS_BYTES + COMMITMENT_BYTES + sealed + masked)
    received = np.full(members, key_list + sealed)
    is_in_sum = [number not in lost for number in range(members)]
    sent[is_in_sum] += unmasking
    received[is_in_sum] += arrived
    return sent, received
