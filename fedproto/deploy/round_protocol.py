"""The rounds of a deployed federation: send requests, wait for replies, keep what is believed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from fedproto.deploy.error_codes import describe_code
from fedproto.deploy.messages import Message
from fedproto.deploy.server_state import ServerState
from fedproto.errors import Refused, RunFolderError, TrainingError

Say = Callable[[str], None]
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 60.0


class Reply(NamedTuple):
    """What came back from a member."""

    member: str
    content: Message | str  # a message, or the reason why it cannot be believed
    bytes: int


class Transport(Protocol):
    """How messages get to members and back."""

    def find_members(self) -> list[str]:
        """Return the members that can be reached now."""

    def exchange(self, kind: str, requests: dict[str, Message], timeout: float) -> Iterator[Reply]:
        """Send requests, and yield each reply until all have come or `timeout` seconds are over.

        `kind` is "train" or "evaluate". A member that could not reply sends a message with an
        `error`, one of the codes of error_codes.py.
        """

    def sent_bytes(self) -> dict[str, int]:
        """Return how many bytes each member was sent in the last exchange."""


def serve(state: ServerState, transport: Transport, say: Say) -> None:
    """Run all remaining rounds, and then ask every member for its accuracy."""
    if not state.path.exists():
        _save(state, say)  # before the first request: members remember which federation sent it
    say(f"round {state.round} of {state.settings.rounds} is done; the state is in {state.path}")
    while state.round < state.settings.rounds:
        _run_round(state, transport, say)
    _evaluate_members(state, transport, say)


def _save(state: ServerState, say: Say) -> None:
    """Write the server's file; if that fails, try again for `patience` seconds.

    A disk that is full may soon have space again.
    """
    deadline = time.monotonic() + state.settings.patience
    for pause in _iterate_pauses():
        try:
            state.save()
            return
        except RunFolderError as error:
            if time.monotonic() > deadline:
                raise
            say(f"{error}; nothing is lost, and the next attempt is in {pause:g} s")
            time.sleep(pause)


def _iterate_pauses() -> Iterator[float]:
    """Yield the seconds to wait before each new attempt: twice as long each time, up to a limit."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _wait_for_quorum(state: ServerState, transport: Transport) -> list[str]:
    """Return the members that are present or have replied, once there are enough of them."""
    quorum = state.settings.quorum
    deadline = time.monotonic() + state.settings.patience
    while True:
        candidates = set(transport.find_members()) | set(state.replies)
        present = sorted(name for name in candidates if state.admits(name))
        if len(present) >= quorum:
            return present
        if time.monotonic() > deadline:
            raise TrainingError(
                f"round {state.round + 1}: {len(present)} members are present, but {quorum} are "
                "needed; start more members and run this again: it continues where it stopped"
            )
        time.sleep(0.5)


def _run_round(state: ServerState, transport: Transport, say: Say) -> None:
    """Send requests until a quorum of replies is accepted, then close the round.

    A member whose reply was accepted is not asked again; one that has trained the round before
    replies from its file. If there is no quorum for `patience` seconds after the first attempt,
    the round stays open, and TrainingError is raised.
    """
    number = state.round + 1
    quorum = state.settings.quorum
    deadline: float | None = None
    for pause in _iterate_pauses():
        present = _wait_for_quorum(state, transport)
        unheard = [name for name in present if name not in state.replies]
        silent = _request_training(state, transport, unheard, say)
        titles = [state.title(name) for name in sorted(silent)]
        missing = f"; {', '.join(titles)} did not reply" if silent else ""
        accepted = len(state.replies)
        if accepted >= quorum:
            break
        _save(state, say)  # with the refusals and their reasons
        too_few = f"round {number}: {accepted} replies accepted{missing}, but {quorum} are needed"
        if deadline is None:
            deadline = time.monotonic() + state.settings.patience
        if time.monotonic() + pause > deadline:
            raise TrainingError(f"{too_few}; run this again: it continues with the same round")
        say(f"{too_few}; the other members are asked again in {pause:g} s")
        time.sleep(pause)
    state.close_round()
    _save(state, say)
    say(f"round {number}: {accepted} of {len(present)} replies accepted{missing}")


def _request_training(
    state: ServerState, transport: Transport, names: list[str], say: Say
) -> set[str]:
    """Ask members to train, handle their replies, and return those that did not reply."""
    silent = set(names)
    requests = {name: state.make_request(name) for name in names}
    for reply in transport.exchange("train", requests, state.settings.timeout):
        problem = _handle_reply(state, reply, frozenset(silent))
        silent.discard(reply.member)
        if problem is not None:
            say(f"round {state.round + 1}: {state.title(reply.member)} {problem}")
    for name, reason in state.refuse_outliers().items():
        say(f"round {state.round + 1}: {state.title(name)} was refused: {reason}")
    for name, sent_bytes in transport.sent_bytes().items():
        if name in requests:
            payload_bytes = requests[name].count_bytes()
            state.members[name].note_sent(payload_bytes, max(0, sent_bytes - payload_bytes))
    return silent


def _handle_reply(state: ServerState, reply: Reply, pending: frozenset[str]) -> str | None:
    """Accept a reply, or return why it does not count."""
    name = reply.member
    content = reply.content
    if name not in state.members:
        return "was refused: it is not a member"
    member = state.members[name]
    payload_bytes = content.count_bytes() if isinstance(content, Message) else 0
    member.note_received(payload_bytes, max(0, reply.bytes - payload_bytes))
    if isinstance(content, str):
        member.note_refusal(content)
        return f"was refused: {content}"
    if "error" in content.header:
        member.note_failure(describe_code(content.header["error"]))
        return f"failed: {member.reason}"
    try:
        state.accept_reply(name, content, state.expect_replies(pending))
    except Refused as error:
        return f"was refused: {error}"
    return None


def _evaluate_members(state: ServerState, transport: Transport, say: Say) -> None:
    """Ask every member for its accuracy with the server's last state.

    A member that does not reply keeps the accuracy it reported before.
    """
    present = set(transport.find_members())
    names = sorted(name for name in present if name in state.members and state.admits(name))
    requests = {name: state.make_request(name, all_classes=True) for name in names}
    for reply in transport.exchange("evaluate", requests, state.settings.timeout):
        if reply.member not in requests:
            continue
        member = state.members[reply.member]
        member.note_received(0, reply.bytes)
        if isinstance(reply.content, Message):
            member.note_accuracy(reply.content)
    for name, sent_bytes in transport.sent_bytes().items():
        if name in requests:
            state.members[name].note_sent(0, sent_bytes)
    _save(state, say)
    say(
        f"{state.round} rounds are done in all; `fedproto deploy status {state.path.parent}` shows "
        "the members; more need a larger `rounds`, which is the total: "
        f"./run.sh 'rounds={state.round + 10}'"
    )
