"""What the server keeps: its file, its members, its list of classes."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.deployment import (
    DAMAGES,
    SUMS,
    LocalTransport,
    accept_classes,
    damage_file,
    make_reply,
    small_state,
    state_after_a_round,
    state_file_of,
    trees_equal,
    with_classes,
)

from fedproto.core.files import TensorFormat, pack_tensors, write_tensors
from fedproto.core.tensors import stack_uploads
from fedproto.deploy import round_protocol
from fedproto.deploy.member import train_round
from fedproto.deploy.member_checkpoint import MemberCheckpoint
from fedproto.deploy.member_record import MemberRecord
from fedproto.deploy.messages import (
    Message,
)
from fedproto.deploy.server_state import (
    STATE_FILE,
    STATE_FORMAT,
    ServerState,
    read_state,
)
from fedproto.deploy.status import read_status
from fedproto.errors import ConfigError, FedProtoError, Refused, RunFolderError


def test_only_its_owner_can_read_the_state(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "new" / "state")
    assert state.path.stat().st_mode & 0o777 == 0o600
    assert state.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_state_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path)
    content = state.path.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        state.path.write_bytes(changed)
        with pytest.raises(RunFolderError, match=STATE_FILE):
            small_state(tmp_path).load()
        with pytest.raises(RunFolderError, match=STATE_FILE):
            read_status(tmp_path)


@pytest.mark.parametrize(
    ("kind", "version", "says"),
    [("member state", 1, "not a file of server state"), ("server state", 99, "version")],
)
def test_a_state_of_another_format_or_version_is_refused(
    kind: str, version: int, says: str, tmp_path: Path
) -> None:
    state = state_after_a_round(tmp_path)
    tensors, header = read_state(state.path)
    state.path.write_bytes(
        pack_tensors(
            tensors,
            TensorFormat(kind, version),
            {k: header[k] for k in header.keys() - {"format", "version"}},
        )
    )
    with pytest.raises(RunFolderError, match=rf"{STATE_FILE}.*{says}"):
        small_state(tmp_path).load()


def fail_with(number: int, times: int) -> Callable[..., int]:
    """An `os.open` that raises this error so many times where files are written."""
    really, left = os.open, [times]

    def opens(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and STATE_FILE in str(path) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return really(path, flags, *rest, **more)

    return opens


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, *(pytest.param(n, marks=pytest.mark.slow) for n in (errno.EROFS, errno.EACCES))],
)
def test_an_unwritable_disk_gives_one_sentence_and_loses_nothing(
    number: int, make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, whole = (
        make_deployment(rounds=2, patience=0.01),
        make_deployment(rounds=2, where="whole"),
    )
    deployment.serve(deployment.state(rounds=1))
    before = deployment.state().path.read_bytes()
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fail_with(number, -1))
        with pytest.raises(
            RunFolderError, match=rf"{STATE_FILE} cannot be written: {os.strerror(number)}$"
        ):
            deployment.serve()
    assert deployment.state().path.read_bytes() == before, "the file of round 1 is as it was"
    assert [path.name for path in deployment.state().path.parent.iterdir()] == [STATE_FILE], (
        "nothing half-written"
    )
    assert trees_equal(deployment.serve().server, whole.serve().server)


def test_the_server_waits_for_a_full_disk(
    make_deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, whole = (
        make_deployment(rounds=1, patience=60.0),
        make_deployment(rounds=1, where="whole"),
    )
    deployment.state().save()
    waited: list[float] = []
    monkeypatch.setattr("fedproto.deploy.round_protocol.time.sleep", waited.append)
    monkeypatch.setattr(os, "open", fail_with(errno.ENOSPC, 3))
    state = deployment.serve()
    assert waited == [0.5, 1, 2] and sum("nothing is lost" in said for said in deployment.said) == 3
    assert trees_equal(state.server, whole.serve().server) and deployment.state().round == 1


def test_a_folder_that_cannot_be_created_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for act in (ServerState.save, lambda state: state.hold_folder().__enter__()):
        with pytest.raises(RunFolderError, match="file"):
            act(small_state(tmp_path / "file" / "state"))


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedproto",
        "fedproto(weighting=eq6,absent=drop)",
        pytest.param("fedavg", marks=pytest.mark.slow),
        "fedrep",
    ],
)
def test_a_server_restarted_after_every_round_gives_the_same_state(
    algorithm: str, make_deployment: Any
) -> None:
    deployment, whole = (
        make_deployment(algorithm, rounds=3),
        make_deployment(algorithm, rounds=3, where="whole"),
    )
    for number in (1, 2, 3):
        state = deployment.serve(deployment.state(rounds=number))
        again = deployment.state()
        assert (
            trees_equal(state.server, again.server)
            and state.classes == again.classes
            and state.round == again.round
        )
        assert state.members == again.members
        if not state.algorithm.remembers:
            assert again.members_with_upload() == [], "uploads that are not needed are not saved"
            continue
        assert trees_equal(state.uploads.export(), again.uploads.export())
    uninterrupted = whole.serve()
    assert trees_equal(again.server, uninterrupted.server)
    assert {n: s.accuracy for n, s in again.members.items()} == {
        n: s.accuracy for n, s in uninterrupted.members.items()
    }


@pytest.mark.parametrize("killed_after", ["b", "c"])
def test_a_server_killed_before_saving_the_replies_requests_them_again(
    killed_after: str, make_deployment: Any
) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str, round: int) -> None:
        if (name, round) == (killed_after, 2):
            raise Killed

    deployment, whole = make_deployment(rounds=3), make_deployment(rounds=3, where="whole")
    with pytest.raises(Killed):
        deployment.serve(after=kill)
    assert deployment.state().round == 1
    trained = [name for name in "abc" if name <= killed_after]
    before = {
        name: (
            state_file_of(deployment, name).read_bytes(),
            state_file_of(deployment, name).stat().st_mtime_ns,
        )
        for name in trained
    }
    state, transport = deployment.state(), LocalTransport(deployment.members, deployment.state())
    round_protocol._run_round(state, transport, deployment.said.append)
    for name, found in before.items():
        assert (
            state_file_of(deployment, name).read_bytes(),
            state_file_of(deployment, name).stat().st_mtime_ns,
        ) == found
    state = deployment.serve()
    assert state.round == 3 and trees_equal(state.server, whole.serve().server)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_state_of_the_server_is_refused(how: str, tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path)
    damage_file(state.path, how)
    with pytest.raises(FedProtoError, match=STATE_FILE):
        small_state(tmp_path).load()


def test_a_state_with_unknown_member_fields_is_refused(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path)
    tensors, header = read_state(state.path)
    write_tensors(state.path, tensors, STATE_FORMAT, header | {"members": {"a": {"nonsense": 1}}})
    with pytest.raises(FedProtoError, match=f"{STATE_FILE} is corrupted"):
        small_state(tmp_path).load()


def test_a_state_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    state_after_a_round(tmp_path)
    for other in ("fedproto(lam=0.5)", "fedproto(absent=drop)"):
        with pytest.raises(RunFolderError, match="name another state"):
            small_state(tmp_path, other).load()


def test_a_state_with_prototypes_of_another_size_is_refused(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path)
    with pytest.raises(FedProtoError, match=STATE_FILE):
        ServerState(state.settings, replace(state.terms, dim=5)).load()


@pytest.mark.parametrize(
    "change", [{"model": "mlp(hidden=9)"}, {"classes": "0,1,2,3,4,5,6"}, {"shape": "1,9,9"}]
)
def test_a_state_of_another_architecture_is_refused(
    change: dict[str, Any], make_deployment: Any
) -> None:
    make_deployment("fedavg", rounds=1).serve()
    with pytest.raises(FedProtoError, match=STATE_FILE):
        make_deployment("fedavg", rounds=2, **change).state()


def test_a_class_can_be_added_to_existing_prototypes(make_deployment: Any) -> None:
    make_deployment(rounds=1).serve()
    state = make_deployment(rounds=2, names="abcd", classes="6,0,1,2,3,4,5").serve()
    assert state.classes == tuple("0123456") and state.server["known"].all()


def test_a_newcomer_cannot_fill_the_list_of_classes(tmp_path: Path) -> None:
    """Not in one answer, nor in many rounds; others can still bring theirs."""
    state = small_state(tmp_path, new_classes=True, max_classes=10, max_new_classes=4)
    with pytest.raises(Refused, match="brought 5 classes; at most 4 are accepted"):
        accept_classes(state, "a", [f"a{place}" for place in range(5)])
    for number in (1, 2):
        accept_classes(state, "a", [f"a{number}", f"A{number}"], number)
        state.close_round()
    with pytest.raises(Refused, match="brought 5 classes; at most 4 are accepted"):
        accept_classes(state, "a", ["a3"], 3)
    accept_classes(state, "a", ["x", "a1"], 3)
    accept_classes(state, "b", ["b1"], 3)
    state.close_round()
    assert state.classes == ("x", "y", "z", "a1", "A1", "a2", "A2", "b1")
    state.save()
    again = small_state(tmp_path, new_classes=True, max_classes=10, max_new_classes=4)
    again.load()
    with pytest.raises(Refused, match="brought 5 classes"):
        accept_classes(again, "a", ["a3"], 4)


def test_new_classes_of_all_replies_of_a_round_count_together(tmp_path: Path) -> None:
    """The limit is the federation's; a class that two members bring counts once, for the first."""
    state = small_state(tmp_path, new_classes=True, max_classes=5)
    accept_classes(state, "a", ["v", "w"])
    with pytest.raises(
        Refused, match="the federation would have 6 classes; at most 5 are accepted"
    ):
        accept_classes(state, "b", ["u"])
    accept_classes(state, "c", ["w", "x"])
    state.close_round()
    assert state.classes == ("x", "y", "z", "v", "w") and state.server["known"].tolist() == [
        1,
        0,
        0,
        1,
        1,
    ]
    assert (state.members["a"].brought, state.members["c"].brought, state.members["b"].refused) == (
        ["v", "w"],
        [],
        1,
    )


