"""What requests, rounds, leavers and restarts do to the server's state, with replies of ones."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.deployment import (
    SUMS,
    accept_classes,
    make_reply,
    small_state,
    trees_equal,
    with_array,
    with_classes,
)

from fedproto.core.files import write_tensors
from fedproto.deploy.server_state import STATE_FORMAT, ServerState, read_state
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.errors import DataError, RunFolderError


def state_without_members(folder: Path, **options: Any) -> ServerState:
    given: dict[str, Any] = {"state": str(folder), "classes": "x,y,z", "quorum": 1} | options
    return ServerState(ServerSettings(**given), TrainingTerms(dim=4))


def accept_scaled(state: ServerState, name: str, factor: float, classes: list[str]) -> None:
    """Accept a reply whose prototypes all have this value."""
    reply = with_classes(classes)(make_reply(name, state.round + 1))
    reply = with_array(SUMS, lambda sums: sums * np.float32(factor))(reply)
    state.accept_reply(name, reply, state.expect_replies(frozenset(name)))


# --- a new state, and its requests


def test_a_new_federation_has_an_id_of_its_own_and_nobody_in_it(tmp_path: Path) -> None:
    state = state_without_members(tmp_path)
    assert re.fullmatch("[0-9a-f]{16}", state.id)
    assert state_without_members(tmp_path).id != state.id
    assert state.members == {}
    assert state.uploads.last_round.tolist() == []


def test_an_unusable_class_of_the_settings_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^the server's settings name a class 'y\\x1b'"):
        state_without_members(tmp_path, classes="x,y\x1b")


def test_a_request_says_who_asks_whom(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    header = state.make_request("b").header
    assert (header["federation"], header["round"]) == (state.id, 1)
    assert (header["member"], header["number"]) == ("b", 1)


def test_a_member_is_sent_its_own_classes_unless_they_are_unknown_or_all_are_asked_for(
    tmp_path: Path,
) -> None:
    state = small_state(tmp_path)
    accept_classes(state, "a", ["x", "y"])
    accept_classes(state, "b", ["y", "z"])
    state.close_round()
    assert state.make_request("a").header["known"] == ["x", "y"]
    assert state.make_request("b").header["known"] == ["y", "z"]
    assert state.make_request("a", all_classes=True).header["known"] == ["x", "y", "z"]
    assert state.make_request("c").header["known"] == ["x", "y", "z"]


# --- rounds


@pytest.mark.parametrize(("absent", "expected"), [("remember", 2.0), ("drop", 1.0)])
def test_an_absent_member_counts_only_where_it_is_remembered(
    absent: str, expected: float, tmp_path: Path
) -> None:
    """In round 1 a and b say 1 and 3. In round 2 only a speaks, and again says 1."""
    state = small_state(tmp_path, f"fedproto(absent={absent})")
    accept_scaled(state, "a", 1, ["x", "y"])
    accept_scaled(state, "b", 3, ["x", "y"])
    state.close_round()
    assert state.server["prototypes"][:2].tolist() == [[2.0] * 4] * 2
    accept_scaled(state, "a", 1, ["x", "y"])
    state.close_round()
    assert state.server["prototypes"][:2].tolist() == [[expected] * 4] * 2
    assert (state.members["a"].last_round, state.members["b"].last_round) == (2, 1)
    assert state.members["a"].reason == ""


def test_a_round_without_replies_keeps_the_prototypes(tmp_path: Path) -> None:
    state = small_state(tmp_path, "fedproto(absent=drop)")
    accept_classes(state, "a", ["x"])
    state.close_round()
    before = dict(state.server)
    state.close_round()
    assert state.round == 2
    assert trees_equal(state.server, before)


def test_new_classes_are_listed_in_the_order_of_the_members_numbers(tmp_path: Path) -> None:
    """Not in the order in which replies arrive, nor in that of names; a restart keeps both."""
    state = state_without_members(tmp_path, new_classes=True)
    for name in "cab":
        state.make_request(name)
    for name, brought in (("b", "v"), ("a", "u"), ("c", "w")):
        accept_classes(state, name, [brought])
    state.close_round()
    assert state.classes == ("x", "y", "z", "w", "u", "v")
    state.save()
    again = state_without_members(tmp_path, new_classes=True)
    again.load()
    assert list(again.members) == ["c", "a", "b"]
    assert again.classes == state.classes


# --- outliers


def remember_three(folder: Path, members: str) -> ServerState:
    """Return the state after a round with three members, of which only `members` still are."""
    state = small_state(folder)
    for name in "abc":
        accept_classes(state, name, ["x", "y"])
    state.close_round()
    state.save()
    changed = small_state(folder, members=members)
    changed.load()
    return changed


def test_a_reply_is_compared_with_listed_members_that_are_absent(tmp_path: Path) -> None:
    state = remember_three(tmp_path, "a,b,c")
    accept_scaled(state, "a", 1000, ["x", "y"])
    assert list(state.refuse_outliers()) == ["a"]


def test_a_reply_is_not_compared_with_former_members(tmp_path: Path) -> None:
    state = remember_three(tmp_path, "a")
    accept_scaled(state, "a", 1000, ["x", "y"])
    assert state.refuse_outliers() == {}


# --- leavers


def test_a_member_that_leaves_after_the_others_is_removed(tmp_path: Path) -> None:
    state = small_state(tmp_path, new_classes=True)
    accept_classes(state, "a", ["x"])
    accept_classes(state, "c", ["x", "w"])
    state.close_round()
    state.settings = small_state(tmp_path, new_classes=True, members="a,b").settings
    state.close_round()
    assert state.members_with_upload() == ["a"]
    assert state.classes == ("x", "y", "z")
    assert (state.members["c"].spoken, state.members["c"].brought) == ([], [])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # b brought w, and had given it up before it left
        ({"b": ["x", "w"]}, {"b": ["x"], "a": ["x"]}),
        # a brought w and gave it up; b still held it when it left
        ({"a": ["x", "w"]}, {"a": ["x"], "b": ["w"]}),
    ],
    ids=["brought", "held"],
)
def test_a_class_that_nobody_holds_goes_with_who_brought_or_held_it(
    first: dict[str, list[str]], second: dict[str, list[str]], tmp_path: Path
) -> None:
    state = small_state(tmp_path, new_classes=True)
    for number, replies in enumerate((first, second), 1):
        for name, classes in replies.items():
            accept_classes(state, name, classes, number)
        state.close_round()
    assert state.classes == ("x", "y", "z", "w")
    state.settings = small_state(tmp_path, new_classes=True, members="a,c").settings
    state.close_round()
    assert state.classes == ("x", "y", "z")
    assert state.server["known"].tolist() == [1, 0, 0]


def test_a_class_can_come_in_the_round_in_which_another_goes(tmp_path: Path) -> None:
    state = small_state(tmp_path, "fedproto(absent=drop)", new_classes=True)
    accept_classes(state, "a", ["w"])
    state.close_round()
    state.settings = small_state(tmp_path, new_classes=True, members="b,c").settings
    accept_scaled(state, "b", 5, ["v"])
    state.close_round()
    assert state.classes == ("x", "y", "z", "v")
    assert state.server["known"].tolist() == [0, 0, 0, 1]
    assert state.server["prototypes"][3].tolist() == [5.0] * 4


# --- restarts


def test_a_restarted_server_is_the_same_federation_with_all_registered_names(
    tmp_path: Path,
) -> None:
    state = small_state(tmp_path)
    state.registered = {"a", "b"}
    state.save()
    again = state_without_members(tmp_path)
    again.registered = {"b", "c"}
    again.load()
    assert again.id == state.id
    assert again.registered == {"a", "b", "c"}


def test_a_class_that_the_settings_name_later_has_no_prototype_yet(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    accept_classes(state, "a", ["x", "z"])
    state.close_round()
    state.save()
    again = state_without_members(tmp_path, classes="x,y,z,w")
    again.load()
    assert again.server["known"].tolist() == [1, 0, 1, 0]
    assert again.server["prototypes"].shape == (4, 4)
    assert again.upload_of("a")["prototypes"].weight.tolist() == [1, 0, 1, 0]
    assert again.upload_of("a")["prototypes"].sums["prototypes"].shape == (4, 4)


KEYS = ["id", "round", "classes", "algorithm", "registered", "members"]


@pytest.mark.parametrize("key", KEYS)
def test_a_state_that_lacks_a_key_is_refused_with_its_name(key: str, tmp_path: Path) -> None:
    state = small_state(tmp_path)
    state.save()
    tensors, header = read_state(state.path)
    kept = {name: header[name] for name in KEYS if name != key}
    write_tensors(state.path, tensors, STATE_FORMAT, kept)
    with pytest.raises(RunFolderError, match=f"is not a server's state: it lacks '{key}'"):
        read_state(state.path)


@pytest.mark.parametrize("lost", [("server.known",), ("server.known", "server.prototypes")])
def test_a_state_that_lacks_tensors_is_refused(lost: tuple[str, ...], tmp_path: Path) -> None:
    state = small_state(tmp_path)
    state.save()
    tensors, header = read_state(state.path)
    kept = {name: value for name, value in tensors.items() if name not in lost}
    stated = {key: header[key] for key in KEYS}
    write_tensors(state.path, kept, STATE_FORMAT, stated)
    with pytest.raises(RunFolderError, match=r"holds a state of another dim.*\(known\)"):
        small_state(tmp_path).load()


def test_uploads_over_other_classes_are_refused(tmp_path: Path) -> None:
    state = small_state(tmp_path)
    accept_classes(state, "a", ["x"])
    state.close_round()
    state.save()
    tensors, header = read_state(state.path)
    shorter = {"uploads.classes": torch.tensor(2)}
    stated = {key: header[key] for key in KEYS}
    write_tensors(state.path, tensors | shorter, STATE_FORMAT, stated)
    with pytest.raises(
        RunFolderError, match=r"corrupted: its uploads are not those of its classes$"
    ):
        small_state(tmp_path).load()


def test_the_refusal_of_another_algorithm_says_what_to_do(tmp_path: Path) -> None:
    small_state(tmp_path).save()
    other = small_state(tmp_path, "fedproto(lam=0.5)")
    with pytest.raises(RunFolderError, match=r"not to fedproto\(.*\): name another state$"):
        other.load()
