"""Asynchronous rounds in the simulator: identities, by hand, engines, and what is refused."""

from typing import Any

import pytest
import torch
from helpers.engine_comparison import assert_engines_agree, make_clients, prepare
from helpers.tiny import experiment, largest_difference

from fedproto.core.local_training import train
from fedproto.core.types import Group, State
from fedproto.errors import ConfigError
from fedproto.runs.api import run as run_federation
from fedproto.runs.experiment import Experiment

ALMOST = 1e-12  # float64, where sums of single uploads are rounded in another order
#: Uploads that are late by several versions, by clients of different speeds.
LATE = {"clients": 6, "buffer": 2, "concurrency": 4, "speed_spread": 1.0, "rounds": 6}
METHODS = ["fedavg", "fedper", "fedproto", "fedproto(absent=drop)", "fedproto(weighting=eq6)"]


def run_rounds(algorithm: str, **settings: Any) -> tuple[Experiment, list[dict[str, Any]]]:
    run = experiment(algorithm, **settings)
    return run, run.execute().metrics


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("speed_spread", [0.0, 2.0])
def test_waiting_for_everybody_is_synchronous(algorithm: str, speed_spread: float) -> None:
    synchronous, _ = run_rounds(algorithm, clients=4, rounds=4)
    waiting, lines = run_rounds(
        algorithm, clients=4, rounds=4, buffer=4, concurrency=4, speed_spread=speed_spread
    )
    assert largest_difference(synchronous, waiting) < ALMOST
    assert [line["staleness"] for line in lines] == [0.0] * 4
    assert torch.equal(synchronous.progress.ledger.counts, waiting.progress.ledger.counts)


def test_without_asynchronous_rounds_nothing_is_said_of_them() -> None:
    run = experiment("fedavg", rounds=1)
    result = run.execute()
    assert "clock" not in result.metrics[0] and "staleness" not in result.metrics[0]
    assert "asynchronous" not in result.data
    assert not [name for name in run.progress.export() if name.startswith("flight")]


def replay_fedavg(run: Experiment, exponent: float) -> list[State]:
    """Return the server's versions, by a loop that keeps what every client received."""
    plan = run.federation_run()
    training = run.engine.trainings[0]  # type: ignore[attr-defined]
    servers: list[State] = [run.progress.server]
    states = {member.id: member.initial for member in run.federation.members}
    under_way: dict[int, tuple[State, Group]] = {}
    for round in range(1, run.config.rounds + 1):
        cohort, version = plan.plan_round(round)
        assert version is not None
        now = servers[-1]
        for client in cohort.sampled.tolist():
            member = run.federation.members[client]
            outcome = train(member, run.algorithm, states[client], now, training, round)
            states[client] = outcome.state
            under_way[client] = (now, outcome.upload["model"])
        total = {name: torch.zeros_like(value) for name, value in now.items()}
        weights = torch.tensor(0.0, dtype=torch.float64)
        for client, started in zip(version.arrived.tolist(), version.started.tolist(), strict=True):
            received, upload = under_way.pop(client)
            weight = upload.weight / (1 + round - started) ** exponent
            weights += weight
            for name, sums in upload.sums.items():
                total[name] += weight * (now[name] + sums / upload.weight - received[name])
        servers.append({name: value / weights for name, value in total.items()})
    return servers


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_fedbuff_is_what_a_plain_loop_computes(exponent: float) -> None:
    run = experiment("fedavg", **LATE, staleness=exponent)
    expected = replay_fedavg(run, exponent)
    lines = run.execute().metrics
    assert len({line["staleness"] for line in lines}) > 2, "uploads are late by different amounts"
    for name, value in run.progress.server.items():
        torch.testing.assert_close(value, expected[-1][name], rtol=0, atol=1e-12)


def test_two_clients_of_which_one_takes_longer_by_hand() -> None:
    """Every upload makes a version; client 0 takes 2 steps, client 1 takes 5 (the median is 3.5).

    Client 0 arrives after 2, 4 and 6 steps, client 1 after 5: two versions have been made since it
    started, and client 0, which starts from version 2 before that, is then late by one.
    """
    run = prepare(
        "fedavg",
        "reference",
        data=make_clients((8, 18)),
        clients=None,
        model="mlp(hidden=8)",
        shots=None,
        stdev=None,
        test_shots=None,
        buffer=1,
        concurrency=2,
        rounds=4,
    )
    expected = replay_fedavg(run, 0.5)
    lines = run.execute().metrics
    assert [line["participants"] for line in lines] == [[0], [0], [1], [0]]
    assert [line["staleness"] for line in lines] == [0, 0, 2, 1]
    assert [line["clock"] * 3.5 for line in lines] == pytest.approx([2, 4, 5, 6])
    for name, value in run.progress.server.items():
        torch.testing.assert_close(value, expected[4][name], rtol=0, atol=1e-12)


