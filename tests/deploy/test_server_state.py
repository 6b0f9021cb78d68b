"""What the server keeps and whom it believes, in federations that lie, crowd, leave or run out of disk."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_deploy import (
    DIM,
    EQUAL,
    MIXED,
    SUMS,
    WEIGHT,
    WEIGHTS,
    WRONG,
    Transport,
    after_a_round,
    as_a_task,
    equal,
    file_of,
    files,
    flower_post,
    of_names,
    parcel,
    small,
    with_array,
    world,
)

from fedproto.core import codec
from fedproto.core.files import TensorFormat, pack_tensors
from fedproto.core.types import Upload
from fedproto.deploy.member import MemberCheckpoint, answer
from fedproto.deploy.messages import Message, of_upload, over, to_upload
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_state import STATE, ServerState, read_state
from fedproto.deploy.status import read_status
from fedproto.deploy.validation import Amounts, Limits, _medians_of_others, find_outliers
from fedproto.errors import Refused, RunFolderError, TrainingError
from fedproto.runs.api import _begin
from fedproto.runs.experiment import proceed

__all__ = ["files", "world"]  # fixtures


# --- the server's file


def test_the_state_is_for_its_owner_only(tmp_path: Path) -> None:
    hall = after_a_round(tmp_path / "new" / "state")
    assert hall.path.stat().st_mode & 0o777 == 0o600
    assert hall.path.parent.stat().st_mode & 0o777 == 0o700


def test_every_flipped_bit_of_the_state_is_refused_by_name(tmp_path: Path) -> None:
    hall = after_a_round(tmp_path)
    content = hall.path.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        hall.path.write_bytes(changed)
        with pytest.raises(RunFolderError, match=STATE):
            small(tmp_path).load()
        with pytest.raises(RunFolderError, match=STATE):
            read_status(tmp_path)


@pytest.mark.parametrize(
    ("kind", "version", "says"),
    [("member state", 1, "not a file of server state"), ("server state", 99, "version")],
)
def test_a_foreign_state_is_refused_by_name(
    kind: str, version: int, says: str, tmp_path: Path
) -> None:
    hall = after_a_round(tmp_path)
    tensors, header = read_state(hall.path)
    hall.path.write_bytes(
        pack_tensors(
            tensors,
            TensorFormat(kind, version),
            {k: header[k] for k in header.keys() - {"format", "version"}},
        )
    )
    with pytest.raises(RunFolderError, match=rf"{STATE}.*{says}"):
        small(tmp_path).load()


def fail_with(number: int, times: int) -> Callable[..., int]:
    """An `os.open` that raises this error so many times where files are written."""
    really, left = os.open, [times]

    def opens(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and STATE in str(path) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return really(path, flags, *rest, **more)

    return opens


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_is_one_sentence_and_loses_nothing(
    number: int, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole = world(rounds=2, patience=0.01), world(rounds=2, where="whole")
    place.serve(place.hall(rounds=1))
    before = place.hall().path.read_bytes()
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fail_with(number, -1))
        with pytest.raises(
            RunFolderError, match=rf"{STATE} cannot be written: {os.strerror(number)}$"
        ):
            place.serve()
    assert place.hall().path.read_bytes() == before, "the file of round 1 is as it was"
    assert [path.name for path in place.hall().path.parent.iterdir()] == [STATE], (
        "nothing half-written"
    )
    assert equal(place.serve().server, whole.serve().server)


def test_a_disk_that_is_full_for_a_while_is_waited_for(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole = world(rounds=1, patience=60.0), world(rounds=1, where="whole")
    place.hall().save()
    waited: list[float] = []
    monkeypatch.setattr("fedproto.deploy.round_protocol.time.sleep", waited.append)
    monkeypatch.setattr(os, "open", fail_with(errno.ENOSPC, 3))
    hall = place.serve()
    assert waited == [0.5, 1, 2] and sum("nothing is lost" in said for said in place.said) == 3
    assert equal(hall.server, whole.serve().server) and place.hall().round == 1


def test_a_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for act in (ServerState.save, lambda hall: hall.alone().__enter__()):
        with pytest.raises(RunFolderError, match="file"):
            act(small(tmp_path / "file" / "state"))


# --- a quorum of answers


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_a_round_with_too_few_answers_is_not_closed(absent: str, world: Any) -> None:
    """Three are there, and two answer in time: the third is asked again, and the answers of the others are kept."""
    place = world(f"fedproto(absent={absent})", rounds=2)
    whole = world(f"fedproto(absent={absent})", rounds=2, where="whole").serve()
    hall = place.hall()
    attempts: list[str] = []

    def late(name: str, round: int) -> bool:
        attempts.append(f"{name}{round}")
        return name != "b" or attempts.count(f"b{round}") > 1

    place.serve(hall, heard=late)
    assert attempts == ["a1", "b1", "c1", "b1", "a2", "b2", "c2", "b2"]
    assert equal(hall.server, whole.server) and hall.round == 2
    assert "round 1: 2 answers counted; b did not answer, and 3 are wanted" in "\n".join(place.said)
    assert "round 1: 3 of 3 answers counted" in place.said


def test_a_round_that_stays_without_a_quorum_ends_the_run_and_can_be_had_again(world: Any) -> None:
    place, whole = world(rounds=2, patience=0.01), world(rounds=2, where="whole")
    place.serve(place.hall(rounds=1))
    with pytest.raises(
        TrainingError, match="round 2: 2 answers counted; b did not answer, and 3 are wanted"
    ):
        place.serve(heard=lambda name, round: name != "b")
    kept = place.hall()
    assert kept.round == 1 and [seat.last_round for seat in kept.seats.values()] == [1, 1, 1]
    assert equal(place.serve().server, whole.serve().server)


def test_answers_that_are_refused_make_no_quorum(world: Any) -> None:
    place = world(rounds=1, patience=0.01)
    with pytest.raises(TrainingError, match="round 1: 2 answers counted, and 3 are wanted"):
        place.serve(
            rewrite=lambda name, reply, round: [WRONG["NaN"](reply) if name == "b" else reply]
        )
    assert place.hall().round == 0 and "finite" in place.hall().seats["b"].reason


def test_who_answered_and_went_away_still_counts(world: Any) -> None:
    """b is late; a, whose answer is here, is gone when b is asked again."""
    place = world(rounds=1)
    asked: list[str] = []

    def late(name: str, round: int) -> bool:
        asked.append(name)
        return name != "b" or asked.count("b") > 1

    hall = place.serve(heard=late, there=lambda name, round: name != "a" or "b" not in asked)
    assert hall.round == 1 and {seat.last_round for seat in hall.seats.values()} == {1}


# --- who holds which name


def test_a_node_without_a_registered_name_takes_nobodys_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 is registered as a; 2 has no name and says that it is a: while a is away, before it came, and after."""
    pytest.importorskip("flwr")
    as_a_task(monkeypatch)
    nodes = {1: ("a", "a"), 2: ("", "a"), 3: ("", "b")}
    hall = small(tmp_path)
    post = flower_post(nodes, hall.registered)
    assert sorted(post.present()) == ["a", "b"] and post.names == {1: "a", 3: "b"}
    del nodes[1]
    assert post.present() == ["b"], "a is away, and its name is not free"
    hall.save()
    restarted = small(tmp_path)
    restarted.load()
    assert flower_post(nodes, restarted.registered).present() == ["b"], (
        "nor after a restart of the server"
    )


