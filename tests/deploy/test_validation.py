"""Replies that the server refuses, and that then change no bit."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deployment import (
    HOLDERS,
    MODEL_WEIGHT,
    ROWS,
    SUMS,
    WEIGHT,
    WRONG_REPLIES,
    check_all,
    make_reply,
    set_value,
    small_state,
    trees_equal,
    with_array,
    with_classes,
    with_header,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.deploy.member import train_round
from fedproto.deploy.messages import (
    Message,
)
from fedproto.errors import Refused

BAD_NAMES = {
    "empty": "",
    "blank": "  ",
    "huge": "w" * 201,
    "new line": "w\nv",
    "escape": "\x1b[2J",
    "half a letter": "\ud800",
    "nothing to see": "\u200b",
    "null": "w\0",
}


@pytest.mark.parametrize("wrong", WRONG_REPLIES)
def test_a_wrong_reply_is_refused_and_changes_no_bit(wrong: str, tmp_path: Path) -> None:
    state, without = small_state(tmp_path / "1"), small_state(tmp_path / "2")
    asked = state.expect_replies(frozenset("abc"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        bad = WRONG_REPLIES[wrong](make_reply("b"))
    state.accept_reply("a", make_reply("a"), asked)
    with pytest.raises(Refused) as refused:
        state.accept_reply("b", bad, asked)
    state.accept_reply("c", make_reply("c", spoken=("y", "z")), asked)
    for name, spoken in (("a", ("x", "y")), ("c", ("y", "z"))):
        without.accept_reply(name, make_reply(name, spoken=spoken), asked)
    for each in (state, without):
        each.close_round()
    assert trees_equal(state.server, without.server) and state.classes == without.classes
    assert "b" not in state.members_with_upload() and state.members["b"].last_round == 0
    assert state.members["b"].refused == 1 and state.make_request("b").header["refused"] == str(
        refused.value
    )
    assert "refused" not in state.make_request("a").header
    assert len(str(refused.value)) < 400 and str(refused.value).isprintable()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("bad", BAD_NAMES)
def test_bad_class_names_are_refused_even_if_new_classes_are_accepted(
    bad: str, allowed: bool, tmp_path: Path
) -> None:
    state = small_state(tmp_path, new_classes=allowed)
    with pytest.raises(Refused):
        state.accept_reply(
            "a",
            with_classes(["x", BAD_NAMES[bad]])(make_reply("a")),
            state.expect_replies(frozenset("a")),
        )


def test_a_member_is_told_of_a_refusal_until_a_reply_counts(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    for number in (1, 2):
        with pytest.raises(Refused):
            state.accept_reply(
                "a",
                WRONG_REPLIES["NaN"](make_reply("a", number)),
                state.expect_replies(frozenset("a")),
            )
        state.accept_reply("b", make_reply("b", number), state.expect_replies(frozenset("b")))
        state.close_round()
        state.save()
        assert (
            state.members["a"].refused == number
            and "finite" in state.make_request("a").header["refused"]
        )
    state.load()
    assert "finite" in state.make_request("a").header["refused"]
    state.accept_reply("a", make_reply("a", 3), state.expect_replies(frozenset("a")))
    assert "refused" not in state.make_request("a").header and state.members["a"].refused == 2


def test_replies_of_strangers_and_second_replies_are_refused(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    state.accept_reply("a", make_reply("a"), state.expect_replies(frozenset("ab")))
    kept = state.replies["a"]
    for name, asked in (("a", "b"), ("stranger", "ab"), ("c", "ab")):
        with pytest.raises(Refused, match="unexpected reply"):
            state.accept_reply(
                name,
                Message(make_reply("a").header | {"member": name}, make_reply("b").arrays),
                state.expect_replies(frozenset(asked)),
            )
    assert state.replies == {"a": kept} and "stranger" not in state.members


def test_a_reply_with_too_many_bytes_is_refused(tmp_path: Path) -> None:
    fits = sum(value.nbytes for value in make_reply("a").arrays.values())
    small_state(tmp_path, max_bytes=fits).accept_reply(
        "a", make_reply("a"), small_state(tmp_path, max_bytes=fits).expect_replies(frozenset("a"))
    )
    state = small_state(tmp_path, max_bytes=fits - 1)
    with pytest.raises(Refused, match="bytes"):
        state.accept_reply("a", make_reply("a"), state.expect_replies(frozenset("a")))


def test_a_value_at_a_limit_is_accepted_and_one_beyond_is_refused(tmp_path: Path) -> None:
    state = small_state(tmp_path, max_count=8.0, max_norm=2.0, max_classes=2)
    expected = state.expect_replies(frozenset("a"))
    arrays = {SUMS: np.full((2, 4), 16, np.float32), WEIGHT: np.full(2, 8, np.float32)}
    good = Message(make_reply("a").header, make_reply("a").arrays | arrays)
    check_all("a", good, expected)
    for name, array in ((SUMS, set_value((0, 0), 16.1)), (WEIGHT, set_value(0, 8.1))):
        with pytest.raises(Refused):
            check_all("a", with_array(name, array)(good), expected)
    with pytest.raises(Refused, match="3 classes"):
        check_all("a", with_classes(["x", "y", "z"])(good), expected)


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", ">f4", "longdouble"])
def test_floats_of_other_types_are_refused(kind: str, tmp_path: Path) -> None:
    """Neither an exception, nor a server whose numbers are of another kind from then on."""
    state, plain = small_state(tmp_path / "1"), small_state(tmp_path / "2")
    sent = {
        name: value if name == ROWS else value.astype(kind)
        for name, value in make_reply("a").arrays.items()
    }
    try:
        state.accept_reply(
            "a", Message(make_reply("a").header, sent), state.expect_replies(frozenset("a"))
        )
        equals = {
            name: value if name == ROWS else value.astype(np.float32)
            for name, value in sent.items()
        }
        plain.accept_reply(
            "a", Message(make_reply("a").header, equals), plain.expect_replies(frozenset("a"))
        )
    except Refused:
        assert "a" not in state.replies
    for each in (state, plain):
        each.accept_reply("b", make_reply("b"), each.expect_replies(frozenset("b")))
        each.close_round()
    assert trees_equal(state.server, plain.server)


def test_small_floats_of_all_members_cannot_overflow(tmp_path: Path) -> None:
    state = small_state(tmp_path, new_classes=False)
    for name in "abc":
        arrays = {SUMS: np.full((2, 4), 60_000, np.float16), WEIGHT: np.full(2, 60, np.float16)}
        try:
            state.accept_reply(
                name,
                Message(make_reply(name).header, arrays),
                state.expect_replies(frozenset(name)),
            )
        except Refused:
            state.accept_reply(name, make_reply(name), state.expect_replies(frozenset(name)))
    state.close_round()
    assert torch.isfinite(state.server["prototypes"]).all()


@pytest.mark.parametrize("holders", [-5.0, 0.0, 1e30, 2.0, 0.25])
def test_eq6_holders_other_than_one_are_refused(holders: float, tmp_path: Path) -> None:
    """Each client is one holder of a class: another number would scale everybody's prototype."""
    state = small_state(tmp_path, "fedproto(weighting=eq6)")
    state.accept_reply("a", make_reply("a", eq6=True), state.expect_replies(frozenset("a")))
    with pytest.raises(Refused):
        bad = with_array(HOLDERS, lambda v: v * np.float32(holders))(make_reply("b", eq6=True))
        state.accept_reply("b", bad, state.expect_replies(frozenset("b")))


