"""Who is sampled in a round, by draws that are stated here."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core import rng
from fedproto.core.sampling import Schedule, count_fraction, sample_cohort, sample_present

HALF = Schedule(9, participation=0.5, lost_uploads=0.5, stragglers=0.5, seed=7)


def test_each_draw_has_a_stream_of_its_own() -> None:
    """Streams are named: whoever renames one changes every run with partial participation."""
    cohort = sample_cohort(20, HALF, round=3)
    expected = rng.sample(rng.key(7, "sample", 3), 20, 10)
    lost = expected[rng.sample(rng.key(7, "lost uploads", 3), 10, 5)]
    slow = expected[rng.sample(rng.key(7, "stragglers", 3), 10, 5)]
    assert torch.equal(cohort.sampled, expected)
    assert torch.equal(cohort.lost, lost)
    assert torch.equal(cohort.slow, slow)
    assert not torch.equal(lost, slow)


def test_one_of_several_clients_is_drawn_and_not_simply_the_first() -> None:
    schedule = Schedule(9, participation=0.1, seed=0)
    drawn = {int(sample_cohort(10, schedule, round).sampled) for round in range(1, 9)}
    assert len(drawn) > 1


def test_nobody_is_slow_or_lost_unless_the_schedule_says_so() -> None:
    cohort = sample_cohort(3, Schedule(9), round=1)
    assert cohort.sampled.tolist() == [0, 1, 2]
    assert cohort.lost.tolist() == []
    assert cohort.slow.tolist() == []


FRACTIONS = st.floats(0.01, 1)


@given(st.integers(1, 60), FRACTIONS, st.integers(0, 2**31), st.integers(1, 99))
def test_if_all_are_present_the_cohort_is_the_simulators(
    clients: int, fraction: float, seed: int, round: int
) -> None:
    expected = sample_cohort(clients, Schedule(99, fraction, seed=seed), round).sampled
    found = sample_present(torch.arange(clients).flip(0), fraction, 1, seed, round)
    assert torch.equal(found, expected)


@given(st.sets(st.integers(0, 60), min_size=1), FRACTIONS, st.integers(1, 70), st.integers(1, 99))
def test_a_cohort_is_of_those_present_and_no_smaller_than_asked(
    numbers: set[int], fraction: float, at_least: int, round: int
) -> None:
    found = sample_present(torch.tensor(list(numbers)), fraction, at_least, 3, round).tolist()
    assert found == sorted(set(found) & numbers)
    assert len(found) == min(len(numbers), count_fraction(fraction, len(numbers), at_least))


@given(st.sets(st.integers(0, 60), min_size=2), st.integers(1, 60), st.integers(1, 99))
def test_whoever_goes_is_replaced_and_nobody_else(
    numbers: set[int], count: int, round: int
) -> None:
    """Of cohorts of the same size; the fraction is so small that `at_least` decides."""
    gone = min(numbers)
    before = set(sample_present(torch.tensor(list(numbers)), 1e-9, count, 3, round).tolist())
    left = torch.tensor(list(numbers - {gone}))
    after = set(sample_present(left, 1e-9, count, 3, round).tolist())
    assert before - {gone} <= after
    assert len(after - before) == (1 if gone in before and count < len(numbers) else 0)


def test_the_cohorts_of_a_seed_are_these() -> None:
    """A server that is updated between two rounds asks the same members."""
    present = torch.tensor([0, 1, 2, 4, 5, 6, 7, 9])
    found = [sample_present(present, 0.5, 1, 7, round).tolist() for round in (1, 2, 3)]
    assert found == [[1, 2, 4, 9], [1, 5, 7, 9], [1, 2, 6, 9]]