def test_a_registered_node_gets_its_name_back_from_one_that_said_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("flwr")
    as_a_task(monkeypatch)
    nodes = {2: ("", "a"), 3: ("", "b")}
    post = flower_post(nodes)
    assert sorted(post.present()) == ["a", "b"]
    nodes[7] = ("a", "a")
    assert sorted(post.present()) == ["a", "b"] and post.names == {3: "b", 7: "a"}
    answers = list(post.exchange("train", {"a": Message({}, {})}, 1))
    assert [name for name, _, _ in answers] == ["a"] and post.names[7] == "a"


def test_a_name_said_twice_stays_with_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    as_a_task(monkeypatch)
    nodes = {5: ("", "a")}
    post = flower_post(nodes)
    post.present()
    nodes.clear()
    nodes.update({1: ("", "a"), 5: ("", "a"), 9: ("", "a")})
    assert post.present() == ["a"] and post.names == {5: "a"}
    twice = flower_post({1: ("a", "a"), 2: ("a", "a")})
    assert twice.present() == ["a"] and twice.names == {1: "a"}


def test_a_name_that_is_not_a_members_gets_no_seat(world: Any) -> None:
    place = world(names="abcd", members="a,b,c", rounds=1)
    hall = place.serve()
    assert set(hall.seats) == set("abc") and hall.round == 1


