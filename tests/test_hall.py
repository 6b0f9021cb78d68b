"""What the server keeps and whom it believes, in federations that lie, crowd, leave or run out of disk."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_deploy import (
    SUMS,
    WRONG,
    after_a_round,
    as_a_task,
    equal,
    file_of,
    files,
    flower_post,
    of_names,
    parcel,
    small,
    world,
)

from fedproto.deploy.hall import STATE, Hall, read_state
from fedproto.deploy.member import Kept
from fedproto.deploy.parcels import Parcel
from fedproto.deploy.status import read_status
from fedproto.errors import Refused, RunFolderError, TrainingError
from fedproto.files import pack_tensors

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
    ("kind", "version", "says"), [("member state", 1, "not a file of server state"), ("server state", 99, "version")]
)
def test_a_foreign_state_is_refused_by_name(kind: str, version: int, says: str, tmp_path: Path) -> None:
    hall = after_a_round(tmp_path)
    tensors, header = read_state(hall.path)
    hall.path.write_bytes(
        pack_tensors(tensors, kind, version, {k: header[k] for k in header.keys() - {"format", "version"}})
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
        with pytest.raises(RunFolderError, match=rf"{STATE} cannot be written: {os.strerror(number)}$"):
            place.serve()
    assert place.hall().path.read_bytes() == before, "the file of round 1 is as it was"
    assert [path.name for path in place.hall().path.parent.iterdir()] == [STATE], "nothing half-written"
    assert equal(place.serve().server, whole.serve().server)


def test_a_disk_that_is_full_for_a_while_is_waited_for(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place, whole = world(rounds=1, patience=60.0), world(rounds=1, where="whole")
    place.hall().save()
    waited: list[float] = []
    monkeypatch.setattr("fedproto.deploy.rounds.time.sleep", waited.append)
    monkeypatch.setattr(os, "open", fail_with(errno.ENOSPC, 3))
    hall = place.serve()
    assert waited == [0.5, 1, 2] and sum("nothing is lost" in said for said in place.said) == 3
    assert equal(hall.server, whole.serve().server) and place.hall().round == 1


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for act in (Hall.save, lambda hall: hall.alone().__enter__()):
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
    with pytest.raises(TrainingError, match="round 2: 2 answers counted; b did not answer, and 3 are wanted"):
        place.serve(heard=lambda name, round: name != "b")
    kept = place.hall()
    assert kept.round == 1 and [seat.last_round for seat in kept.seats.values()] == [1, 1, 1]
    assert equal(place.serve().server, whole.serve().server)


def test_answers_that_are_refused_make_no_quorum(world: Any) -> None:
    place = world(rounds=1, patience=0.01)
    with pytest.raises(TrainingError, match="round 1: 2 answers counted, and 3 are wanted"):
        place.serve(rewrite=lambda name, reply, round: [WRONG["NaN"](reply) if name == "b" else reply])
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


def test_a_node_without_a_registered_name_takes_nobodys_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert flower_post(nodes, restarted.registered).present() == ["b"], "nor after a restart of the server"


def test_a_registered_node_gets_its_name_back_from_one_that_said_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    as_a_task(monkeypatch)
    nodes = {2: ("", "a"), 3: ("", "b")}
    post = flower_post(nodes)
    assert sorted(post.present()) == ["a", "b"]
    nodes[7] = ("a", "a")
    assert sorted(post.present()) == ["a", "b"] and post.names == {3: "b", 7: "a"}
    answers = list(post.exchange("train", {"a": Parcel({}, {})}, 1))
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


def speak_of(hall: Hall, name: str, classes: list[str], number: int = 1) -> None:
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
    assert hall.classes == ("x", "y", "z", "v", "w") and hall.server["known"].tolist() == [1, 0, 0, 1, 1]
    assert (hall.seats["a"].brought, hall.seats["c"].brought, hall.seats["b"].refused) == (["v", "w"], [], 1)


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
    sent = Parcel(parcel("b", 2).header | {"spoken": ["v", "u"]}, of_names(["v", "u"])(parcel("b")).arrays)
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
    before = Kept.load(file_of(place), place.members["a"].fingerprint())
    hall = place.hall(rounds=4, members="a,b,c")
    place.serve(hall)
    assert hall.classes == tuple("012345") and [hall.seats[name].last_round for name in "abcd"] == [4, 4, 4, 2]
    after = Kept.load(file_of(place), place.members["a"].fingerprint())
    assert before is not None and after is not None and after.classes == tuple("012345")
    assert (rows_of_head(before), rows_of_head(after)) == ({7}, {6})


def rows_of_head(kept: Kept) -> set[int]:
    return {len(value) for name, value in kept.state.items() if name.startswith("head.")}