def test_uniform_weights_other_than_one_are_refused(tmp_path: Path) -> None:
    state = small_state(tmp_path, "fedproto(weighting=uniform)")
    ones = with_array(WEIGHT, np.ones_like)
    state.accept_reply("a", ones(make_reply("a")), state.expect_replies(frozenset("a")))
    with pytest.raises(Refused):
        state.accept_reply("b", make_reply("b"), state.expect_replies(frozenset("b")))


@pytest.mark.parametrize(
    "told",
    [10**400, -(10**400), "1", None, [1.0], float("nan"), float("inf"), {}, 1e308],
    ids=lambda value: str(value)[:8],
)
def test_an_unusable_accuracy_is_ignored(told: Any, tmp_path: Path) -> None:
    state = small_state(tmp_path)
    state.accept_reply(
        "a",
        with_header(**{"accuracy.head": told})(make_reply("a")),
        state.expect_replies(frozenset("a")),
    )
    state.close_round()
    state.save()
    state.load()
    assert all(0 <= value <= 1 for value in state.members["a"].accuracy.values())


def test_unknown_accuracies_are_not_saved(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    told = {f"accuracy.{'w' * 1000}{number}": 0.5 for number in range(2000)}
    state.accept_reply(
        "a", with_header(**told)(make_reply("a")), state.expect_replies(frozenset("a"))
    )
    state.close_round()
    state.save()
    assert state.path.stat().st_size < 100_000


def test_one_member_cannot_add_classes_without_end(tmp_path: Path) -> None:
    """One member must not add as many classes as a reply may have in every round."""
    state = small_state(tmp_path, new_classes=True, max_classes=50)
    for number in range(1, 11):
        try:
            names = [f"{number}-{each}" for each in range(50)]
            sent = with_classes(names)(make_reply("a", number))
            state.accept_reply("a", sent, state.expect_replies(frozenset("a")))
        except Refused:
            state.accept_reply("b", make_reply("b", number), state.expect_replies(frozenset("b")))
        state.close_round()
    assert len(state.classes) <= 3 + 3 * 50


@pytest.mark.parametrize("by_weight", ["fedavg", "fedper"])
def test_weights_are_checked_like_prototypes(by_weight: str, make_deployment: Any) -> None:
    deployment = make_deployment(by_weight, names="ab", quorum=2, rounds=1)
    state = deployment.state()
    good = train_round(state.make_request("a"), deployment.members["a"])
    expected = state.expect_replies(frozenset("a"))
    check_all("a", good, expected)
    first = next(name for name in good.arrays if name.startswith("model/value."))
    wrong: dict[str, Callable[[np.ndarray], Any]] = {
        first: lambda v: v.reshape(-1),
        MODEL_WEIGHT: lambda v: v[None],
    }
    for name, change in wrong.items():
        with pytest.raises(Refused):
            check_all("a", with_array(name, change)(good), expected)
    for value in (np.nan, np.inf, 1e30):
        with pytest.raises(Refused):
            check_all("a", with_array(first, set_value(..., value))(good), expected)
        with pytest.raises(Refused):
            check_all("a", with_array(MODEL_WEIGHT, set_value(..., value))(good), expected)
    for value in (0, -1, 1e9):
        with pytest.raises(Refused):
            check_all("a", with_array(MODEL_WEIGHT, set_value(..., value))(good), expected)
    with pytest.raises(Refused):
        check_all(
            "a",
            Message(good.header, {n: v for n, v in good.arrays.items() if n != first}),
            expected,
        )


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(
        st.one_of(
            st.none(),
            st.integers(0, 3),
            st.sampled_from(["x", "y", "z", "w", ""]),
            st.text(max_size=3),
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


NUMBERS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1.0, 3e38]))