# --- the list of classes


def speak_of(hall: ServerState, name: str, classes: list[str], number: int = 1) -> None:
    hall.take(name, of_names(classes)(parcel(name, number)), hall.expected(frozenset(name)))


def test_a_newcomer_cannot_fill_the_list_of_classes(tmp_path: Path) -> None:
    """Not in one answer, nor in many rounds; others can still bring theirs."""
    hall = small(tmp_path, new_classes=True, max_classes=10, max_new_classes=4)
    with pytest.raises(Refused, match="brought 5 classes, and 4 are accepted"):
        speak_of(hall, "a", [f"a{place}" for place in range(5)])
    for number in (1, 2):
        speak_of(hall, "a", [f"a{number}", f"A{number}"], number)
        hall.close_round()
    with pytest.raises(Refused, match="brought 5 classes, and 4 are accepted"):
        speak_of(hall, "a", ["a3"], 3)
    speak_of(hall, "a", ["x", "a1"], 3)
    speak_of(hall, "b", ["b1"], 3)
    hall.close_round()
    assert hall.classes == ("x", "y", "z", "a1", "A1", "a2", "A2", "b1")
    hall.save()
    again = small(tmp_path, new_classes=True, max_classes=10, max_new_classes=4)
    again.load()
    with pytest.raises(Refused, match="brought 5 classes"):
        speak_of(again, "a", ["a3"], 4)


def test_the_classes_of_all_answers_of_a_round_count_together(tmp_path: Path) -> None:
    """Each alone would fit; the limit is of the federation. Who brings what another brings, too, brings nothing."""
    hall = small(tmp_path, new_classes=True, max_classes=5)
    speak_of(hall, "a", ["v", "w"])
    with pytest.raises(Refused, match="the federation would have 6 classes, and 5 are accepted"):
        speak_of(hall, "b", ["u"])
    speak_of(hall, "c", ["w", "x"])
    hall.close_round()
    assert hall.classes == ("x", "y", "z", "v", "w") and hall.server["known"].tolist() == [
        1,
        0,
        0,
        1,
        1,
    ]
    assert (hall.seats["a"].brought, hall.seats["c"].brought, hall.seats["b"].refused) == (
        ["v", "w"],
        [],
        1,
    )


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_a_removed_members_classes_go_with_it(absent: str, tmp_path: Path) -> None:
    """z is named in the settings; v has another holder; w was a's alone, and stands before v."""
    hall = small(tmp_path, f"fedproto(absent={absent})", new_classes=True)
    speak_of(hall, "a", ["z", "w", "v"])
    speak_of(hall, "b", ["v", "u"])
    hall.close_round()
    assert hall.classes == ("x", "y", "z", "w", "v", "u")
    hall.save()
    rest = small(tmp_path, f"fedproto(absent={absent})", new_classes=True, members="b,c")
    rest.load()
    sent = Message(
        parcel("b", 2).header | {"spoken": ["v", "u"]}, of_names(["v", "u"])(parcel("b")).arrays
    )
    sent.arrays[SUMS][1] = 5
    rest.take("b", sent, rest.expected(frozenset("b")))
    rest.close_round()
    assert rest.classes == ("x", "y", "z", "v", "u")
    assert rest.server["prototypes"][3:].tolist() == [[1] * 4, [5] * 4]
    assert rest.server["known"].tolist() == [0, 0, float(absent == "drop"), 1, 1]
    assert rest.seats["a"].number == 0 and rest.seats["a"].spoken == [] and "a" not in rest.uploads
    rest.save()
    again = small(tmp_path, f"fedproto(absent={absent})", new_classes=True, members="b,c")
    again.load()
    assert again.classes == rest.classes and equal(again.server, rest.server)


