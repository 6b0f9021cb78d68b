"""Replies that are too large beside those of the other members."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import plain_outliers
from helpers.deployment import (
    MODEL_WEIGHT,
    SUMS,
    WEIGHT,
    make_reply,
    small_state,
    trees_equal,
    with_array,
)
from helpers.plain_outliers import _compare, _medians_of_others
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core.types import Group
from fedproto.deploy.messages import Message, unpack_upload
from fedproto.deploy.outliers import Amounts, find_outliers
from fedproto.deploy.settings import (
    ServerSettings,
)
from fedproto.deploy.status import read_status


def amounts(norm: float = 1.0, count: float = 20.0, classes: Iterable[str] = "xyz") -> Amounts:
    return Amounts(dict.fromkeys(classes, norm), dict.fromkeys(classes, count))


HONEST = {"a": amounts(1.0), "b": amounts(1.2), "c": amounts(0.9)}


def test_the_median_of_the_others_by_hand() -> None:
    assert _medians_of_others({"a": 1.0, "b": 2.0, "c": 9.0}) == {"a": 5.5, "b": 5.0, "c": 1.5}
    assert _medians_of_others({"a": 1.0, "b": 2.0, "c": 9.0, "d": 3.0}) == {
        "a": 3.0,
        "b": 3.0,
        "c": 2.0,
        "d": 2.0,
    }
    assert _medians_of_others({"a": 1.0, "b": 2.0}) == {}


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=9))
def test_the_median_of_the_others_is_numpys(values: list[float]) -> None:
    found = _medians_of_others({str(place): value for place, value in enumerate(values)})
    for place in range(len(values)):
        assert found[str(place)] == pytest.approx(np.median(values[:place] + values[place + 1 :]))


#: Few different values, so that equal ones are frequent.
SIZES = st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.0, 3.0, 7.0, 40.0, 1e6])


@st.composite
def amounts_of_members(draw: st.DrawFn) -> dict[str, Amounts]:
    members = {}
    for name in draw(st.lists(st.sampled_from("abcdefghijkl"), unique=True, max_size=12)):
        classes = draw(st.lists(st.sampled_from(["v", "w", "x", "", "\0cnn"]), min_size=1))
        kinds = [{label: draw(SIZES) for label in classes} for _ in range(2)]
        members[name] = Amounts(*kinds)
    return members


@given(amounts_of_members(), amounts_of_members(), st.sampled_from([0.5, 2.0, 5.0]))
def test_the_same_are_refused_as_member_by_member(
    replies: dict[str, Amounts], remembered: dict[str, Amounts], limit: float
) -> None:
    """In the same order, for the same reasons; of two equally bad classes either is named."""
    limits = ServerSettings(max_norm_ratio=limit, max_count_ratio=2 * limit)
    expected = plain_outliers.find_outliers(replies, remembered, limits)
    found = find_outliers(replies, remembered, limits)
    assert list(found) == list(expected)
    for name, reason in found.items():
        assert re.sub("of class '.'", "", reason) == re.sub("of class '.'", "", expected[name])


def test_only_the_reply_beyond_the_others_is_refused() -> None:
    for liar, kind, ratio, limit in (
        (amounts(10.0), "norm", "10", "5"),
        (amounts(count=1e7), "count", "500000", "100"),
    ):
        found = find_outliers(HONEST | {"d": liar}, {}, ServerSettings())
        assert list(found) == ["d"]
        sentence = (
            rf"the {kind} of class '[xyz]' is about {ratio} times the median of the other "
            rf"members'; at most {limit} times is accepted \(max-{kind}-ratio\)"
        )
        assert re.fullmatch(sentence, found["d"])


def test_one_class_out_of_three_is_enough() -> None:
    liar = Amounts({"x": 1.0, "y": 30.0, "z": 1.0}, dict.fromkeys("xyz", 20.0))
    assert (
        "norm of class 'y' is about 30 times"
        in find_outliers(HONEST | {"d": liar}, {}, ServerSettings())["d"]
    )


def test_a_ratio_at_a_limit_is_accepted_and_one_beyond_is_refused() -> None:
    same = {"a": amounts(), "b": amounts()}
    for limits, within, beyond in (
        (ServerSettings(), amounts(5.0, 2000.0), amounts(5.01)),
        (
            ServerSettings(max_norm_ratio=2, max_count_ratio=3),
            amounts(2.0, 60.0),
            amounts(1.0, 60.1),
        ),
    ):
        assert find_outliers(same | {"c": within}, {}, limits) == {}
        assert list(find_outliers(same | {"c": beyond}, {}, limits)) == ["c"]


def test_two_members_cannot_judge_each_other() -> None:
    assert find_outliers({"a": amounts(), "b": amounts(1e3, 1e6)}, {}, ServerSettings()) == {}


@pytest.mark.parametrize("tiny", [1e-9, 0.0])
def test_a_liar_with_tiny_numbers_does_not_make_others_outliers(tiny: float) -> None:
    liar = amounts(tiny, 1.0, "wxyz")
    assert (
        find_outliers(
            {"a": amounts(), "b": amounts(1.5), "d": liar}, {}, ServerSettings(max_count_ratio=5)
        )
        == {}
    )


def test_two_liars_are_refused_one_after_the_other() -> None:
    both = {"d": amounts(50.0), "e": amounts(20.0)}
    assert sorted(find_outliers(HONEST | both, {}, ServerSettings())) == ["d", "e"]


def test_absent_members_are_compared_with_but_not_judged() -> None:
    assert list(find_outliers({"d": amounts(10.0)}, HONEST, ServerSettings())) == ["d"]
    assert find_outliers(HONEST, {"d": amounts(10.0)}, ServerSettings()) == {}


def test_a_class_nobody_else_has_is_compared_with_their_typical_class() -> None:
    alone = Amounts({"x": 1.0, "w": 9.0}, {"x": 20.0, "w": 20.0})
    assert "class 'w'" in find_outliers(HONEST | {"d": alone}, {}, ServerSettings())["d"]
    assert find_outliers(HONEST | {"d": amounts(2.0, 1500.0, "w")}, {}, ServerSettings()) == {}


def test_unbalanced_counts_are_accepted() -> None:
    """One clinic has 900 images of a class that is rare elsewhere, one has very few."""
    others = {
        name: Amounts({"x": 1.0, "y": 1.0}, {"x": 400.0, "y": rare})
        for name, rare in (("a", 2.0), ("b", 3.0))
    }
    special = Amounts({"x": 1.0, "y": 1.0}, {"x": 50.0, "y": 900.0})
    poor = Amounts({"x": 1.0, "y": 1.0}, {"x": 3.0, "y": 1.0})
    assert find_outliers(others | {"c": special, "d": poor}, {}, ServerSettings()) == {}


def test_weights_are_judged_as_a_whole_without_running_statistics() -> None:
    def member(scale: float, statistics: float = 1.0, count: float = 30.0) -> Amounts:
        sums = {"fc.weight": torch.full((2, 3), scale), "fc.bias": torch.full((2,), scale)}
        sums["bn.running_var"] = torch.full((2,), statistics)
        weighted = {name: value * count for name, value in sums.items()}
        return Amounts.measure({"model": Group(weighted, torch.tensor(count))}, [])

    assert member(3.0).norms == {"": pytest.approx(3.0)} and member(3.0).counts == {"": 30.0}
    honest = {"a": member(1.0), "b": member(1.1), "c": member(0.9, 1e3)}
    assert find_outliers(honest, {}, ServerSettings()) == {}
    assert (
        "norm of its weights is about 10 times"
        in find_outliers(honest | {"d": member(10.0)}, {}, ServerSettings())["d"]
    )
    assert (
        "count of its weights"
        in find_outliers(honest | {"d": member(1.0, count=1e7)}, {}, ServerSettings())["d"]
    )


def test_amounts_are_measured_of_means_not_of_sums() -> None:
    sums = {"prototypes": torch.tensor([[6.0, 8.0], [0.0, 5.0]])}
    upload = {"prototypes": Group(sums, torch.tensor([2.0, 5.0]))}
    found = Amounts.measure(upload, ["x", "y"])
    assert found.norms == {"x": pytest.approx(12.5**0.5), "y": pytest.approx(0.5**0.5)}
    assert found.counts == {"x": 2.0, "y": 5.0}


def times(factor: float) -> Callable[[Message], Message]:
    return with_array(SUMS, lambda value: value * np.float32(factor))


def many(count: float) -> Callable[[Message], Message]:
    def lie(reply: Message) -> Message:
        weight = reply.arrays[WEIGHT]
        means = reply.arrays[SUMS] / weight[:, None]
        changed = {SUMS: -means * np.float32(count), WEIGHT: np.full_like(weight, count)}
        return Message(reply.header, reply.arrays | changed)

    return lie


@pytest.mark.parametrize(
    "lie", [times(10), times(1000), many(1e7)], ids=["x10", "x1000", "1e7 images"]
)
def test_a_liar_within_the_absolute_limits_changes_no_bit(
    lie: Callable[[Message], Message], make_deployment: Any
) -> None:
    """In round 1, where nothing has been seen, and later; the log and the status tell of it."""
    deployment = make_deployment(names="abcd", quorum=3, new_classes=True, rounds=3)
    silent = make_deployment(rounds=3, where="silent")
    state = deployment.serve(
        rewrite=lambda name, reply, round: [lie(reply) if name == "d" else reply]
    )
    assert trees_equal(state.server, silent.serve().server) and state.classes == tuple("012345")
    assert (state.members["d"].refused, state.members["d"].last_round) == (3, 0)
    assert {name: state.members[name].refused for name in "abc"} == dict.fromkeys("abc", 0)
    shown = read_status(state.path)["members"]["d"]
    assert shown["refused"] == 3 and "times the median of the other members'" in shown["reason"]
    assert sum("d was refused: the " in said for said in deployment.said) == 3


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_a_liar_where_weights_travel_changes_no_bit(algorithm: str, make_deployment: Any) -> None:
    def lie(name: str, reply: Message, round: int) -> list[Message]:
        return [times_all(reply) if name == "c" else reply]

    def times_all(reply: Message) -> Message:
        big = {n: v * np.float32(10) for n, v in reply.arrays.items() if n != MODEL_WEIGHT}
        return Message(reply.header, reply.arrays | big)

    deployment, silent = (
        make_deployment(algorithm, rounds=2, quorum=2),
        make_deployment(algorithm, rounds=2, quorum=2, where="silent"),
    )
    state = deployment.serve(rewrite=lie)
    assert trees_equal(state.server, silent.serve(heard=lambda name, round: name != "c").server)
    assert state.members["c"].refused == 2 and "norm of its weights" in state.members["c"].reason


def test_a_liar_costs_honest_members_nothing(make_deployment: Any) -> None:
    """A member that multiplies its prototypes by ten does not change the others' accuracy."""
    honest = make_deployment(rounds=4, quorum=3).serve()
    deployment = make_deployment(names="abcd", quorum=3, new_classes=True, rounds=4, where="liar")
    lied = deployment.serve(
        rewrite=lambda name, reply, round: [times(10)(reply) if name == "d" else reply]
    )
    for name in "abc":
        assert lied.members[name].accuracy == honest.members[name].accuracy


