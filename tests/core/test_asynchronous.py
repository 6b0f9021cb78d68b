"""The simulated clock of asynchronous rounds: by hand, as identities, and as properties."""

from itertools import islice
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core import rng
from fedproto.core.asynchronous import Version, iterate_versions
from fedproto.core.sampling import Schedule, sample_cohort


def run_clock(steps: list[int], rounds: int, **settings: float) -> list[Version]:
    schedule = Schedule(rounds, **settings)  # type: ignore[arg-type]
    return list(islice(iterate_versions(torch.tensor(steps), schedule), rounds))


class Told(NamedTuple):
    """A version as plain numbers."""

    starts: list[int]
    arrived: list[int]
    staleness: list[int]
    clock: float


def tell(version: Version) -> Told:
    return Told(
        version.cohort.sampled.tolist(),
        version.arrived.tolist(),
        version.staleness.tolist(),
        version.clock,
    )


def test_two_fast_clients_and_a_slow_one_by_hand() -> None:
    """Clients 0 and 1 take 1 each, client 2 takes 3; two uploads make a version.

    At 1: 0 and 1 arrive, and start again. At 2: the same. At 3: 0, 1 and 2 arrive together; 0 and 1
    fill the buffer, and 2 is the first of the next round. Then 0 and 1 start from version 3, and
    0 arrives at 4, so that 2's staleness is 3.
    """
    versions = run_clock([10, 10, 30], 4, buffer=2, concurrency=3)
    assert [tell(version) for version in versions] == [
        Told([0, 1, 2], [0, 1], [0, 0], 1.0),
        Told([0, 1], [0, 1], [0, 0], 2.0),
        Told([0, 1], [0, 1], [0, 0], 3.0),
        Told([0, 1], [0, 2], [0, 3], 4.0),
    ]


def test_who_finishes_is_replaced_at_once_by_an_idle_client() -> None:
    """One place, two uploads per version: the second client starts when the first has finished."""
    versions = run_clock([10, 10, 10], 3, buffer=2, concurrency=1)
    for version in versions:
        assert len(version.cohort.sampled) == 2
        assert version.staleness.tolist() == [0, 0]
        assert torch.equal(version.cohort.sampled, version.arrived)
    assert [version.clock for version in versions] == [2.0, 4.0, 6.0]


def test_a_duration_is_the_steps_over_the_median_times_a_log_normal_factor() -> None:
    """The draws are stated here; who renames a stream changes every asynchronous run."""
    steps = torch.tensor([10, 20, 40])
    versions = run_clock(steps.tolist(), 1, buffer=3, concurrency=3, speed_spread=0.3, seed=5)
    clients = torch.arange(3)
    own = rng.uniform(rng.key(5, "speed", clients), 1)
    first = rng.uniform(rng.key(5, "duration", clients), 1)
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), 1.0)
    exponent = 0.3 * (normal.icdf(own) + normal.icdf(first)) / 2**0.5
    durations = steps / 20 * exponent.exp().flatten()
    assert versions[0].clock == pytest.approx(float(durations.max()))


def test_replacements_are_drawn_among_the_idle_by_a_stream_of_their_own() -> None:
    (version,) = run_clock([10] * 6, 1, buffer=4, concurrency=1, seed=9)
    idle = list(range(6))
    first = int(rng.sample(rng.key(9, "sample", 1), 6, 1))
    idle.remove(first)
    expected = [first]
    for draw in rng.uniform(rng.key(9, "replacement", 1), 3).tolist():
        place = int(draw * len(idle))
        expected.append(idle.pop(place))
    assert version.cohort.sampled.tolist() == sorted(expected)


@pytest.mark.parametrize("speed_spread", [0.0, 1.0])
def test_waiting_for_everybody_is_a_synchronous_round(speed_spread: float) -> None:
    versions = run_clock([3, 5, 8, 2], 4, buffer=4, concurrency=4, speed_spread=speed_spread)
    for version in versions:
        assert version.cohort.sampled.tolist() == [0, 1, 2, 3]
        assert version.arrived.tolist() == [0, 1, 2, 3]
        assert version.staleness.tolist() == [0, 0, 0, 0]


