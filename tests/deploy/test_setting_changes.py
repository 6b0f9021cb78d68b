"""Settings that change between rounds: what is recorded, what members are told, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import fedproto
from helpers.deployment import LocalTransport, accept_classes, serve_to, small_state

from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.errors import RunFolderError


def test_changes_are_recorded_with_their_round_and_told_to_members(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=2)
    deployment.serve()
    deployment.terms = replace(deployment.terms, lr=0.02, seed=7, epochs=2)
    state = deployment.state(rounds=3)
    transport = LocalTransport(deployment.members, state)
    serve(state, transport, deployment.said.append)
    told = [request.header for name, request in transport.invitations if "nonce" not in name]
    assert {(header["lr"], header["seed"], header["epochs"]) for header in told} == {(0.02, 7, 2)}
    state = serve_to(deployment, 3)  # a start without changes is not recorded
    (event,) = state.history
    assert (event["event"], event["round"]) == ("settings changed", 2)
    assert event["what"] == (
        "from round 3 on: rounds from 2 to 3, lr from 0.01 to 0.02, epochs from 1 to 2, "
        "seed from 0 to 7"
    )
    shown = fedproto("deploy", "status", deployment.folder)
    assert "settings changed" in shown.out and "lr from 0.01 to 0.02" in shown.out
    answer = json.loads(fedproto("deploy", "status", deployment.folder, "--json").out)
    assert answer["history"] == state.history


def test_a_change_that_is_taken_back_is_recorded_twice(tmp_path: Path) -> None:
    state = small_state(tmp_path, quorum=1)
    accept_classes(state, "a", ["x"])
    state.close_round()
    state.save()
    for quorum in (2, 1):
        state = small_state(tmp_path, quorum=quorum)
        state.load()
        state.save()
    assert [event["what"] for event in state.history] == [
        "from round 2 on: quorum from 1 to 2",
        "from round 2 on: quorum from 2 to 1",
    ]


def test_before_the_first_round_everything_may_change(tmp_path: Path) -> None:
    small_state(tmp_path).save()
    changed = small_state(tmp_path, rounds=7, quorum=2)
    changed.load()
    assert changed.history == []


def test_where_and_for_how_long_a_server_waits_is_not_recorded(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    accept_classes(state, "a", ["x"])
    state.close_round()
    state.save()
    again = small_state(tmp_path, timeout=3.0, patience=2.0)
    again.load()
    assert again.history == []


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("dim", 5, "in .* it is 4, not 5"),
        ("transform", "quantise(bits=8)", "belongs to fedproto.* with quantise.*: name another"),
        ("model", "mlp", "model cannot be changed after the first round"),
        ("shape", "1,8,8", "change it back, or name another state$"),
    ],
)
def test_what_cannot_change_says_so_in_one_sentence(
    key: str, value: Any, shown: str, tmp_path: Path
) -> None:
    state = small_state(tmp_path)
    accept_classes(state, "a", ["x"])
    state.close_round()
    state.save()
    before = state.path.read_bytes()
    settings = ServerSettings(state=str(tmp_path), classes="x,y,z", quorum=1)
    terms = TrainingTerms(dim=4)
    if hasattr(settings, key):
        settings = replace(settings, **{key: value})
    else:
        terms = replace(terms, **{key: value})
    changed = ServerState(settings, terms)
    with pytest.raises(RunFolderError, match=shown):
        changed.load()
    assert state.path.read_bytes() == before