def test_a_reply_is_compared_with_what_absent_members_sent_before(tmp_path: Path) -> None:
    """In round 2 only one member replies, a thousand times too large; the others are remembered."""
    state = small_state(tmp_path)
    asked = state.expect_replies(frozenset("abc"))
    for name in "abc":
        state.accept_reply(name, make_reply(name), asked)
    assert state.refuse_outliers() == {}
    state.close_round()
    asked = state.expect_replies(frozenset("a"))
    large = with_array(SUMS, lambda sums: sums * 1000)(make_reply("a", round=2))
    state.accept_reply("a", large, asked)
    reasons = state.refuse_outliers()
    assert list(reasons) == ["a"]
    assert state.replies == {}
    assert state.members["a"].refused == 1
    assert state.make_request("a").header["refused"] == reasons["a"]


def test_a_norm_is_compared_with_the_same_class_and_a_count_with_the_usual_one_too() -> None:
    """Ten is usual for x, but ten times as large as anybody's y."""
    others = {name: Amounts({"x": 10.0, "y": 1.0}, {"x": 200.0, "y": 1.0}) for name in "abc"}
    liar = Amounts({"x": 10.0, "y": 10.0}, {"x": 200.0, "y": 200.0})
    reasons = find_outliers(others | {"d": liar}, {}, ServerSettings(max_count_ratio=2))
    assert list(reasons) == ["d"]
    assert reasons["d"].startswith("the norm of class 'y' is about 10 times the median")


