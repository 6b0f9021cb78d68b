"""Rounds in which a deployed server asks some of the members that are present."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from helpers.deployment import MIXED, LocalTransport, simulate, trees_equal

from fedproto.core.sampling import Schedule, sample_cohort
from fedproto.deploy.messages import Message
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_actions import Reply
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import split_run_config
from fedproto.errors import ConfigError, TrainingError

TWO_OF_THREE = {"participation": 0.67, "quorum": 2, "rounds": 5}
SECURE = "secure-sum(error=1e-9,largest=1e5)"


@dataclass
class Recorded(LocalTransport):
    """Writes down who is asked to train, round by round, and ends in the middle of one."""

    asked: list[tuple[int, str]] = field(default_factory=list)
    ends_in: int = 0

    def exchange(self, kind: str, requests: dict[str, Message], timeout: float) -> Iterator[Reply]:
        round = self.state.round + 1
        if kind == "train":
            self.asked += [(round, "".join(requests))]
        replies = super().exchange(kind, requests, timeout)
        yield next(replies)
        if round == self.ends_in:
            raise KeyboardInterrupt
        yield from replies


def serve_recorded(
    deployment: Any, state: ServerState | None = None, **given: Any
) -> tuple[ServerState, Recorded]:
    state = state or deployment.state()
    transport = Recorded(deployment.members, state, **given)
    serve(state, transport, deployment.said.append)
    return state, transport


def cohorts_of_simulator(rounds: int, participation: float) -> list[tuple[int, str]]:
    schedule = Schedule(rounds, participation=participation)
    cohorts = []
    for round in range(1, rounds + 1):
        sampled = sample_cohort(3, schedule, round).sampled.tolist()
        cohorts.append((round, "".join("abc"[number] for number in sampled)))
    return cohorts


@pytest.mark.parametrize("algorithm", ["fedproto", "fedproto(absent=drop)"])
def test_the_cohort_and_the_result_are_the_simulators(
    algorithm: str, make_deployment: Any, member_files: dict[str, Any]
) -> None:
    servers, _, _ = simulate(member_files, algorithm, MIXED, count=5, participation=0.67)
    state, transport = serve_recorded(make_deployment(algorithm, **TWO_OF_THREE))
    assert transport.asked == cohorts_of_simulator(5, 0.67)
    assert len({names for _, names in transport.asked}) > 1
    assert trees_equal(state.server, servers[-1])


def test_a_server_that_is_killed_in_a_round_asks_the_same_members_again(
    make_deployment: Any,
) -> None:
    whole, _ = serve_recorded(make_deployment(where="whole", **TWO_OF_THREE))
    deployment = make_deployment(**TWO_OF_THREE)
    for round in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            serve_recorded(deployment, ends_in=round)
    state, transport = serve_recorded(deployment)
    assert transport.asked == cohorts_of_simulator(5, 0.67)[2:]
    assert trees_equal(state.server, whole.server)


def test_at_least_a_quorum_is_asked(make_deployment: Any) -> None:
    _, transport = serve_recorded(make_deployment(quorum=3, rounds=1, participation=0.1))
    assert transport.asked == [(1, "abc")]


def test_members_that_have_gone_are_replaced_by_others(make_deployment: Any) -> None:
    """One that has replied is not asked again; the round closes with it and with the newcomer."""
    first = cohorts_of_simulator(1, 0.67)[0][1]
    (third,) = set("abc") - set(first)
    deployment = make_deployment(**TWO_OF_THREE | {"rounds": 1})
    gone = first[1]
    is_gone: list[str] = []

    def hear(name: str, round: int) -> bool:
        if name == gone:
            is_gone.append(name)
        return name != gone

    _, transport = serve_recorded(
        deployment, heard=hear, there=lambda name, round: name not in is_gone
    )
    assert transport.asked == [(1, first), (1, third)]
    assert deployment.state().members[third].last_round == 1


def test_everybody_counts_as_a_member_also_if_it_was_not_asked(make_deployment: Any) -> None:
    state, _ = serve_recorded(make_deployment(**TWO_OF_THREE | {"rounds": 1}))
    assert [state.members[name].number for name in "abc"] == [0, 1, 2]
    assert state.count_members() == 3


def test_a_secure_sum_is_that_of_the_cohort(make_deployment: Any) -> None:
    algorithm = "fedproto(absent=drop)"
    options = {"names": "abcd", "classes": "0,1,2,3,4,5,6", "rounds": 3, "quorum": 3}
    options["participation"] = 0.75
    plain, asked = serve_recorded(make_deployment(algorithm, where="plain", **options))
    summed, _ = serve_recorded(make_deployment(algorithm, combiner=SECURE, **options))
    for name in "abcd":
        assert summed.members[name].last_round == plain.members[name].last_round
    assert {len(names) for _, names in asked.asked} == {3}
    difference = plain.server["prototypes"] - summed.server["prototypes"]
    assert float(difference.abs().max()) < 1e-5


def test_what_does_not_fit_is_refused_in_one_sentence(make_deployment: Any) -> None:
    with pytest.raises(ConfigError, match=r"participation is 0\.5, but asynchronous rounds ask"):
        split_run_config({"buffer": 2, "participation": 0.5}, "here")
    with pytest.raises(ConfigError, match="participation must be"):
        split_run_config({"participation": 0.0}, "here")
    deployment = make_deployment("fedproto(absent=drop)", combiner=SECURE, participation=0.5)
    feature_map = "random-conv(filters=3,kernel=3,pool=2)"
    deployment.terms = replace(deployment.terms, teacher="lda", feature_map=feature_map)
    with pytest.raises(ConfigError, match="once, which secure-sum adds only where all members"):
        deployment.state()


def test_a_round_without_enough_replies_stays_open(make_deployment: Any) -> None:
    deployment = make_deployment(**TWO_OF_THREE)
    with pytest.raises(TrainingError, match="round 1: 0 replies accepted"):
        deployment.serve(heard=lambda name, round: False)