def test_members_go_on_when_another_left_with_its_classes(world: Any) -> None:
    """d alone has 6. When it is struck off, the heads of the others lose that row, and keep the rest."""
    place = world(names="abcd", rounds=2, new_classes=True)
    assert place.serve().classes == tuple("0123456")
    before = MemberCheckpoint.load(file_of(place), place.members["a"].fingerprint())
    hall = place.hall(rounds=4, members="a,b,c")
    place.serve(hall)
    assert hall.classes == tuple("012345") and [hall.seats[name].last_round for name in "abcd"] == [
        4,
        4,
        4,
        2,
    ]
    after = MemberCheckpoint.load(file_of(place), place.members["a"].fingerprint())
    assert before is not None and after is not None and after.classes == tuple("012345")
    assert (rows_of_head(before), rows_of_head(after)) == ({7}, {6})


def rows_of_head(kept: MemberCheckpoint) -> set[int]:
    return {len(value) for name, value in kept.state.items() if name.startswith("head.")}


# --- bounds beside what the others say


def amounts(norm: float = 1.0, count: float = 20.0, classes: str = "xyz") -> Amounts:
    return Amounts(dict.fromkeys(classes, norm), dict.fromkeys(classes, count))


HONEST = {"a": amounts(1.0), "b": amounts(1.2), "c": amounts(0.9)}


def test_the_median_of_the_others_is_what_it_says() -> None:
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


def test_a_norm_beyond_the_others_is_refused_and_nobody_elses() -> None:
    for liar, says in (
        (
            amounts(10.0),
            "the norm of class 'z' is about 10 times the median of the other members', and 5 times",
        ),
        (
            amounts(count=1e7),
            "the count of class 'z' is about 500000 times the median of the other members', and 100",
        ),
    ):
        found = find_outliers(HONEST | {"d": liar}, {}, Limits())
        assert list(found) == ["d"] and found["d"].replace("'x'", "'z'").replace(
            "'y'", "'z'"
        ).startswith(says)


def test_one_class_out_of_three_is_enough() -> None:
    liar = Amounts({"x": 1.0, "y": 30.0, "z": 1.0}, dict.fromkeys("xyz", 20.0))
    assert (
        "norm of class 'y' is about 30 times"
        in find_outliers(HONEST | {"d": liar}, {}, Limits())["d"]
    )


def test_bounds_are_where_they_are_said_to_be() -> None:
    same = {"a": amounts(), "b": amounts()}
    for limits, within, beyond in (
        (Limits(), amounts(5.0, 2000.0), amounts(5.01)),
        (Limits(norm_ratio=2, count_ratio=3), amounts(2.0, 60.0), amounts(1.0, 60.1)),
    ):
        assert find_outliers(same | {"c": within}, {}, limits) == {}
        assert list(find_outliers(same | {"c": beyond}, {}, limits)) == ["c"]


def test_two_members_cannot_judge_each_other() -> None:
    assert find_outliers({"a": amounts(), "b": amounts(1e3, 1e6)}, {}, Limits()) == {}


@pytest.mark.parametrize("tiny", [1e-9, 0.0])
def test_a_liar_with_tiny_numbers_makes_nobody_else_look_odd(tiny: float) -> None:
    liar = amounts(tiny, 1.0, "wxyz")
    assert (
        find_outliers({"a": amounts(), "b": amounts(1.5), "d": liar}, {}, Limits(count_ratio=5))
        == {}
    )


def test_two_liars_go_one_after_the_other() -> None:
    both = {"d": amounts(50.0), "e": amounts(20.0)}
    assert sorted(find_outliers(HONEST | both, {}, Limits())) == ["d", "e"]


def test_who_is_absent_is_a_witness_but_not_judged() -> None:
    assert list(find_outliers({"d": amounts(10.0)}, HONEST, Limits())) == ["d"]
    assert find_outliers(HONEST, {"d": amounts(10.0)}, Limits()) == {}


def test_a_class_of_ones_own_is_judged_beside_the_others_usual_one() -> None:
    alone = Amounts({"x": 1.0, "w": 9.0}, {"x": 20.0, "w": 20.0})
    assert "class 'w'" in find_outliers(HONEST | {"d": alone}, {}, Limits())["d"]
    assert find_outliers(HONEST | {"d": amounts(2.0, 1500.0, "w")}, {}, Limits()) == {}


