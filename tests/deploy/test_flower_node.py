"""How long a member waits until it looks for a message again; what certificate a server shows."""

import importlib
import inspect
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.deployment import pretend_task
from helpers.patience import PATIENCE_SECONDS

from fedproto.deploy import flower_node
from fedproto.deploy.certificates import make_current_context
from fedproto.deploy.flower_node import (
    GAVE_UP,
    IDLE_SECONDS,
    Pauses,
    follow_certificate,
    look_often,
    send_completely,
)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that would have been made."""
    pauses: list[float] = []
    monkeypatch.setattr(flower_node.time, "sleep", pauses.append)
    return pauses


def test_a_member_waits_a_fifth_of_its_idle_time_and_at_most_three_seconds(
    slept: list[float],
) -> None:
    pauses = Pauses()
    pauses.sleep(0.5)  # it has a message, and waits for the reply
    for _ in range(60):
        pauses.sleep(IDLE_SECONDS)
    assert slept[:6] == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert slept[6:9] == pytest.approx([0.1, 0.12, 0.144])  # a fifth of 0.5, 0.6 and 0.72 seconds
    assert slept[-1] == IDLE_SECONDS and max(slept) == IDLE_SECONDS


def test_a_member_that_was_never_asked_looks_as_rarely_as_flower(slept: list[float]) -> None:
    Pauses().sleep(IDLE_SECONDS)
    assert slept == [IDLE_SECONDS]


def test_flowers_loop_sleeps_by_these_pauses() -> None:
    """Where a new Flower sleeps otherwise, this fails, and `look_often` would change nothing."""
    pytest.importorskip("flwr")
    from flwr.supernode import start_client_internal as loop

    assert f"time.sleep({IDLE_SECONDS:g})" in inspect.getsource(loop.start_client_internal)
    assert loop.time is time
    try:
        look_often(loop)
        assert isinstance(loop.time.sleep.__self__, Pauses)
    finally:
        loop.time = time


def test_a_loop_that_sleeps_otherwise_is_left_alone() -> None:
    loop = ModuleType("loop")
    look_often(loop)
    assert not hasattr(loop, "time")


class LossyServer:
    """Of Flower's server what replies meet; the answer to the first announcement is lost."""

    def __init__(self) -> None:
        self.awaited: dict[str, set[str]] = {}  # ids of objects by session
        self.stored: dict[str, bytes] = {}

    def announce(self, message: object, tree: Any, seconds: float) -> tuple[set[str], str]:
        """As Flower's `send`, whose second attempt is told that nothing is missing."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self.awaited["first"] = {each.object_id for each in iterate_object_tree(tree)}
        return set(), "second"

    def push(self, run_id: int, session: str, object_id: str, contents: bytes) -> None:
        """As Flower's `push_object`."""
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

        sessions = [session] if session else list(self.awaited)
        for name in sessions:
            if object_id in self.awaited.get(name, set()):
                self.awaited[name].remove(object_id)
                self.stored[object_id] = contents
                return
        raise ObjectPushError(object_id, run_id, session)


def reply_through(loop: Any, server: LossyServer) -> None:
    """Send one reply by Flower's own function."""
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
    )

    request = Message(RecordDict(), 1, "train")
    reply = Message(RecordDict({"header": ConfigRecord({"json": "{}"})}), reply_to=request)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    objects = {name: value.deflate() for name, value in get_all_nested_objects(reply).items()}
    state = SimpleNamespace(
        get_messages_legacy=lambda is_reply: [reply],
        get_message_processing_duration=lambda message_id: 1.0,
        delete_messages=lambda message_ids: None,
    )
    tree = get_object_tree(reply)
    store = SimpleNamespace(
        get_object_tree=lambda _: tree, get=objects.get, delete=lambda object_id: None
    )
    loop._push_messages(
        state=state, object_store=store, send=server.announce, push_object=server.push
    )


def test_a_reply_whose_announcement_was_answered_in_vain_is_sent_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Flower's own function alone nothing is sent; once it does, ours is needed no more."""
    pytest.importorskip("flwr")
    pretend_task(monkeypatch)
    from flwr.supernode import start_client_internal as loop

    alone = LossyServer()
    reply_through(loop, alone)
    assert alone.stored == {} and len(alone.awaited["first"]) == 3
    flowers = loop._push_messages
    server = LossyServer()
    try:
        send_completely(loop)
        assert loop._push_messages is not flowers
        reply_through(loop, server)
    finally:
        loop._push_messages = flowers
    assert server.awaited["first"] == set() and len(server.stored) == 3


def test_objects_that_nobody_waits_for_stop_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the reply had arrived before."""
    pytest.importorskip("flwr")
    pretend_task(monkeypatch)
    from flwr.supernode import start_client_internal as loop

    server = LossyServer()
    announce = server.announce

    def announce_partly(*words: Any) -> tuple[set[str], str]:
        answer = announce(*words)
        server.stored[server.awaited["first"].pop()] = b"from the first attempt"
        return answer

    server.announce = announce_partly  # type: ignore[method-assign]
    flowers = loop._push_messages
    try:
        send_completely(loop)
        reply_through(loop, server)
    finally:
        loop._push_messages = flowers
    assert server.awaited["first"] == set() and len(server.stored) == 3


def test_a_loop_that_replies_otherwise_is_left_alone() -> None:
    loop: Any = ModuleType("loop")
    send_completely(loop)
    assert not hasattr(loop, "_push_messages")
    loop._push_messages = len
    send_completely(loop)
    assert loop._push_messages is len


def test_flowers_server_follows_the_file_of_its_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a new Flower is served otherwise, this fails: a renewal then needs a restart."""
    pytest.importorskip("flwr")
    import uvicorn

    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    assert command.uvicorn is uvicorn
    source = inspect.getsource(command)
    assert source.count("uvicorn.") == 1 and "uvicorn.run(" in source
    monkeypatch.setattr(command, "uvicorn", uvicorn)
    follow_certificate(command)
    assert command.uvicorn.run.func is uvicorn.run
    assert command.uvicorn.run.keywords == {"ssl_context_factory": make_current_context}


def test_a_server_without_uvicorn_is_left_alone() -> None:
    command = ModuleType("command")
    follow_certificate(command)
    assert not hasattr(command, "uvicorn")


def test_a_supernode_that_gives_up_leaves_no_process_behind() -> None:
    """Flower's HTTP thread would keep it alive for ever: nothing would start the member again."""
    script = """
import threading
from fedproto.deploy.flower_node import run_to_the_end

def give_up():
    threading.Thread(target=threading.Event().wait).start()

run_to_the_end(give_up)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == GAVE_UP
    assert done.stderr == "the SuperNode has given up its connection to the server\n"