def test_equal_speeds_sample_the_cohorts_of_synchronous_rounds() -> None:
    versions = run_clock([7] * 10, 6, buffer=4, concurrency=4, seed=3)
    synchronous = Schedule(6, participation=0.4, seed=3)
    for version in versions:
        cohort = sample_cohort(10, synchronous, version.round)
        assert torch.equal(version.cohort.sampled, cohort.sampled)
        assert torch.equal(version.arrived, cohort.sampled)
        assert version.clock == version.round


def test_a_lost_upload_frees_its_place_and_fills_no_buffer() -> None:
    versions = run_clock([4] * 6, 30, buffer=2, concurrency=3, lost_uploads=0.5, speed_spread=0.5)
    lost = sum(len(version.cohort.lost) for version in versions)
    sampled = sum(len(version.cohort.sampled) for version in versions)
    assert 0.3 < lost / sampled < 0.7
    assert sum(len(version.arrived) for version in versions) > 40


def test_a_round_without_any_upload_ends_when_nobody_is_left() -> None:
    versions = run_clock([4, 4], 3, buffer=2, concurrency=2, lost_uploads=1.0)
    for version in versions:
        assert version.arrived.tolist() == []
        assert version.cohort.lost.tolist() == [0, 1]


def test_the_first_rounds_do_not_depend_on_how_many_follow() -> None:
    settings = {"buffer": 3, "concurrency": 5, "speed_spread": 1.0, "seed": 8}
    few = run_clock(list(range(1, 13)), 5, **settings)
    many = run_clock(list(range(1, 13)), 40, **settings)
    assert [tell(version) for version in few] == [tell(version) for version in many[:5]]


def test_a_slow_client_of_few_comes_to_speak() -> None:
    versions = run_clock([1, 1, 1, 50], 120, buffer=2, concurrency=4)
    late = [version for version in versions if 3 in version.arrived.tolist()]
    assert len(late) >= 2
    assert min(int(version.staleness.max()) for version in late) >= 30


@st.composite
def asynchronous_settings(draw: st.DrawFn) -> tuple[list[int], dict[str, float]]:
    steps = draw(st.lists(st.integers(1, 6), min_size=1, max_size=9))
    concurrency = draw(st.integers(1, len(steps)))
    settings = {
        "concurrency": concurrency,
        "buffer": draw(st.integers(1, concurrency)),
        "speed_spread": draw(st.sampled_from([0.0, 0.3, 2.0])),
        "lost_uploads": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "seed": draw(st.integers(0, 99)),
    }
    return steps, settings


@given(asynchronous_settings())
def test_every_start_arrives_at_most_once_in_order_and_after_it_began(
    case: tuple[list[int], dict[str, float]],
) -> None:
    steps, settings = case
    clock = 0.0
    started: dict[int, int] = {}  # clients in flight, and the round they started in
    for version in run_clock(steps, 12, **settings):
        assert version.clock >= clock
        clock = version.clock
        fresh = version.cohort.sampled.tolist()
        lost = version.cohort.lost.tolist()
        assert fresh == sorted(set(fresh)) and fresh, "nobody starts twice from one version"
        assert set(lost) <= set(fresh)
        assert not set(fresh) & {c for c, r in started.items() if c not in version.arrived}
        before = {c: started.pop(c) for c in version.arrived.tolist() if c in started}
        for client in fresh:
            assert client not in started and client not in before
            started[client] = version.round
        for client, began, staleness in zip(
            version.arrived.tolist(),
            version.started.tolist(),
            version.staleness.tolist(),
            strict=True,
        ):
            expected = before[client] if client in before else started.pop(client)
            assert began == expected and staleness == version.round - expected >= 0
            assert client not in lost or client in before
        for client in lost:
            started.pop(client)
        assert len(version.arrived) <= settings["buffer"]
        if not settings["lost_uploads"]:
            assert len(version.arrived) == settings["buffer"]
            assert len(started) <= settings["concurrency"]
