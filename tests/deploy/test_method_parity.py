"""Every method, deployed, against the simulator: lost replies, killed servers, transforms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.deployment import (
    DIM,
    EQUAL,
    MIXED,
    WEIGHTS,
    simulate,
    trees_equal,
)

from fedproto.config.plugins import names
from fedproto.core.sampling import Schedule, sample_cohort
from fedproto.core.tensors import flatten_state, split_client
from fedproto.core.types import State
from fedproto.deploy.member import load_trained_member, train_round
from fedproto.deploy.member_checkpoint import MemberCheckpoint
from fedproto.errors import ConfigError, RefusedByMember

#: Those whose server, clients or uploads are more than one tree.
METHODS = [
    "fedadam",
    "fedavgm",
    "scaffold",
    "scaffold(server_lr=0.5)",
    "ditto",
    "moon",
    "feddyn",
    "fednh",
    "fedgh(server_epochs=2)",
    "fedtgp(server_epochs=3)",
    "fedorgp",
    "protonorm(server_steps=20)",
    "fedre",
    "fedsa",
    "fedproto",
    "fedproto(contrast=1)",
    "feddistill",
    "lg-fedavg",
    "fedproto(contrast=1)",
    "fedblend(m=0.5)",
]


def models_of(algorithm: str) -> dict[str, str]:
    return EQUAL if algorithm.partition("(")[0] in WEIGHTS else MIXED


def assert_same_state(found: State, expected: State) -> None:
    """To float32 rounding."""
    flat = flatten_state(found)
    wanted = flatten_state(expected)
    assert set(flat) == set(wanted)
    for name, value in wanted.items():
        assert flat[name].dtype == value.dtype, name
        torch.testing.assert_close(flat[name], value, rtol=0, atol=1e-7, msg=name)


def who_is_heard(rounds: int, **fractions: float) -> dict[int, str]:
    """The members whose uploads arrive in each round of the simulator."""
    heard = {}
    for round in range(1, rounds + 1):
        cohort = sample_cohort(3, Schedule(rounds, **fractions), round)
        lost = cohort.lost.tolist()
        heard[round] = "".join("abc"[k] for k in cohort.sampled.tolist() if k not in lost)
    return heard


@pytest.mark.parametrize("algorithm", METHODS)
def test_lost_replies_cost_what_they_cost_in_the_simulator(
    algorithm: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    """A round closes with two of three members; means over all members are over three."""
    rounds, lost = 3, 0.34
    heard = who_is_heard(rounds, lost_uploads=lost)
    assert [len(names) for names in heard.values()] == [2, 2, 2] and len(set(heard.values())) > 1
    servers, _, _ = simulate(
        member_files, algorithm, models_of(algorithm), count=rounds, lost_uploads=lost
    )
    deployment = make_deployment(algorithm, quorum=2, rounds=rounds)
    state = deployment.serve(heard=lambda name, round: name in heard[round])
    assert_same_state(state.server, servers[-1])


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_listed_members_count_before_they_come(
    algorithm: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    rounds, seed = 3, 4
    there = who_is_heard(rounds, participation=0.67, seed=seed)
    assert there[1] == "ab" and "c" in there[2] + there[3]
    servers, _, _ = simulate(
        member_files, algorithm, EQUAL, count=rounds, participation=0.67, seed=seed
    )
    deployment = make_deployment(algorithm, quorum=2, rounds=rounds, members="a,b,c")
    deployment.terms = replace(deployment.terms, seed=seed)
    state = deployment.serve(there=lambda name, round: name in there.get(round, "abc"))
    assert_same_state(state.server, servers[-1])


class Killed(Exception):
    """The server ends here."""


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_server_killed_in_a_round_goes_on_as_if_it_had_not_been(
    algorithm: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    """Members that had trained the round answer from their files; what they keep moves once."""
    servers, result, _ = simulate(member_files, algorithm, models_of(algorithm), count=3)
    deployment = make_deployment(algorithm, rounds=3)

    def kill(name: str, round: int) -> None:
        if (name, round) == ("b", 2):
            raise Killed

    with pytest.raises(Killed):
        deployment.serve(after=kill)
    state = deployment.state()
    assert state.round == 1
    assert_same_state(state.server, servers[0])
    deployment.serve(state)
    assert_same_state(state.server, servers[2])
    for name, client in zip("abc", result.clients, strict=True):
        assert state.members[name].accuracy == pytest.approx(client["accuracy"])


@pytest.mark.parametrize("transform", ["quantise(bits=8)", "clip(norm=3),top_k(fraction=0.4)"])
@pytest.mark.parametrize("algorithm", ["scaffold", "fedadam", "fednh", "fedtgp(server_epochs=3)"])
def test_transformed_uploads_give_the_simulators_numbers(
    algorithm: str, transform: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    servers, result, _ = simulate(
        member_files, algorithm, models_of(algorithm), count=2, transform=transform
    )
    deployment = make_deployment(algorithm, rounds=2)
    deployment.terms = replace(deployment.terms, transform=transform)
    state = deployment.serve()
    assert_same_state(state.server, servers[-1])
    for member, client in zip(state.members.values(), result.clients, strict=True):
        assert member.bytes_up == client["communication"]["bytes_up"]


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_member_classifies_with_its_saved_model(algorithm: str, make_deployment: Any) -> None:
    """Also where no prototypes travel, which would tell how many values an embedding has."""
    deployment = make_deployment(algorithm, rounds=1)
    deployment.serve()
    own = deployment.members["a"]
    saved = MemberCheckpoint.load(own)
    trained = load_trained_member(own)
    assert saved is not None and saved.dim == DIM
    params, _ = split_client(saved.state)
    assert trees_equal(trained.module.state_dict(), params)
    scores = trained.probe_outputs()
    assert scores.features.shape[1] == DIM


def test_members_with_different_bodies_share_a_trained_head(
    make_deployment: Any, member_files: dict[str, Any]
) -> None:
    servers, _, _ = simulate(member_files, "fedgh", MIXED, count=2)
    deployment = make_deployment("fedgh", rounds=2, model=MIXED["a"])
    for name, own in deployment.members.items():
        deployment.members[name] = replace(own, model=MIXED[name])
    assert_same_state(deployment.serve().server, servers[-1])


@pytest.mark.parametrize("algorithm", ["fednh", "fedgh", "feddistill"])
@pytest.mark.parametrize("classes", ["", "0,1,2"])
def test_what_has_a_row_per_class_at_every_member_takes_no_new_classes(
    algorithm: str, classes: str, make_deployment: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^{algorithm} needs all classes from the start"):
        make_deployment(algorithm, classes=classes, new_classes=True).state()


def test_the_number_of_members_follows_who_is_there(make_deployment: Any) -> None:
    """SCAFFOLD's means are over all members: the third counts from its first request on."""
    deployment = make_deployment("scaffold", quorum=2, rounds=2)
    state = deployment.state()
    assert int(state.server["clients"]) == 2
    deployment.serve(state, there=lambda name, round: name != "c" or round == 2)
    assert int(state.server["clients"]) == 3
    fewer = deployment.state(members="a,b", rounds=3)
    deployment.serve(fewer)
    assert int(fewer.server["clients"]) == 2


