"""The rounds of a deployed federation: send requests, wait for replies, keep what is believed."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fedproto.deploy.asynchronous_rounds import AsynchronousRounds
from fedproto.deploy.messages import Message
from fedproto.deploy.passed_rounds import explain_later_rounds, pass_over_rounds
from fedproto.deploy.secure_rounds import run_secure_round
from fedproto.deploy.server_actions import (
    Say,
    Transport,
    charge_round,
    handle_reply,
    has_budget,
    iterate_pauses,
    note_sent_bytes,
    save_state,
    wait_for_quorum,
)
from fedproto.deploy.server_state import ServerState
from fedproto.errors import TrainingError

#: The requests to evaluate that are made at a time have about so many bytes of arrays.
EVALUATION_BYTES = 2**28


def serve(state: ServerState, transport: Transport, say: Say) -> None:
    """Run all remaining rounds, and then ask every member for its accuracy."""
    if not state.path.exists():
        # Before the first request: members remember which federation sent it.
        save_state(state, say)
    say(f"round {state.round} of {state.settings.rounds} is done; the state is in {state.path}")
    if state.settings.buffer:
        AsynchronousRounds(state, transport, say).run()
    while state.round < state.settings.rounds and has_budget(state, transport, say):
        if state.algorithm.summation is None:
            _run_round(state, transport, say)
        else:
            run_secure_round(state, state.algorithm.summation, transport, say)
    _evaluate_members(state, transport, say)


def _run_round(state: ServerState, transport: Transport, say: Say) -> None:
    """Send requests until a quorum of replies is accepted, then close the round.

    A member whose reply was accepted is not asked again; one that has trained the round before
    replies from its file. If there is no quorum for `patience` seconds after the first attempt,
    the round stays open, and TrainingError is raised.
    """
    number = state.round + 1
    quorum = state.settings.quorum
    deadline: float | None = None
    for pause in iterate_pauses():
        cohort = state.sample_cohort(wait_for_quorum(state, transport))
        unheard = [name for name in cohort if name not in state.replies]
        silent = _request_training(state, transport, unheard, say)
        titles = [state.title(name) for name in sorted(silent)]
        missing = f"; {', '.join(titles)} did not reply" if silent else ""
        accepted = len(state.replies)
        if accepted >= quorum:
            break
        if pass_over_rounds(state, quorum, say):
            return
        save_state(state, say)  # with the refusals and their reasons
        too_few = f"round {number}: {accepted} replies accepted{missing}, but {quorum} are needed"
        if deadline is None:
            deadline = time.monotonic() + state.settings.patience
        if time.monotonic() + pause > deadline:
            later = explain_later_rounds(state)
            again = "run this again: it continues with the same round"
            raise TrainingError(f"{too_few}; {again}{later}")
        say(f"{too_few}; the other members are asked again in {pause:g} s")
        time.sleep(pause)
    state.close_round()
    save_state(state, say)
    say(f"round {number}: {accepted} of {len(cohort)} replies accepted{missing}")


def _request_training(
    state: ServerState, transport: Transport, names: list[str], say: Say
) -> set[str]:
    """Ask members to train, handle their replies, and return those that did not reply."""
    silent = set(names)
    charge_round(state, names, say)
    requests = {name: state.make_request(name) for name in names}
    for reply in transport.exchange("train", requests, state.settings.timeout):
        problem = handle_reply(state, reply, silent)
        silent.discard(reply.member)
        if problem is not None:
            say(f"round {state.round + 1}: {state.title(reply.member)} {problem}")
    for name, reason in state.refuse_outliers().items():
        say(f"round {state.round + 1}: {state.title(name)} was refused: {reason}")
    note_sent_bytes(state, transport, requests)
    _note_lateness(state, transport, silent, say)
    return silent


def _note_lateness(state: ServerState, transport: Transport, silent: set[str], say: Say) -> None:
    """Record who has not replied in time, and by how much earlier replies came too late.

    Members are told with their next request.
    """
    timeout = state.settings.timeout
    for name in silent:
        state.members[name].note_silence(timeout)
    for name, seconds in transport.take_lateness().items():
        if name not in state.members or name in state.replies:
            continue
        state.members[name].note_lateness(seconds, timeout)
        say(f"round {state.round + 1}: {state.title(name)}: {state.members[name].reason}")


def _evaluate_members(state: ServerState, transport: Transport, say: Say) -> None:
    """Ask every member for its accuracy with the server's last state.

    A member that does not reply keeps the accuracy it reported before.
    """
    present = set(transport.find_members())
    names = sorted(name for name in present if name in state.members and state.admits(name))
    for requests in _make_evaluation_requests(state, names):
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
    save_state(state, say)
    say(
        f"{state.round} rounds are done in all; `fedproto deploy status {state.path.parent}` shows "
        "the members; more need a larger `rounds`, which is the total: "
        f"./run.sh 'rounds={state.round + 10}'"
    )


def _make_evaluation_requests(state: ServerState, names: list[str]) -> Iterator[dict[str, Message]]:
    """Yield the requests to evaluate, as many at a time as fit into the memory set aside.

    Each has the prototypes of all classes: for very many members they are too large together.
    """
    requests: dict[str, Message] = {}
    size = 0
    for name in names:
        requests[name] = state.make_request(name, all_classes=True)
        size += sum(value.nbytes for value in requests[name].arrays.values())
        if size > EVALUATION_BYTES:
            yield requests
            requests = {}
            size = 0
    if requests:
        yield requests