KINDS = st.sampled_from(
    ["f2", "f4", "f8", ">f4", ">f8", "longdouble", "i4", "u1", "?", "c8", "U3", "O"]
)


@st.composite
def corruptions(draw: st.DrawFn) -> Callable[[Message], Message]:
    what = draw(st.sampled_from(["header", "value", "kind", "shape", "drop", "extra"]))
    if what == "header":
        key = draw(
            st.sampled_from(["member", "round", "spoken", "error?", "accuracy.head", "loss.x"])
        )
        value = draw(ANY)
        return lambda p: Message(p.header | {key: value}, p.arrays)
    name = draw(st.sampled_from([SUMS, WEIGHT]))
    if what == "value":
        number, place = draw(NUMBERS), draw(st.integers(0, 1))
        return with_array(name, set_value(place, number))
    if what == "kind":
        kind = draw(KINDS)
        return with_array(name, lambda v: v.astype(kind))
    if what == "shape":
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        return with_array(
            name,
            lambda v: (
                np.resize(v, shape) if np.prod(shape, dtype=int) else np.zeros(shape, v.dtype)
            ),
        )
    if what == "drop":
        return lambda p: Message(p.header, {n: v for n, v in p.arrays.items() if n != name})
    extra = draw(st.text(max_size=8))
    return lambda p: Message(p.header, p.arrays | {extra: p.arrays[name]})


@settings(max_examples=150)
@given(corruptions(), st.booleans())
def test_a_reply_with_one_changed_field_is_refused_or_counts_as_stated(
    tmp_path_factory: pytest.TempPathFactory, change: Callable[[Message], Message], new: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "corrupted"
    state, other = small_state(folder, new_classes=new), small_state(folder, new_classes=new)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bad = change(make_reply("b"))
        try:
            state.accept_reply("b", bad, state.expect_replies(frozenset("abc")))
            plain = {
                n: v if n == ROWS else np.ascontiguousarray(v, np.float32)
                for n, v in bad.arrays.items()
            }
            other.accept_reply(
                "b", Message(bad.header, plain), other.expect_replies(frozenset("abc"))
            )
        except Refused:
            assert "b" not in state.replies
    for each in (state, other):
        each.accept_reply("a", make_reply("a"), each.expect_replies(frozenset("a")))
        each.close_round()
    assert trees_equal(state.server, other.server) and state.classes == other.classes
    assert all(torch.isfinite(value).all() for value in state.server.values())


# --- exact limits


def test_a_class_name_may_have_as_many_characters_as_the_limit_says(tmp_path: Path) -> None:
    state = small_state(tmp_path, new_classes=True)
    asked = state.expect_replies(frozenset("abc"))
    long_name = "w" * 200
    state.accept_reply("a", make_reply("a", spoken=("x", long_name)), asked)
    with pytest.raises(Refused, match=r"it names the class 'www.*more than 200 characters"):
        state.accept_reply("b", make_reply("b", spoken=("x", long_name + "w")), asked)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "it does not name its classes"),
        ([1], "it does not name its classes"),
        (["x", "x"], "it names a class twice"),
        (["x", "w"], "it has the class 'w', which is not a class of this federation, and new"),
    ],
    ids=str,
)
def test_a_refusal_says_what_is_wrong_with_the_names(names, sentence, tmp_path: Path) -> None:
    state = small_state(tmp_path)
    asked = state.expect_replies(frozenset("abc"))
    with pytest.raises(Refused, match=f"^{sentence}"):
        state.accept_reply("a", with_classes(names)(make_reply("a")), asked)