def test_the_ratio_is_zero_where_there_is_nothing_to_compare_with() -> None:
    assert _compare({"a": {"x": 3.0}}, rare_is_suspicious=True) == {"a": {"x": 0.0}}


def test_a_long_class_name_is_shortened_in_a_reason() -> None:
    name = "w" * 59  # with its quotation marks, one character more than is shown
    same = {each: amounts(classes=[name]) for each in "abc"}
    reasons = find_outliers(same | {"d": amounts(10.0, classes=[name])}, {}, ServerSettings())
    assert reasons["d"].startswith(f"the norm of class '{'w' * 56}... is about 10 times")


def test_the_first_control_variates_of_a_late_member_count(make_deployment: Any) -> None:
    """They are many times those of members that are near their own by then, yet below the model."""
    deployment = make_deployment(
        "scaffold", names="abcd", quorum=3, rounds=4, classes="0,1,2,3,4,5,6"
    )
    norms: dict[tuple[str, int], float] = {}

    def measure(name: str, reply: Message, round: int) -> list[Message]:
        changes = unpack_upload(reply)["control"].sums.values()
        flat = torch.cat([change.flatten() for change in changes])
        norms[name, round] = float(flat.square().mean().sqrt())
        return [reply]

    state = deployment.serve(rewrite=measure, there=lambda name, round: name != "d" or round > 3)
    others = [norms[name, 4] for name in "abc"]
    assert norms["d", 4] > 5 * max(others), "as large as max-norm-ratio forbids"
    assert state.members["d"].last_round == 4 and state.members["d"].refused == 0
