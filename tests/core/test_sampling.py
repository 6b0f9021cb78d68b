"""Who is sampled in a round, by draws that are stated here."""

import torch

from fedproto.core import rng
from fedproto.core.sampling import Schedule, sample_cohort

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