def test_unbalanced_counts_are_nobodys_lie() -> None:
    """A clinic with 900 images of what is rare elsewhere (two or three), and one with a hundredth of the usual."""
    others = {
        name: Amounts({"x": 1.0, "y": 1.0}, {"x": 400.0, "y": rare})
        for name, rare in (("a", 2.0), ("b", 3.0))
    }
    special = Amounts({"x": 1.0, "y": 1.0}, {"x": 50.0, "y": 900.0})
    poor = Amounts({"x": 1.0, "y": 1.0}, {"x": 3.0, "y": 1.0})
    assert find_outliers(others | {"c": special, "d": poor}, {}, Limits()) == {}


def test_weights_are_judged_as_a_whole_but_for_running_statistics() -> None:
    def member(scale: float, statistics: float = 1.0, count: float = 30.0) -> Amounts:
        sums = {"fc.weight": torch.full((2, 3), scale), "fc.bias": torch.full((2,), scale)}
        sums["bn.running_var"] = torch.full((2,), statistics)
        weighed = {name: value * count for name, value in sums.items()}
        return Amounts.of(Upload(weighed, {"weight": torch.tensor(count)}), [])

    assert member(3.0).norms == {"": pytest.approx(3.0)} and member(3.0).counts == {"": 30.0}
    honest = {"a": member(1.0), "b": member(1.1), "c": member(0.9, 1e3)}
    assert find_outliers(honest, {}, Limits()) == {}
    assert (
        "norm of its weights is about 10 times"
        in find_outliers(honest | {"d": member(10.0)}, {}, Limits())["d"]
    )
    assert (
        "count of its weights"
        in find_outliers(honest | {"d": member(1.0, count=1e7)}, {}, Limits())["d"]
    )


def test_amounts_are_of_means_not_of_sums() -> None:
    upload = Upload(
        {"prototypes": torch.tensor([[6.0, 8.0], [0.0, 5.0]])}, {"weight": torch.tensor([2.0, 5.0])}
    )
    found = Amounts.of(upload, ["x", "y"])
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
    lie: Callable[[Message], Message], world: Any
) -> None:
    """In round 1, where nothing has been seen, and later; the log and the status tell of it."""
    place, silent = (
        world(names="abcd", quorum=3, new_classes=True, rounds=3),
        world(rounds=3, where="silent"),
    )
    hall = place.serve(rewrite=lambda name, reply, round: [lie(reply) if name == "d" else reply])
    assert equal(hall.server, silent.serve().server) and hall.classes == tuple("012345")
    assert (hall.seats["d"].refused, hall.seats["d"].last_round) == (3, 0)
    assert {name: hall.seats[name].refused for name in "abc"} == dict.fromkeys("abc", 0)
    shown = read_status(hall.path)["members"]["d"]
    assert shown["refused"] == 3 and "times the median of the other members'" in shown["reason"]
    assert sum("d was refused: the " in said for said in place.said) == 3


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_a_liar_where_weights_travel_changes_no_bit(algorithm: str, world: Any) -> None:
    def lie(name: str, reply: Message, round: int) -> list[Message]:
        return [times_all(reply) if name == "c" else reply]

    def times_all(reply: Message) -> Message:
        big = {n: v * np.float32(10) for n, v in reply.arrays.items() if n != WEIGHT}
        return Message(reply.header, reply.arrays | big)

    place, silent = (
        world(algorithm, rounds=2, quorum=2),
        world(algorithm, rounds=2, quorum=2, where="silent"),
    )
    hall = place.serve(rewrite=lie)
    assert equal(hall.server, silent.serve(heard=lambda name, round: name != "c").server)
    assert hall.seats["c"].refused == 2 and "norm of its weights" in hall.seats["c"].reason


def test_a_liar_costs_honest_members_nothing(world: Any) -> None:
    """Their accuracy beside one that multiplies its prototypes by ten is what it is without that one."""
    honest = world(rounds=4, quorum=3).serve()
    place = world(names="abcd", quorum=3, new_classes=True, rounds=4, where="liar")
    lied = place.serve(
        rewrite=lambda name, reply, round: [times(10)(reply) if name == "d" else reply]
    )
    for name in "abc":
        assert lied.seats[name].accuracy == honest.seats[name].accuracy


# --- bytes