@pytest.mark.parametrize("absent", ["remember", "drop"])
def test_the_classes_of_a_removed_member_are_removed(absent: str, tmp_path: Path) -> None:
    """z is named in the settings; v has another holder; w was a's alone, and stands before v."""
    state = small_state(tmp_path, f"fedproto(absent={absent})", new_classes=True)
    accept_classes(state, "a", ["z", "w", "v"])
    accept_classes(state, "b", ["v", "u"])
    state.close_round()
    assert state.classes == ("x", "y", "z", "w", "v", "u")
    state.save()
    rest = small_state(tmp_path, f"fedproto(absent={absent})", new_classes=True, members="b,c")
    rest.load()
    sent = Message(
        make_reply("b", 2).header | {"spoken": ["v", "u"]},
        with_classes(["v", "u"])(make_reply("b")).arrays,
    )
    sent.arrays[SUMS][1] = 5
    rest.accept_reply("b", sent, rest.expect_replies(frozenset("b")))
    rest.close_round()
    assert rest.classes == ("x", "y", "z", "v", "u")
    assert rest.server["prototypes"][3:].tolist() == [[1] * 4, [5] * 4]
    assert rest.server["known"].tolist() == [0, 0, float(absent == "drop"), 1, 1]
    assert (
        rest.members["a"].number == 0
        and rest.members["a"].spoken == []
        and rest.members_with_upload() == ["b"]
    )
    rest.save()
    again = small_state(tmp_path, f"fedproto(absent={absent})", new_classes=True, members="b,c")
    again.load()
    assert again.classes == rest.classes and trees_equal(again.server, rest.server)


