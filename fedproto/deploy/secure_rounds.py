"""Rounds in which a deployed server learns only the sum of what members upload.

The stages of privacy/secure_sum are requests to train, and their answers; members train in the
stage `masked`. A member that does not answer a stage is out of the round. If too few are left, the
sum is given up and the round begins again with new keys, unless unmasking has begun: then it is
over without an update, also for a server that was killed meanwhile. So nobody is ever asked for
shares of two sums of one round.
"""

from __future__ import annotations

import time

import numpy as np

from fedproto.core.summation import Summation
from fedproto.core.types import GroupLayout
from fedproto.deploy.messages import SECURE_SUM, Header, Message
from fedproto.deploy.passed_rounds import explain_later_rounds, pass_over_rounds
from fedproto.deploy.server_actions import (
    Reply,
    Say,
    Transport,
    charge_round,
    iterate_pauses,
    note_sent_bytes,
    save_state,
    wait_for_quorum,
)
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.validation import check_site
from fedproto.errors import Refused, TrainingError
from fedproto.privacy.secure_sum.flat_uploads import count_values, from_vector, make_zeros
from fedproto.privacy.secure_sum.server import STAGES, SumServer
from fedproto.privacy.secure_sum.simulated import SecureSum
from fedproto.privacy.secure_sum.stage_fields import pack_terms


def run_secure_round(
    state: ServerState, summation: Summation, transport: Transport, say: Say
) -> None:
    """Run sums until one succeeds, or is given up when unmasking has begun.

    If none succeeds for `patience` seconds after the first attempt, TrainingError is raised.
    """
    assert isinstance(summation, SecureSum)
    number = state.round + 1
    deadline: float | None = None
    for pause in iterate_pauses():
        cohort = state.sample_cohort(wait_for_quorum(state, transport))
        if not _has_something_to_add(state, cohort):
            state.round = number
            save_state(state, say)
            say(f"round {number}: all that members send once has been added")
            return
        charge_round(state, cohort, say)
        secure_round = _SecureRound(state, summation, transport, say, cohort)
        try:
            secure_round.run()
            return
        except TrainingError as error:
            save_state(state, say)  # with the refusals and their reasons
            if state.round == number:
                say(f"round {number}: {error}; the round ends without an update")
                return
            if pass_over_rounds(state, state.settings.quorum, say):
                return
            if deadline is None:
                deadline = time.monotonic() + state.settings.patience
            if time.monotonic() + pause > deadline:
                raise TrainingError(
                    f"round {number}: {error}; run this again: it continues with the same round"
                    f"{explain_later_rounds(state)}"
                ) from error
            say(f"round {number}: {error}; the next attempt is in {pause:g} s")
            time.sleep(pause)


def _has_something_to_add(state: ServerState, names: list[str]) -> bool:
    """Return whether members send more than what is sent once, or some of that is to come."""
    if set(state.layouts) > set(state.algorithm.once):
        return True
    return all(state.lacks_once(name) for name in names)