def ledgers(
    files: dict[str, Any], algorithm: str, models: dict[str, str], rounds: int
) -> list[list[list[int]]]:
    """The simulator's ledger after each round: for each client values and bytes up, values and bytes down."""
    data = [files["arrays"][name] for name in "abc"]
    options = {"rounds": rounds, "dim": DIM, "engine": "reference"}
    experiment, _ = _begin(
        algorithm, data, ",".join(f"{models[name]}*1" for name in "abc"), None, options
    )
    steps = proceed([experiment], [None], threading.Event())
    found = [experiment.progress.ledger.counts.tolist() for _ in steps]
    return found[:rounds]


@pytest.mark.parametrize(
    "algorithm", ["fedproto", "fedproto(weighting=eq6,absent=drop)", "fedavg", "fedrep"]
)
def test_a_deployed_round_carries_the_bytes_of_the_ledger(
    algorithm: str, world: Any, files: dict[str, Any]
) -> None:
    """To the byte, for each member in each round; headers and the last measurement are counted apart."""
    expected = ledgers(files, algorithm, EQUAL if algorithm in WEIGHTS else MIXED, 3)
    place = world(algorithm)
    hall = place.hall(rounds=3)
    post = Transport(place.members, hall)
    serve(hall, post, place.said.append)
    seats = hall.seats.values()
    assert [[seat.bytes_up, seat.bytes_down] for seat in seats] == [
        [row[1], row[3]] for row in expected[-1]
    ]
    for number in (1, 2, 3):
        sent = dict(post.invitations[3 * number - 3 : 3 * number])
        before = expected[number - 2] if number > 1 else [[0] * 4] * 3
        down = [
            after[3] - earlier[3]
            for after, earlier in zip(expected[number - 1], before, strict=True)
        ]
        assert [len(sent[name].payload()) for name in "abc"] == down, f"round {number}"
    assert all(seat.beside_up > 0 and seat.beside_down > 0 for seat in seats)
    shown = read_status(hall.path)["members"]["a"]
    assert (
        shown["bytes_up"] == expected[-1][0][1] and shown["beside_up"] == hall.seats["a"].beside_up
    )


def test_a_member_is_sent_the_prototypes_of_its_own_classes(world: Any) -> None:
    """But all of them to measure by at the end, and when it comes for the first time: its classes are not known yet."""
    place = world(names="abcd", rounds=3, new_classes=True)
    hall = place.hall()
    post = Transport(place.members, hall, there=lambda name, round: name != "d" or round > 1)
    serve(hall, post, place.said.append)
    known = {
        (name, parcel.header["round"]): parcel.header["known"] for name, parcel in post.invitations
    }
    assert (
        known["a", 1] == []
        and known["a", 2] == ["0", "1", "2"]
        and known["b", 3] == ["2", "3", "4"]
    )
    assert known["d", 2] == list("012345") and known["d", 3] == ["1", "6"]
    assert known["a", 4] == list("0123456"), "to measure over all classes"
    assert set(hall.seats["a"].accuracy) == {"head", "head_own", "prototype", "prototype_own"}


def test_flowers_record_carries_the_very_bytes_of_the_codec(world: Any) -> None:
    pytest.importorskip("flwr")
    from fedproto.deploy.flower_transport import to_record

    place = world(rounds=1)
    hall = place.hall()
    reply = answer(hall.invite("a"), place.members["a"])
    record = to_record(reply).array_records["arrays"]
    assert list(record) == ["payload"] and record["payload"].data == reply.payload()
    upload = over(to_upload(reply), reply.header["spoken"], hall.classes)
    assert reply.payload() == codec.encode_upload(upload)
    assert not to_record(hall.invite("a")).array_records["arrays"], (
        "nothing is known, and nothing is sent"
    )


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 40))
def test_numpy_and_torch_write_the_same_message(speaks: list[bool], dim: int) -> None:
    weight = torch.tensor([3.0 if each else 0.0 for each in speaks])
    upload = Upload(
        {"prototypes": torch.randn(len(speaks), dim)}, {"weight": weight, "holders": weight}
    )
    sent = of_upload(upload, tuple(map(str, range(len(speaks)))))
    assert sent.payload() == codec.encode_upload(upload)
    back = codec.decode(sent.payload())
    assert set(back) == set(sent.arrays)
    assert all(np.array_equal(back[name], value) for name, value in sent.arrays.items())
