"""How long a member waits until it looks for a message again; what certificate a server shows."""

import importlib
import inspect
import time
from types import ModuleType
from typing import Any

import pytest

from fedproto.deploy import flower_node
from fedproto.deploy.certificates import make_current_context
from fedproto.deploy.flower_node import IDLE_SECONDS, Pauses, follow_certificate, look_often


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
