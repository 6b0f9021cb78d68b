"""What synchronous and asynchronous rounds of a deployed server have in common.

The transport of messages, the wait for a quorum, and what becomes of one reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

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

    def send(self, kind: str, requests: dict[str, Message], timeout: float) -> None:
        """Send requests whose replies `receive` returns, if they come within `timeout` seconds."""

    def receive(self) -> list[Reply]:
        """Return the replies to `send` that have come since; if there are none, after a pause."""

    def sent_bytes(self) -> dict[str, int]:
        """Return how many bytes each member was sent by the last `exchange` or `send`."""

    def take_lateness(self) -> dict[str, float]:
        """Return by how many seconds members were late whose reply has come since the last call."""


def save_state(state: ServerState, say: Say) -> None:
    """Write the server's file; if that fails, try again for `patience` seconds.

    A disk that is full may soon have space again.
    """
    deadline = time.monotonic() + state.settings.patience
    for pause in iterate_pauses():
        try:
            state.save()
            return
        except RunFolderError as error:
            if time.monotonic() > deadline:
                raise
            say(f"{error}; nothing is lost, and the next attempt is in {pause:g} s")
            time.sleep(pause)


def iterate_pauses() -> Iterator[float]:
    """Yield the seconds to wait before each new attempt: twice as long each time, up to a limit."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def wait_for_quorum(state: ServerState, transport: Transport) -> list[str]:
    """Return the members that are present or have replied, once there are enough of them.

    Those that cannot afford the round do not count; see `has_budget`.
    """

    def counts(name: str) -> bool:
        return state.admits(name) and state.affords_round(name)

    return _wait_for_members(state, transport, counts)


def has_budget(state: ServerState, transport: Transport, say: Say) -> bool:
    """Return whether a quorum of those who are present can afford the next round."""
    if state.privacy is None:
        return True
    present = _wait_for_members(state, transport, state.admits)
    spent = [state.title(name) for name in present if not state.affords_round(name)]
    is_enough = len(present) - len(spent) >= state.settings.quorum
    if spent:
        end = "they are not asked" if is_enough else "the federation ends"
        say(
            f"round {state.round + 1} would exceed the epsilon of {state.settings.epsilon:g} of "
            f"{', '.join(spent)}: {end}"
        )
    return is_enough


def charge_round(state: ServerState, names: list[str], say: Say) -> None:
    """Charge members for the next round, and put it on record, before they are asked."""
    if state.privacy is not None:
        state.charge_round(names)
        save_state(state, say)


def _wait_for_members(
    state: ServerState, transport: Transport, counts: Callable[[str], bool]
) -> list[str]:
    """Return those who are present or have replied, and count, once they are a quorum."""
    quorum = state.settings.quorum
    deadline = time.monotonic() + state.settings.patience
    while True:
        candidates = set(transport.find_members()) | set(state.replies)
        present = sorted(name for name in candidates if counts(name))
        if len(present) >= quorum:
            return present
        if time.monotonic() > deadline:
            raise TrainingError(
                f"round {state.round + 1}: {len(present)} members are present, but {quorum} are "
                "needed; start more members and run this again: it continues where it stopped"
            )
        time.sleep(0.5)


def handle_reply(state: ServerState, reply: Reply, pending: Collection[str]) -> str | None:
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
        return f"failed: {state.note_failure(name, content.header)}"
    try:
        state.accept_reply(name, content, state.expect_reply(name, pending))
    except Refused as error:
        return f"was refused: {error}"
    return None


def note_sent_bytes(
    state: ServerState, transport: Transport, requests: Mapping[str, Message]
) -> None:
    """Record what members were sent to train, by the last `exchange` or `send`."""
    for name, sent_bytes in transport.sent_bytes().items():
        if name in requests:
            payload_bytes = requests[name].count_bytes()
            state.members[name].note_sent(payload_bytes, max(0, sent_bytes - payload_bytes))
