"""The best round of hand-made sequences of validation accuracies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core.best_round import BestRound, main_accuracy
from fedproto.errors import ConfigError


def follow(scores, patience=None, every=1):
    """Note scores until the run is over; return what is known then, and the last round."""
    best = BestRound(patience=patience)
    round = 0
    for score in scores:
        round += every
        best.note(round, {"head": {"mean": score, "std": 0.0}})
        if best.is_over:
            break
    return best, round


@pytest.mark.parametrize(
    ("scores", "patience", "best_round", "last"),
    [
        ([0.1, 0.5, 0.4], None, 2, 3),
        ([0.5, 0.5, 0.5], None, 1, 3),  # of equal rounds the earliest
        ([0.1, 0.5, 0.4, 0.6], 1, 2, 3),
        ([0.1, 0.5, 0.4, 0.6, 0.5, 0.5], 2, 4, 6),
        ([0.5, 0.5, 0.5, 0.9], 2, 1, 3),  # no improvement is none
        ([0.0, 0.0], 1, 1, 2),
        ([0.3], 1, 1, 1),
    ],
)
def test_by_hand(scores, patience, best_round, last):
    best, round = follow(scores, patience)
    assert (best.round, round) == (best_round, last)
    assert best.score == max(scores[:last])


def test_rounds_are_numbered_as_they_are_evaluated():
    best, round = follow([0.1, 0.5, 0.4, 0.3, 0.9], patience=2, every=10)
    assert (best.round, round) == (20, 40)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1), st.integers(1, 4))
def test_looking_back_over_lines_gives_the_same(scores, patience):
    best, round = follow(scores, patience)
    lines = []
    for number, score in enumerate(scores[:round], 1):
        lines.append({"round": 2 * number - 1})  # not evaluated
        lines.append({"round": 2 * number, "validation": {"head": {"mean": score}}})
    again = BestRound(patience=patience, round=99, score=99.0, waited=99)
    again.look_back(lines)
    assert (again.round, again.score) == (2 * best.round, best.score)
    assert (again.waited, again.is_over) == (best.waited, best.is_over)


def test_the_main_accuracy_is_that_of_the_nearest_prototype_where_there_is_one():
    assert main_accuracy(["head", "head_own", "prototype", "prototype_own"]) == "prototype"
    assert main_accuracy(["head", "head_own"]) == "head"
    assert main_accuracy(["centre", "centre_own"]) == "centre"


def test_an_unknown_accuracy_is_refused_with_those_there_are():
    best = BestRound("prototyp")
    with pytest.raises(ConfigError, match="prototype"):
        best.note(1, {"prototype": {"mean": 0.5}})