class _SecureRound:
    """One attempt to add the uploads of the members that are asked in a round."""

    def __init__(
        self,
        state: ServerState,
        summation: SecureSum,
        transport: Transport,
        say: Say,
        cohort: list[str],
    ) -> None:
        self.state = state
        self.transport = transport
        self.say = say
        self.number = state.round + 1
        self.names = cohort  # a member's number in this sum is its place here
        self.layouts = self._choose_groups()
        length, _ = count_values(self.layouts)
        self.terms = summation.make_terms(len(cohort), length)
        self.server = SumServer(self.terms, len(cohort))
        self.replies: dict[str, Message] = {}  # of the stage `masked`

    def _choose_groups(self) -> dict[str, GroupLayout]:
        """Return what is added: groups that are sent once only if nobody here has sent them.

        The sum over a few latecomers would tell the server about each of them.
        """
        groups = dict(self.state.layouts)
        if not all(self.state.lacks_once(name) for name in self.names):
            for name in self.state.algorithm.once:
                del groups[name]
        return groups

    def run(self) -> None:
        """Go through all stages and update the server; TrainingError if too few are left."""
        payloads = dict.fromkeys(range(len(self.names)), b"")
        for stage in STAGES:
            requests = {}
            for position, payload in payloads.items():
                requests[self.names[position]] = self._make_request(stage, position, payload)
            if stage == "unmasking":
                self._begin_unmasking()
            silent = self._exchange(stage, requests)
            if silent:
                titles = ", ".join(self.state.title(name) for name in sorted(silent))
                self.say(f"round {self.number}: {titles} did not send {stage}")
            payloads = self.server.close()
        self._update()

    def _begin_unmasking(self) -> None:
        """Use up the round's number before anybody is asked for shares."""
        self.state.round = self.number
        save_state(self.state, self.say)

    def _make_request(self, stage: str, position: int, payload: bytes) -> Message:
        """Return the request of a stage; what members train from is sent where they train."""
        request = self.state.make_request(self.names[position])
        asked = {"stage": stage, "position": position, **pack_terms(self.terms)}
        header: Header = request.header | {SECURE_SUM: asked}
        left_out = sorted(self.state.layouts.keys() - self.layouts.keys())
        if left_out:
            header["delivered"] = left_out
        arrays = dict(request.arrays) if stage == "masked" else {}
        if payload:
            arrays[SECURE_SUM] = np.frombuffer(payload, np.uint8)
        return Message(header, arrays)

    def _exchange(self, stage: str, requests: dict[str, Message]) -> set[str]:
        """Send the requests of a stage, take the replies, and return who did not reply."""
        silent = set(requests)
        timeout = self.state.settings.timeout
        for reply in self.transport.exchange("train", requests, timeout):
            problem = self._take_reply(stage, reply, silent)
            silent.discard(reply.member)
            if problem is not None:
                self.say(f"round {self.number}: {self.state.title(reply.member)} {problem}")
        note_sent_bytes(self.state, self.transport, requests)
        return silent

    def _take_reply(self, stage: str, reply: Reply, pending: set[str]) -> str | None:
        """Take a reply of a stage, or return why it does not count."""
        content = reply.content
        if reply.member not in self.state.members:
            return "was refused: it is not a member"
        member = self.state.members[reply.member]
        payload_bytes = content.count_bytes() if isinstance(content, Message) else 0
        member.note_received(payload_bytes, max(0, reply.bytes - payload_bytes))
        try:
            if isinstance(content, str):
                raise Refused(content)
            if "error" in content.header:
                return f"failed: {self.state.note_failure(reply.member, content.header)}"
            if reply.member not in pending:
                raise Refused("unexpected reply: the sender has replied, or is out of the round")
            payload = self._check_reply(stage, reply.member, content)
            self.server.receive(self.names.index(reply.member), payload)
        except Refused as error:
            member.note_refusal(str(error))
            return f"was refused: {error}"
        if stage == "masked":
            self.replies[reply.member] = content
        return None

    def _check_reply(self, stage: str, name: str, reply: Message) -> bytes:
        """Return the bytes of a reply; Refused unless it has the form of a reply of this stage."""
        stated = {key: reply.header.get(key) for key in ("member", "round", "stage")}
        if stated != {"member": name, "round": self.number, "stage": stage}:
            raise Refused(f"it is not of this member, of round {self.number}, or of stage {stage}")
        check_site(reply)
        payload = reply.arrays.get(SECURE_SUM)
        if set(reply.arrays) != {SECURE_SUM} or payload is None:
            raise Refused("its arrays are not those of a secure sum")
        if payload.dtype != np.uint8 or payload.ndim != 1:
            raise Refused("its bytes are not those of a secure sum")
        return payload.tobytes()

    def _update(self) -> None:
        """Make the server's new state from the sum."""
        assert self.server.total is not None
        arrived = [self.names[position] for position in self.server.arrived]
        total = from_vector(self.server.total, make_zeros(self.layouts))
        self.state.apply_sum(total, arrived)
        for name in arrived:
            member = self.state.members[name]
            member.reason = ""
            member.note_accuracy(self.replies[name])
            member.site = self.replies[name].header.get("site", "")
        save_state(self.state, self.say)
        self.say(
            f"round {self.number}: the uploads of {len(arrived)} of {len(self.names)} members were "
            "added in a secure sum"
        )