def test_staleness_changes_the_result_and_the_clock_does_not_depend_on_training() -> None:
    one, lines = run_rounds("fedavg", **LATE)
    other, other_lines = run_rounds("fedavg", **LATE, staleness=2.0)
    _, prototype_lines = run_rounds("fedproto", **LATE)
    assert largest_difference(one, other) > 1e-9
    clocks = [line["clock"] for line in lines]
    assert clocks == sorted(clocks) and clocks[0] > 0
    assert max(line["staleness"] for line in lines) >= 1
    for found in (other_lines, prototype_lines):
        assert [line["clock"] for line in found] == clocks
        assert [line["participants"] for line in found] == [line["participants"] for line in lines]


def test_the_result_states_clock_and_staleness() -> None:
    run = experiment("fedproto", **LATE)
    result = run.execute()
    uploads = sum(len(line["participants"]) for line in result.metrics)
    late = sum(line["staleness"] * len(line["participants"]) for line in result.metrics)
    assert result.data["asynchronous"] == {
        "clock": result.metrics[-1]["clock"],
        "staleness": pytest.approx(late / uploads),
    }


@pytest.mark.parametrize("algorithm", [*METHODS, "fedrep", "fedprox"])
def test_engines_agree(algorithm: str) -> None:
    assert_engines_agree(algorithm, **(LATE | {"lost_uploads": 0.3, "epochs": 2}))


#: What is done to uploads before they travel, and after they have arrived.
COMPOSED: dict[str, dict[str, Any]] = {
    "quantised": {"transform": "quantise(bits=8)"},
    "median": {"combiner": "median", "buffer": 3},
    "server optimiser": {"algorithm": "fedadam"},
    "two groups": {"algorithm": "fednh"},
}


@pytest.mark.parametrize("settings", COMPOSED.values(), ids=COMPOSED)
def test_engines_agree_on_late_uploads_that_are_transformed_or_combined(
    settings: dict[str, Any],
) -> None:
    assert_engines_agree(**({"algorithm": "fedavg"} | LATE | settings))


def test_lost_uploads_may_leave_a_round_with_nothing() -> None:
    run, lines = run_rounds("fedavg", clients=3, buffer=2, rounds=2, lost_uploads=1.0)
    assert [line["participants"] for line in lines] == [[], []]
    assert [line["staleness"] for line in lines] == [0.0, 0.0]
    started = experiment("fedavg", clients=3).progress.server
    assert all(torch.equal(value, started[name]) for name, value in run.progress.server.items())


def test_a_federation_that_trains_alone_has_a_clock_too() -> None:
    _, lines = run_rounds("local", **LATE)
    assert [len(line["participants"]) for line in lines] == [2] * 6


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a buffer larger than the concurrency": (
        {"buffer": 3, "concurrency": 2, "clients": 4},
        "buffer is 3, but only 2 clients train at a time",
    ),
    "a buffer larger than participation allows": (
        {"buffer": 3, "participation": 0.5, "clients": 4},
        "buffer is 3, but only 2 clients train at a time",
    ),
    "more at a time than there are": (
        {"buffer": 3, "concurrency": 5, "clients": 4},
        "concurrency is 5, but there are only 4 clients",
    ),
    "stragglers": ({"buffer": 2, "stragglers": 0.5}, "stragglers do half their steps"),
    "a method that compares all uploads": (
        {"buffer": 2, "algorithm": "fesem"},
        "fesem compares all uploads of a round",
    ),
    "concurrency without a buffer": ({"concurrency": 2}, "concurrency is for asynchronous rounds"),
    "staleness without a buffer": ({"staleness": 1}, "staleness is for asynchronous rounds"),
    "speeds without a buffer": ({"speed_spread": 1}, "speed_spread is for asynchronous rounds"),
    "a negative buffer": ({"buffer": -1}, "buffer must be a"),
    "a fraction of an upload": ({"buffer": 1.5}, "buffer must be a"),
    "nobody at a time": ({"buffer": 1, "concurrency": 0}, "concurrency must be a"),
    "a negative exponent": ({"buffer": 1, "staleness": -1}, "staleness must be a"),
    "a negative spread": ({"buffer": 1, "speed_spread": -0.1}, "speed_spread must be a"),
}


@pytest.mark.parametrize(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    settings: dict[str, Any], words: str
) -> None:
    defaults = {"dataset": "digits", "clients": 4, "shots": 5, "rounds": 1}
    with pytest.raises(ConfigError, match=words) as refused:
        run_federation(**(defaults | settings))
    assert "\n" not in str(refused.value)