def test_members_continue_after_another_left_with_its_classes(make_deployment: Any) -> None:
    """Only d has class 6. When d is removed, the heads of the others lose that row only."""
    deployment = make_deployment(names="abcd", rounds=2, new_classes=True)
    assert deployment.serve().classes == tuple("0123456")
    before = MemberCheckpoint.load(deployment.members["a"])
    state = deployment.state(rounds=4, members="a,b,c")
    deployment.serve(state)
    assert state.classes == tuple("012345") and [
        state.members[name].last_round for name in "abcd"
    ] == [
        4,
        4,
        4,
        2,
    ]
    after = MemberCheckpoint.load(deployment.members["a"])
    assert before is not None and after is not None and after.classes == tuple("012345")
    assert (rows_of_head(before), rows_of_head(after)) == ({7}, {6})


def rows_of_head(kept: MemberCheckpoint) -> set[int]:
    return {len(value) for name, value in kept.state.items() if name.startswith("head.")}


def test_a_member_record_can_be_written_as_json() -> None:
    """So that it is one object in the state's metadata."""
    assert MemberRecord(**json.loads(json.dumps(vars(MemberRecord(3))))) == MemberRecord(3)


def test_two_runs_cannot_use_one_state(make_deployment: Any) -> None:
    deployment = make_deployment(patience=0.01)
    first, second = deployment.state(), deployment.state()
    with (
        first.hold_folder(),
        pytest.raises(RunFolderError, match=f"in use by process {os.getpid()} on "),
        second.hold_folder(),
    ):
        pass
    with second.hold_folder():
        pass


@pytest.mark.parametrize("weighting", ["samples", "uniform", "eq6"])
def test_a_removed_member_leaves_exactly(make_deployment: Any, weighting: str) -> None:
    """The prototypes are those of the remaining uploads; a class without holders has none."""
    deployment = make_deployment(f"fedproto(weighting={weighting})", rounds=2, quorum=2)
    of_c = set(deployment.serve().members["c"].spoken)
    state = deployment.state(rounds=3, members="a, b")
    deployment.serve(state)
    rest = [state.upload_of(name) for name in "ab"]
    before = {
        "prototypes": torch.zeros_like(state.server["prototypes"]),
        "known": torch.zeros(len(state.classes)),
    }
    assert trees_equal(state.server, state.algorithm.aggregate(before, stack_uploads(rest)))
    alone = of_c - {name for each in "ab" for name in state.members[each].spoken}
    assert alone and all(state.server["known"][state.classes.index(name)] == 0 for name in alone)


def test_a_limit_below_every_reply_is_refused_before_anything_starts(make_deployment: Any) -> None:
    """SCAFFOLD sends two models, so a limit may fit FedAvg and not SCAFFOLD."""
    reply = make_deployment("scaffold", rounds=1)
    request = reply.state().make_request("a")
    arrays = train_round(request, reply.members["a"]).arrays.values()
    size = sum(array.nbytes for array in arrays)
    make_deployment("scaffold", max_bytes=size).state()
    make_deployment("fedavg", max_bytes=size - 1, where="fedavg").state()
    message = rf"^a reply of scaffold has at least {size} bytes, but max-bytes is {size - 1}"
    with pytest.raises(ConfigError, match=message):
        make_deployment("scaffold", max_bytes=size - 1).state()
