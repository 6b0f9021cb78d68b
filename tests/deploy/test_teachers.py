"""Closed forms in a deployment: as in the simulator, sent once, and exact when a member leaves."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.deployment import EQUAL, MIXED, WEIGHTS, LocalTransport, simulate

from fedproto.core.closed_form import TEACHER
from fedproto.core.tensors import flatten_state
from fedproto.core.types import SentOnce
from fedproto.deploy.member import train_round
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.errors import ConfigError, RefusedByMember

SMALL_MAP = "random-conv(filters=3,kernel=3,pool=2)"
TAUGHT = {"teacher": "lda", "feature_map": SMALL_MAP}
SENDS = "prototypes,weights,counts"


def deploy(make_deployment: Any, algorithm: str, terms: dict[str, str], **options: Any) -> Any:
    deployment = make_deployment(algorithm, **options)
    deployment.terms = replace(deployment.terms, **terms)
    members = {name: replace(each, sends=SENDS) for name, each in deployment.members.items()}
    deployment.members = members
    return deployment


@pytest.mark.parametrize(
    ("algorithm", "terms"),
    [
        ("closed-form", {"feature_map": SMALL_MAP}),
        ("closed-form(solve=ncm)", {"feature_map": SMALL_MAP}),
        ("fedproto", TAUGHT),
        ("fedavg", TAUGHT),
        ("fedproto", TAUGHT | {"transform": "quantise(bits=8)"}),
    ],
)
def test_a_deployed_closed_form_is_the_simulators(
    algorithm: str, terms: dict[str, str], make_deployment: Any, member_files: dict[str, Any]
) -> None:
    models = EQUAL if algorithm in WEIGHTS else MIXED
    servers, _, classes = simulate(member_files, algorithm, models, count=3, **terms)
    deployment = deploy(make_deployment, algorithm, terms, rounds=3)
    state = deployment.serve()
    assert state.classes == classes
    found = flatten_state(state.server)
    for name, value in flatten_state(servers[-1]).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert found[f"{TEACHER}/solved"] == 1


def test_sums_and_solutions_travel_once(make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedproto", TAUGHT, rounds=4)
    state = deployment.state()
    received: dict[int, list[str]] = {}
    replied: dict[int, list[str]] = {}

    def note(name: str, reply: Any, round: int) -> list[Any]:
        replied.setdefault(round, []).extend(reply.groups())
        return [reply]

    transport_requests: list[Any] = []
    original = state.make_request

    def make_request(name: str, all_classes: bool = False) -> Any:
        request = original(name, all_classes)
        if not all_classes:
            transport_requests.append(request)
        return request

    state.make_request = make_request  # type: ignore[method-assign]
    deployment.serve(state, rewrite=note)
    for request in transport_requests:
        received.setdefault(request.header["round"], []).extend(request.groups())
    assert [round for round, groups in received.items() if TEACHER in groups] == [2]
    assert [round for round, groups in replied.items() if "gram" in groups] == [1]


def test_a_member_that_was_away_gets_the_solution_when_it_is_back(make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedproto", TAUGHT, rounds=4, quorum=2)
    state = deployment.serve(there=lambda name, round: name != "c" or round in (1, 4))
    assert state.round == 4
    request = state.make_request("c")
    assert TEACHER not in request.groups()


def test_who_leaves_has_never_been_there(make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "closed-form", {"feature_map": SMALL_MAP}, rounds=1)
    whole = deployment.serve()
    assert whole.server[TEACHER]["solved"] == 1
    state = deployment.state(rounds=3, members="a,b", quorum=2)
    serve(state, LocalTransport(deployment.members, state), deployment.said.append)
    left = state.once_uploads.recall()
    assert left is not None and len(left["gram"].weight) == 2
    assert state.server[TEACHER]["solved"] == 2  # and not again in round 3
    sent_once = SentOnce(left, torch.tensor([0, 1]), 2)
    assert state.algorithm.aggregate_once is not None
    fresh = state.algorithm.aggregate_once(state.start.init(len(state.classes)), sent_once)
    for name, value in fresh[TEACHER].items():
        assert torch.equal(state.server[TEACHER][name], value), name
    assert state.server[TEACHER]["counts"].sum() < whole.server[TEACHER]["counts"].sum()


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        ({"teacher": "lda"}, "needs `feature_map` in a deployment"),
        ({"teacher": "lda", "feature_map": "flat"}, "feature_map flat cannot be deployed"),
        ({"teacher": "lda", "feature_map": "auto"}, "feature_map auto cannot be deployed"),
        ({"teacher": "none"}, "unknown teacher 'none'"),
        (
            {"teacher": "lda(individual=0.5)", "feature_map": SMALL_MAP},
            "keeps teacher/own_vectors for each member, but their number may change, so it cannot",
        ),
        (
            {"algorithm": "closed-form(individual=0.5)", "feature_map": SMALL_MAP},
            "the server of closed-form keeps .* cannot be deployed; closed forms can, with indiv",
        ),
    ],
)
def test_a_server_refuses_terms_that_members_could_not_share(
    terms: dict[str, str], sentence: str, tmp_path: Any
) -> None:
    settings = ServerSettings(state=str(tmp_path), classes="x,y")
    with pytest.raises(ConfigError, match=sentence):
        ServerState(settings, TrainingTerms(dim=4, **terms))


@pytest.mark.parametrize("key", ["teacher", "feature_map"])
def test_a_member_imports_nothing_that_a_server_names(key: str, make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedproto", TAUGHT)
    request = deployment.state().make_request("a")
    request.header[key] = "os:system"
    with pytest.raises(RefusedByMember, match=f"names a {key} of its own module"):
        train_round(request, deployment.members["a"])


def test_a_member_that_sends_prototypes_only_sends_no_gram_matrix(make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedproto", TAUGHT)
    request = deployment.state().make_request("a")
    own = replace(deployment.members["a"], sends="prototypes,counts")
    with pytest.raises(RefusedByMember, match="sends weights"):
        train_round(request, own)
