"""A deployed federation is shown from its server's file, which `deploy status` reads, too."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.deployment import make_reply, small_state

from fedproto.deploy.server_state import ServerState
from fedproto.deploy.status import read_status
from fedproto.watch.collection import Collection
from fedproto.watch.deployed_view import DeployedView
from fedproto.watch.discovery import find_places


def play_round(state: ServerState, round: int) -> None:
    """Members a and b speak, c is refused."""
    expected = state.expect_replies(frozenset("abc"))
    for name in ("a", "b"):
        state.accept_reply(name, make_reply(name, round), expected)
        state.members[name].accuracy = {"prototype": 0.5 if name == "a" else 0.9}
    state.members["c"].note_refusal("its prototypes are <b>not finite</b>")
    state.close_round()
    state.save()


@pytest.fixture
def state(tmp_path: Path) -> ServerState:
    made = small_state(tmp_path / "federation" / "server")
    play_round(made, 1)
    return made


def view_of(state: ServerState) -> DeployedView:
    (place,) = find_places(state.path.parents[1])
    view = DeployedView(place)
    view.refresh()
    return view


def describe(view: DeployedView) -> dict[str, Any]:
    described = view.describe()
    json.dumps(described, allow_nan=False)
    return described


def test_members_are_told_as_the_status_has_them(state: ServerState) -> None:
    status = read_status(state.path)
    told = describe(view_of(state))
    assert (told["kind"], told["state"], told["rounds_done"]) == ("deployed", "running", 1)
    assert told["method"] == "fedproto"
    assert told["classes"] == ["x", "y", "z"]
    assert [client["name"] for client in told["clients"]] == list(status["members"])
    for client in told["clients"]:
        member = status["members"][client["name"]]
        assert client["last_round"] == member["last_round"]
        assert client["refused"] == member["refused"]
        assert client["classes"] == member["spoken"]
    assert told["accuracy"]["prototype"] == {"mean": 0.7, "std": 0.2}


def test_refusals_have_their_reasons(state: ServerState) -> None:
    (failure,) = describe(view_of(state))["failures"]
    assert failure["who"] == "c"
    assert "1 refused" in failure["text"] and "not finite" in failure["text"]


def test_rounds_that_are_seen_become_a_curve_and_a_trail(state: ServerState) -> None:
    view = view_of(state)
    play_round(state, 2)
    assert view.refresh()
    assert not view.refresh()
    told = describe(view)
    assert told["series"]["rounds"] == [1, 2]
    assert told["series"]["columns"]["participants"] == [2, 2]
    assert [step["round"] for step in told["map"]["steps"]] == [1, 2]
    assert told["map"]["names"] == ["x", "y", "z"]


def test_a_members_prototypes_are_its_own(state: ServerState) -> None:
    """Members are sorted by name in the file; their uploads are by number."""
    view = view_of(state)
    number = state.members["b"].number
    told = view.describe_client(number)
    assert told is not None and told["client"]["name"] == "b"
    reply = make_reply("b", 1)
    sums = reply.arrays["prototypes/value.prototypes"]
    counts = reply.arrays["prototypes/extra.weight"]
    own = sums[0] / counts[0]
    expected = float(((own - state.server["prototypes"][0].numpy()) ** 2).sum() ** 0.5)
    (first, _) = told["prototypes"]
    assert first["class"] == "x"
    assert first["distance"] == pytest.approx(expected, rel=1e-4)


def test_a_damaged_file_becomes_a_sentence_without_a_path(state: ServerState) -> None:
    view = view_of(state)
    state.path.write_bytes(b"nothing")
    assert view.refresh()
    (problem,) = describe(view)["problems"]
    assert str(state.path.parent) not in problem
    assert view.summarise()["rounds_done"] == 1


def test_a_deployed_folder_can_be_watched(state: ServerState) -> None:
    for folder in (state.path.parents[1], state.path.parent):
        collection = Collection(folder)
        collection.open()
        assert [run["kind"] for run in collection.list()] == ["deployed"]
