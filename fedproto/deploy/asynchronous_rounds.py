"""Asynchronous rounds of a deployed federation: a round waits for some replies, not for everybody.

A request stays open until it is answered or `timeout` seconds are over, over however many rounds
that is. So a member that is always late counts, with a smaller weight, instead of never. A member
whose reply counts is asked again as soon as its round is closed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fedproto.deploy.passed_rounds import explain_later_rounds, pass_over_rounds
from fedproto.deploy.server_actions import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    Say,
    Transport,
    handle_reply,
    note_sent_bytes,
    save_state,
    wait_for_quorum,
)
from fedproto.deploy.server_state import ServerState
from fedproto.errors import TrainingError

#: How often the server looks who is present, while nothing happens.
PRESENCE_SECONDS = 10.0


@dataclass
class _Absence:
    """When a member may be asked again whose last reply did not count."""

    until: float
    pause: float = FIRST_PAUSE_SECONDS


@dataclass
class AsynchronousRounds:
    """Runs the rounds of a federation whose settings have a `buffer`.

    open       when each open request is given up, by member
    refused    the members whose last reply did not count
    next_look  when the server looks again who can be asked
    """

    state: ServerState
    transport: Transport
    say: Say
    open: dict[str, float] = field(default_factory=dict)
    refused: dict[str, _Absence] = field(default_factory=dict)
    next_look: float = 0.0

    def run(self) -> None:
        """Run all remaining rounds; what is still open then is not waited for."""
        wait_for_quorum(self.state, self.transport)
        while self.state.round < self.state.settings.rounds:
            self._run_round()

    def _run_round(self) -> None:
        """Close a round with the reply that fills the buffer.

        If none counts for `timeout` and `patience` together, TrainingError is raised, and the
        round stays open.
        """
        state = self.state
        settings = state.settings
        number = state.round + 1
        self._ask_idle_members()
        deadline = time.monotonic() + settings.timeout + settings.patience
        while len(state.replies) < settings.buffer:
            accepted = self._take_replies()
            now = time.monotonic()
            if accepted:
                deadline = now + settings.timeout + settings.patience
            if len(state.replies) >= settings.buffer:
                self._refuse_outliers()
            elif pass_over_rounds(state, settings.buffer, self.say):
                self.refused.clear()
                return
            elif now > deadline:
                save_state(state, self.say)  # with the refusals and their reasons
                raise TrainingError(
                    f"round {number}: {len(state.replies)} replies accepted, but {settings.buffer} "
                    "are needed; run this again: it continues with the same round"
                    f"{explain_later_rounds(state)}"
                )
            elif now > self.next_look:
                self._ask_idle_members()
        late = state.describe_late_replies()
        count = len(state.replies)
        state.close_round()
        save_state(state, self.say)
        self.say(f"round {number}: {count} replies accepted{late}, {len(self.open)} still open")

    def _ask_idle_members(self) -> None:
        """Send a request to every member that is present, has no open one and is not in the buffer.

        A member whose last reply did not count is left alone for a while.
        """
        state = self.state
        now = time.monotonic()
        self.next_look = now + PRESENCE_SECONDS
        for name, given_up in list(self.open.items()):
            if now > given_up:
                del self.open[name]
                self.say(f"round {state.round + 1}: {state.title(name)} did not reply in time")
        idle = []
        for name in sorted(set(self.transport.find_members())):
            if not state.admits(name) or name in self.open or name in state.replies:
                continue
            if name in self.refused and now < self.refused[name].until:
                self.next_look = min(self.next_look, self.refused[name].until)
                continue
            idle.append(name)
        if not idle:
            return
        requests = {name: state.make_request(name) for name in idle}
        self.transport.send("train", requests, state.settings.timeout)
        note_sent_bytes(state, self.transport, requests)
        given_up = time.monotonic() + state.settings.timeout
        self.open |= dict.fromkeys(idle, given_up)

    def _take_replies(self) -> int:
        """Handle the replies that have come; return how many of them were accepted."""
        state = self.state
        accepted = 0
        for reply in self.transport.receive():
            name = reply.member
            problem = handle_reply(state, reply, self.open)
            self.open.pop(name, None)
            if problem is None:
                accepted += 1
                self.refused.pop(name, None)
            else:
                self.say(f"round {state.round + 1}: {state.title(name)} {problem}")
                self._leave_alone(name)
        return accepted

    def _refuse_outliers(self) -> None:
        for name, reason in self.state.refuse_outliers().items():
            number = self.state.round + 1
            self.say(f"round {number}: {self.state.title(name)} was refused: {reason}")
            self._leave_alone(name)

    def _leave_alone(self, name: str) -> None:
        """Let a member wait whose reply did not count, twice as long each time, up to a limit."""
        pause = FIRST_PAUSE_SECONDS
        if name in self.refused:
            pause = min(2 * self.refused[name].pause, MAX_PAUSE_SECONDS)
        self.refused[name] = _Absence(time.monotonic() + pause, pause)
        self.next_look = min(self.next_look, self.refused[name].until)
