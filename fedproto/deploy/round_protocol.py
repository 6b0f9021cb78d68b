"""The rounds of a deployed federation: ask who is there, hear what comes in time, keep what is sound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from fedproto.deploy.error_codes import describe_code
from fedproto.deploy.messages import Message
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.validation import Expected
from fedproto.errors import Refused, RunFolderError, TrainingError

Say = Callable[[str], None]
LONGEST_PAUSE = 60.0  # seconds between two attempts


class Transport(Protocol):
    """How messages get to members and back."""

    def present(self) -> list[str]:
        """The members that can be reached now."""

    def exchange(
        self, kind: str, parcels: dict[str, Message], timeout: float
    ) -> Iterator[tuple[str, Message | str, int]]:
        """Send, and give each answer until all have come or time is up: from whom, what it says (or why it cannot be
        believed), its bytes. Who could not answer says an `error`, one of the codes of `codes.py`."""

    def sent(self) -> dict[str, int]:
        """The bytes that went to each member in the last exchange."""


def serve(hall: ServerState, post: Transport, say: Say) -> None:
    """All rounds from where the hall stands, and the last accuracies."""
    if not hall.path.exists():
        _save(hall, say)  # now: members will remember which federation asked them
    say(f"round {hall.round} of {hall.settings.rounds} is done; state in {hall.path}")
    while hall.round < hall.settings.rounds:
        _round(hall, post, say)
    _last_words(hall, post, say)


def _save(hall: ServerState, say: Say) -> None:
    """Write the server's file, trying again while `patience` lasts: a disk that is full now may not stay so."""
    ends = time.monotonic() + hall.settings.patience
    for pause in _pauses():
        try:
            hall.save()
            break
        except RunFolderError as error:
            if time.monotonic() > ends:
                raise
            say(f"{error}; nothing is lost, and it is tried again in {pause:g} s")
            time.sleep(pause)


def _pauses() -> Iterator[float]:
    """Seconds to wait before each new attempt: twice as long every time, up to a limit."""
    pause = 0.5
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


def _quorum(hall: ServerState, post: Transport) -> list[str]:
    """The members that are there or have answered, once there are enough of them."""
    ends = time.monotonic() + hall.settings.patience
    while True:
        there = sorted(filter(hall.admits, set(post.present()) | set(hall.answers)))
        if len(there) >= hall.settings.quorum:
            return there
        if time.monotonic() > ends:
            raise TrainingError(
                f"round {hall.round + 1}: {len(there)} members are there, and {hall.settings.quorum} are wanted; start "
                "them, and this again: it goes on where it stopped"
            )
        time.sleep(0.5)


def _round(hall: ServerState, post: Transport, say: Say) -> None:
    """Ask until a quorum of answers counts, then close the round.

    Whose answer counts is not asked again; who had trained the round answers from its file. A round that stays without
    a quorum for `patience` after the first attempt is not closed.
    """
    number, quorum = hall.round + 1, hall.settings.quorum
    ends: float | None = None
    for pause in _pauses():
        there = _quorum(hall, post)
        silent = _ask(hall, post, [name for name in there if name not in hall.answers], say)
        missing = f"; {', '.join(sorted(silent))} did not answer" if silent else ""
        counted = len(hall.answers)
        if counted >= quorum:
            break
        _save(hall, say)  # who was refused, and why
        too_few = f"round {number}: {counted} answers counted{missing}, and {quorum} are wanted"
        ends = ends or time.monotonic() + hall.settings.patience
        if time.monotonic() + pause > ends:
            raise TrainingError(f"{too_few}; start this again: it goes on with the same round")
        say(f"{too_few}; the others are asked again in {pause:g} s")
        time.sleep(pause)
    hall.close_round()
    _save(hall, say)
    say(f"round {number}: {counted} of {len(there)} answers counted{missing}")


def _ask(hall: ServerState, post: Transport, names: list[str], say: Say) -> set[str]:
    """Send the round to these members and take what they answer; gives those who said nothing."""
    silent = set(names)
    invitations = {name: hall.invite(name) for name in names}
    for name, found, size in post.exchange("train", invitations, hall.settings.timeout):
        reason = _heard(hall, name, found, size, hall.expected(frozenset(silent)))
        silent.discard(name)
        if reason:
            say(f"round {hall.round + 1}: {name} {reason}")
    for name, reason in hall.judge().items():
        say(f"round {hall.round + 1}: {name} was refused: {reason}")
    for name, sent in post.sent().items():
        if name in invitations:
            payload = len(invitations[name].payload())
            hall.sent(name, payload, max(0, sent - payload))
    return silent


def _heard(
    hall: ServerState, name: str, found: Message | str, size: int, expected: Expected
) -> str:
    """Why an answer does not count; empty where it does."""
    if name not in hall.seats:
        return "was refused: it is no member"
    payload = len(found.payload()) if isinstance(found, Message) else 0
    hall.heard(name, payload, max(0, size - payload))
    if isinstance(found, str):
        hall.refuse(name, found)
        return f"was refused: {found}"
    if "error" in found.header:
        hall.fail(name, describe_code(found.header["error"]))
        return f"failed: {hall.seats[name].reason}"
    try:
        hall.take(name, found, expected)
    except Refused as error:
        return f"was refused: {error}"
    return ""


def _last_words(hall: ServerState, post: Transport, say: Say) -> None:
    """Everybody's accuracy with the server's last state; who is silent keeps the one before."""
    there = sorted(name for name in set(post.present()) if name in hall.seats and hall.admits(name))
    invitations = {name: hall.invite(name, whole=True) for name in there}
    for name, found, size in post.exchange("evaluate", invitations, hall.settings.timeout):
        if name in invitations:
            hall.heard(name, 0, size)
        if name in invitations and isinstance(found, Message):
            hall.note_accuracy(name, found)
    for name, sent in post.sent().items():
        if name in invitations:
            hall.sent(name, 0, sent)
    _save(hall, say)
    say(f"{hall.round} rounds are done; `fedproto deploy status {hall.path.parent}` shows them")