def read_sends() -> dict[str, set[str]]:
    """What docs/deploy.md says that members must be willing to send, by algorithm."""
    page = Path(__file__).parents[2] / "docs" / "deploy.md"
    section = page.read_text().partition("## Which algorithms")[2].partition("\n## ")[0]
    sends = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            algorithms, kinds, _ = line.strip("| ").split(" | ")
            for algorithm in algorithms.split(", "):
                sends[algorithm.strip("`")] = set(kinds.strip('`"').split(","))
    return sends


@pytest.mark.parametrize("algorithm", names("algorithm"))
def test_the_page_says_what_members_must_be_willing_to_send(
    algorithm: str, make_deployment: Any
) -> None:
    documented = read_sends().get(algorithm)
    deployment = make_deployment(algorithm, rounds=1, model=EQUAL["a"], shape="1,8,8")
    if documented is None:
        with pytest.raises(ConfigError, match=algorithm):
            deployment.state()
        return
    request = deployment.state().make_request("a")
    for kind in sorted(documented):
        unwilling = replace(deployment.members["a"], sends=",".join(documented - {kind}))
        with pytest.raises(RefusedByMember, match=rf"sends {kind}, but"):
            train_round(request, unwilling)
    willing = replace(deployment.members["a"], sends=",".join(documented))
    assert train_round(request, willing).arrays
