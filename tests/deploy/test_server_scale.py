"""What a server does for one member does not grow with the numbers of members and classes.

Lines that Python runs are counted, since times would depend on the machine.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers.deployment import make_reply, small_state
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.core import codec
from fedproto.deploy import server_state
from fedproto.deploy.accepted_replies import AcceptedReplies, AcceptedReply, SentRequest
from fedproto.deploy.outliers import Amounts
from fedproto.deploy.server_actions import Reply, handle_reply
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import ServerSettings, TrainingTerms


def count_lines(act: Callable[[], Any]) -> int:
    """Return how many lines of this package a call runs, those of each iteration included."""
    lines = 0

    def trace(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal lines
        if "fedproto" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


def make_state(folder: Path, members: int, classes: int) -> tuple[ServerState, list[str]]:
    """Return a server in its second round, whose members all have replied but the last one."""
    names = [f"member-{number}" for number in range(members)]
    class_names = ["x", "y", *(f"class-{number}" for number in range(classes))]
    settings = ServerSettings(
        state=str(folder), classes=",".join(class_names), members=",".join(names)
    )
    state = ServerState(settings, TrainingTerms(dim=4))
    for round in (1, 2):
        for name in names:
            state.make_request(name)
        for name in names[: -1 if round == 2 else None]:
            reply = make_reply(name, round=round)
            assert handle_reply(state, Reply(name, reply, 0), set(names)) is None
        if round == 1:
            state.close_round()
    return state, names


def test_the_work_for_one_reply_is_the_same_in_a_large_federation(tmp_path: Path) -> None:
    counted = []
    for members, classes in ((5, 3), (5, 3), (60, 3), (5, 80)):
        state, names = make_state(tmp_path / f"{members}-{classes}", members, classes)
        last = names[-1]
        reply = Reply(last, make_reply(last, round=2), 0)
        counted.append(
            (
                count_lines(lambda state=state, last=last: state.make_request(last)),
                count_lines(lambda state=state, last=last: state.admits(last)),
                count_lines(lambda state=state, names=names, reply=reply: handle(state, reply)),
            )
        )
    assert counted[1:] == counted[1:2] * 3  # the first fills caches


def handle(state: ServerState, reply: Reply) -> None:
    assert handle_reply(state, reply, [reply.member]) is None


def test_an_absent_member_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, names = make_state(tmp_path, 4, 3)
    state.close_round()  # without the last one
    measured = []

    class Counted(Amounts):
        @classmethod
        def measure(cls, upload: Any, spoken: list[str]) -> Amounts:
            measured.append(spoken)
            return Amounts.measure(upload, spoken)

    monkeypatch.setattr(server_state, "Amounts", Counted)
    assert state.refuse_outliers() == {} and len(measured) == len(names)
    assert state.refuse_outliers() == {} and len(measured) == len(names)
    again = make_reply(names[0], round=3)
    assert handle_reply(state, Reply(names[0], again, 0), names) is None
    state.close_round()
    assert state.refuse_outliers() == {} and len(measured) == len(names) + 1


def test_states_that_nobody_can_answer_are_not_kept(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    for round in (1, 2):
        state.make_request("a")
        expected = state.expect_reply("a", ["a"])
        state.accept_reply("a", make_reply("a", round=round), expected)
        state.close_round()
    assert {name: request.round for name, request in state.requests.items()} == {
        "a": 2,
        "b": 1,
        "c": 1,
    }
    assert all(request.server == {} for request in state.requests.values())


def test_a_late_reply_still_finds_the_state_that_it_was_requested_from(tmp_path: Path) -> None:
    state = small_state(tmp_path, buffer=1, max_staleness=1)
    for round in (1, 2):
        state.make_request("a")
        state.accept_reply("a", make_reply("a", round=round), state.expect_reply("a", ["a"]))
        state.close_round()
        kept = bool(state.requests["b"].server)
        assert kept == (round == 1)


# --- classes that replies bring


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.lists(st.sampled_from("uvwxyz"), unique=True), st.booleans()
        ),
        max_size=12,
    )
)
def test_the_classes_that_replies_bring_are_those_of_the_replies_that_are_left(
    steps: list[tuple[str, list[str], bool]],
) -> None:
    replies = AcceptedReplies()
    for name, spoken, is_refused in steps:
        if is_refused and name in replies:
            del replies[name]
        else:
            known = replies.brought - set(replies[name].brought if name in replies else ())
            brought = [each for each in spoken if each not in known]
            replies[name] = AcceptedReply(SentRequest(1, {}), {}, spoken, brought)
        assert replies.brought == {each for reply in replies.values() for each in reply.brought}
    replies.clear()
    assert replies == {} and replies.brought == set()


# --- bytes


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3),
            st.sampled_from(["float32", "float64", "int32", "uint8"]),
        ),
        max_size=4,
    )
)
def test_the_length_of_a_message_is_known_without_building_it(
    layout: dict[str, tuple[list[int], str]],
) -> None:
    arrays = {name: np.ones(shape, kind) for name, (shape, kind) in layout.items()}
    assert codec.count_bytes(arrays) == len(codec.encode(arrays))