def reply_of(sums: list[float], weights: list[float], rows: list[int]) -> Message:
    """Return a reply with the same number in all four places of a prototype."""
    values = np.array(sums, np.float32)[:, None].repeat(4, 1)
    arrays = {
        ROWS: np.array(rows, np.int32),
        WEIGHT: np.array(weights, np.float32),
        SUMS: values,
    }
    names = ["x", "y", "z"][: len(sums)]
    return Message({"member": "a", "round": 1, "spoken": names}, arrays)


def test_each_row_is_divided_by_its_own_weight_and_judged_alone(tmp_path: Path) -> None:
    """The order of the arrays does not matter, and numbers of rows have no limit of their own."""
    expected = small_state(tmp_path, max_norm=2.0).expect_replies(frozenset("a"))
    check_all("a", reply_of([200.0, 1.0], [100.0, 1.0], [5, 9]), expected)
    for sums in ([250.0, 0.0], [0.0, 2.5]):
        with pytest.raises(Refused, match=r"value.prototypes has a root mean square of 2.5;"):
            check_all("a", reply_of(sums, [100.0, 1.0], [5, 9]), expected)


@pytest.mark.parametrize("weight", [0.0, -1.0, 8.5])
def test_a_refusal_says_which_weights_are_accepted(weight: float, tmp_path: Path) -> None:
    expected = small_state(tmp_path, max_count=8.0).expect_replies(frozenset("a"))
    reply = reply_of([0.0, 0.0], [1.0, weight], [0, 1])
    with pytest.raises(Refused, match="it has a weight that is not above 0 and at most 8"):
        check_all("a", reply, expected)


def test_a_refusal_names_the_array_and_says_what_is_wrong_with_the_rows(tmp_path: Path) -> None:
    expected = small_state(tmp_path).expect_replies(frozenset("a"))
    good = reply_of([1.0, 1.0], [1.0, 1.0], [0, 1])
    more = Message(good.header, good.arrays | {"value.more": good.arrays[SUMS]})
    with pytest.raises(Refused, match=r"'value\.more' is missing or unknown"):
        check_all("a", more, expected)
    for rows in ([0, 0], [-1, 0]):
        with pytest.raises(Refused, match="it names a row twice, or a row below 0"):
            check_all("a", reply_of([1.0, 1.0], [1.0, 1.0], rows), expected)


SENTENCES: dict[str, tuple[Callable[[Message], Message], str]] = {
    "sender": (with_header(member="c"), "it claims to be from 'c', but a sent it"),
    "round": (with_header(round=2), "it is of round 2, but this is round 1"),
    "shape": (
        with_array(SUMS, lambda value: np.ones((2, 5), np.float32)),
        "value.prototypes is float32 of shape (2, 5) instead of float32 of shape (2, 4)",
    ),
    "rows": (with_array(ROWS, np.zeros_like), "it names a row twice, or a row below 0"),
    "count": (
        with_array(WEIGHT, lambda value: value + np.float32(1)),
        "extra.weight is not 1, although every member counts once",
    ),
    "long name": (
        with_header(spoken=["x", "w" * 59]),
        f"it has the class '{'w' * 56}..., which is not a class of this federation, "
        "and new classes are not accepted",
    ),
}


@pytest.mark.parametrize("what", SENTENCES)
def test_a_refusal_is_one_whole_sentence(what: str, tmp_path: Path) -> None:
    change, sentence = SENTENCES[what]
    state = small_state(tmp_path, "fedproto(weighting=uniform)")
    good = reply_of([1.0, 1.0], [1.0, 1.0], [0, 1])
    with pytest.raises(Refused) as refused:
        check_all("a", change(good), state.expect_replies(frozenset("a")))
    assert str(refused.value) == sentence


def test_a_reply_of_somebody_who_was_not_asked_is_refused_in_one_whole_sentence(
    tmp_path: Path,
) -> None:
    with pytest.raises(Refused) as refused:
        check_all("a", make_reply("a"), small_state(tmp_path).expect_replies(frozenset("b")))
    reason = "the sender was not sampled this round or has already replied"
    assert str(refused.value) == f"unexpected reply: {reason}"
