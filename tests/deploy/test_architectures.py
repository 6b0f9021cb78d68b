"""Members of several architectures, deployed: as the simulator, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.deployment import Deployment, simulate, trees_equal

from fedproto.core.tensors import flatten_state
from fedproto.core.types import Group, State
from fedproto.deploy.member import train_round
from fedproto.deploy.messages import Message
from fedproto.deploy.outliers import Amounts, find_outliers
from fedproto.deploy.settings import ServerSettings
from fedproto.errors import ConfigError, MessageError, Refused, RefusedByMember

SMALL, LARGE = "mlp(hidden=10)", "mlp(hidden=20)"
MODELS = {"a": SMALL, "b": LARGE, "c": SMALL}
NAMES = ("mlp-hidden-10", "mlp-hidden-20")
SENDS = "weights,prototypes,counts"


def deploy(make_deployment: Any, algorithm: str, **options: Any) -> Deployment:
    """Return a federation of three members, two of which have the same architecture."""
    defaults = {"model": f"{SMALL},{LARGE}", "shape": "1,8,8", "rounds": 2}
    deployment: Deployment = make_deployment(algorithm, **(defaults | options))
    for name, own in deployment.members.items():
        deployment.members[name] = replace(own, model=MODELS[name], sends=SENDS)
    return deployment


def assert_same_state(found: State, expected: State) -> None:
    """To float32 rounding."""
    flat, wanted = flatten_state(found), flatten_state(expected)
    assert set(flat) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(flat[name], value, rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedblend(m=0.5)",
        "fedblend(m=0.5,absent=remember)",
        "fedavg",
        "fedper",
        "fedadam",
        "ditto",
        "fednh",
    ],
)
def test_two_architectures_give_the_simulators_numbers(
    algorithm: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    servers, result, _ = simulate(member_files, algorithm, MODELS, count=2)
    deployment = deploy(make_deployment, algorithm)
    state = deployment.serve()
    assert_same_state(state.server, servers[-1])
    assert [member.architecture for member in state.members.values()] == [
        NAMES[0],
        NAMES[1],
        NAMES[0],
    ]
    for member, client in zip(state.members.values(), result.clients, strict=True):
        assert member.accuracy == pytest.approx(client["accuracy"])
        assert member.bytes_up == client["communication"]["bytes_up"]


def test_transformed_uploads_give_the_simulators_numbers(
    make_deployment: Any, member_files: dict[str, Any]
) -> None:
    algorithm, transform = "fedblend(m=0.5)", "quantise(bits=8)"
    servers, _, _ = simulate(member_files, algorithm, MODELS, count=2, transform=transform)
    deployment = deploy(make_deployment, algorithm)
    deployment.terms = replace(deployment.terms, transform=transform)
    assert_same_state(deployment.serve().server, servers[-1])


def test_combined_uploads_give_the_simulators_numbers(
    make_deployment: Any, member_files: dict[str, Any]
) -> None:
    servers, _, _ = simulate(member_files, "fedblend(m=0.5)", MODELS, count=2, combiner="median")
    deployment = deploy(make_deployment, "fedblend(m=0.5)", combiner="median")
    assert_same_state(deployment.serve().server, servers[-1])


def test_a_server_continues_from_its_file(make_deployment: Any, member_files: dict) -> None:
    servers, _, _ = simulate(member_files, "fedblend(absent=remember)", MODELS, count=3)
    deployment = deploy(make_deployment, "fedblend(absent=remember)", rounds=1)
    first = deployment.serve()
    again = deployment.state(rounds=3)
    assert trees_equal(flatten_state(again.server), flatten_state(first.server))
    assert again.members["b"].architecture == NAMES[1]
    deployment.serve(again)
    assert_same_state(again.server, servers[-1])


def test_only_the_first_request_has_the_weights_of_all_architectures(make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedblend", rounds=1)
    state = deployment.state()
    first = state.make_request("a")
    assert {f"@{name}/model" for name in NAMES} <= first.groups().keys()
    assert first.header["models"] == [SMALL, LARGE]
    deployment.serve(state)
    later = state.make_request("b")
    assert f"@{NAMES[1]}/model" in later.groups()
    assert f"@{NAMES[0]}/model" not in later.groups()


def test_a_member_of_another_architecture_is_refused(make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedblend")
    request = deployment.state().make_request("a")
    other = replace(deployment.members["a"], model="mlp(hidden=30)")
    with pytest.raises(RefusedByMember, match=r"models mlp.*, but this member's model is mlp\(hid"):
        train_round(request, other)


@pytest.mark.parametrize("names", [None, "ab", [NAMES[0]], [1, 2], ["a\n", "b"]])
def test_a_member_refuses_odd_architectures(names: Any, make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedblend")
    request = deployment.state().make_request("a")
    odd = Message(request.header | {"architectures": names}, request.arrays)
    with pytest.raises(MessageError, match="'architectures'"):
        train_round(odd, deployment.members["a"])


def rename(reply: Message, old: str, new: str) -> Message:
    arrays = {name.replace(old, new): value for name, value in reply.arrays.items()}
    return Message(reply.header, arrays)


def test_a_reply_is_of_one_architecture_and_stays_so(make_deployment: Any) -> None:
    deployment = deploy(make_deployment, "fedblend")
    state = deployment.state()
    reply = train_round(state.make_request("a"), deployment.members["a"])
    expected = state.expect_replies(frozenset("abc"))
    both = reply.arrays | rename(reply, *NAMES).arrays
    none = {name: value for name, value in reply.arrays.items() if "@" not in name}
    for arrays in (both, none, rename(reply, NAMES[0], "cnn").arrays):
        with pytest.raises(Refused, match="not of one of the architectures mlp-hidden-10, mlp-h"):
            state.accept_reply("a", Message(reply.header, arrays), expected)
    with pytest.raises(Refused, match="instead of float32 of shape"):
        state.accept_reply("a", rename(reply, *NAMES), expected)
    assert state.members["a"].architecture == ""
    state.members["a"].architecture = NAMES[1]
    with pytest.raises(Refused, match="of architecture mlp-hidden-10, but earlier ones were"):
        state.accept_reply("a", reply, expected)


def test_weights_of_different_architectures_are_told_apart() -> None:
    """Only members of one architecture are compared, if there are enough of them."""
    limits = ServerSettings(max_norm_ratio=5.0)
    amounts = {}
    for name, architecture, size in (
        ("a", "small", 1.0),
        ("b", "small", 1.0),
        ("c", "small", 4.0),
        ("d", "large", 30.0),
        ("e", "large", 30.0),
        ("f", "large", 30.0),
    ):
        group = Group({"w": torch.full((3,), size)}, torch.tensor(1.0))
        amounts[name] = Amounts.measure({f"model@{architecture}": group}, [])
    assert find_outliers(amounts, {}, limits) == {}
    same = {
        name: replace(each, norms={"": max(each.norms.values())}) for name, each in amounts.items()
    }
    assert find_outliers(same, {}, limits)
    large = Amounts.measure({"model@small": Group({"w": torch.ones(3) * 9}, torch.tensor(1.0))}, [])
    (reason,) = find_outliers(amounts | {"c": large}, {}, limits).values()
    assert reason.startswith("the norm of its weights is about 9 times")


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_what_counts_the_members_of_an_architecture_is_refused(
    algorithm: str, make_deployment: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^{algorithm} divides by the number of members"):
        deploy(make_deployment, algorithm).state()


def test_models_that_agree_in_what_travels_are_one_architecture(make_deployment: Any) -> None:
    state = deploy(make_deployment, "lg-fedavg").state()
    assert state.start.architectures == ("",)
    assert not any("@" in name for name in flatten_state(state.server))
