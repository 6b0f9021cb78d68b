"""Drills: a server is restored from a backup, or rebuilt of what its members bring back."""

import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.deployment import (
    DIM,
    MIXED,
    Deployment,
    LocalTransport,
    clone_tree,
    damage_file,
    serve_to,
    state_after_a_round,
    state_file_of,
    trees_equal,
    without_changes,
)

from fedproto.core.files import hold_lock, read_tensors, write_tensors
from fedproto.core.tensors import flatten_state
from fedproto.deploy.contributions import FORMAT, read_contribution, write_contribution
from fedproto.deploy.member import train_round
from fedproto.deploy.member_checkpoint import MemberCheckpoint
from fedproto.deploy.messages import Message
from fedproto.deploy.rebuilding import rebuild_state
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.server_backup import back_up_server, restore_server
from fedproto.deploy.server_state import read_state
from fedproto.deploy.status import read_status
from fedproto.errors import ConfigError, Refused, RunFolderError, ServerBehind, TrainingError
from fedproto.runs.api import _begin
from fedproto.runs.execution import proceed

SECURE = "secure-sum(error=1e-9,largest=1e5)"


def lose_after_backup(deployment: Deployment, backed_up: int, lost: int) -> Path:
    """Back a federation up after one round, and lose the server's disk after a later one."""
    state = serve_to(deployment, backed_up)
    backup = back_up_server(state.path, deployment.folder / "backups")
    serve_to(deployment, lost)
    shutil.rmtree(state.path.parent)
    return backup.path


# --- the drill


def replay_with_a_loss(
    member_files: dict[str, Any], backed_up: int, lost: int, rounds: int
) -> list[Any]:
    """The simulator's server after each round, if it is set back once to an earlier round."""
    data = [member_files["arrays"][name] for name in "abc"]
    models = ",".join(f"{MIXED[name]}*1" for name in "abc")
    options = {"rounds": rounds, "dim": DIM, "engine": "reference"}
    experiment, _ = _begin("fedproto", data, models, None, options)
    progress = experiment.progress
    servers = []
    for _ in proceed([experiment], [None], threading.Event()):
        if progress.round == backed_up:
            kept = (clone_tree(progress.server), progress.latest_uploads.copy())
        if progress.round == lost and len(servers) == lost - 1:
            progress.server, progress.latest_uploads = kept
        servers.append(clone_tree(progress.server))
    return servers[:rounds]


def test_a_restored_server_goes_on_as_a_replay_of_who_was_counted(
    make_deployment: Any, member_files: dict[str, Any]
) -> None:
    """Rounds 4 and 5 are trained, then lost; rounds 6 to 8 start from what the backup has."""
    deployment = make_deployment()
    backup = lose_after_backup(deployment, backed_up=3, lost=5)
    restored = restore_server(backup, deployment.folder / "server")
    assert (restored.round, restored.backup_round, restored.kept) == (3, 3, None)
    state = serve_to(deployment, 8)
    servers = replay_with_a_loss(member_files, 3, 5, 8)
    assert state.round == 8
    assert trees_equal(flatten_state(state.server), flatten_state(servers[-1]))
    assert not trees_equal(flatten_state(servers[4]), flatten_state(servers[5]))
    for name in "abc":
        saved = MemberCheckpoint.load(deployment.members[name])
        assert saved is not None and saved.round == 8
    events = [(event["event"], event["round"]) for event in without_changes(state.history)]
    assert events == [("restored", 3), ("passed over", 5)]
    assert (
        "rounds 4 to 5, which a, b, c had trained before"
        in without_changes(state.history)[1]["what"]
    )


@pytest.mark.parametrize("combiner", [SECURE])
def test_a_restored_server_of_secure_sums_adds_no_round_twice(
    combiner: str, make_deployment: Any
) -> None:
    deployment = make_deployment("fedproto(absent=drop)", combiner=combiner)
    backup = lose_after_backup(deployment, backed_up=1, lost=2)
    restore_server(backup, deployment.folder / "server")
    transport_rounds: list[int] = []
    state = deployment.state(rounds=3)
    transport = LocalTransport(deployment.members, state)
    serve(state, transport, deployment.said.append)
    for _, request in transport.invitations:
        if request.header.get("secure_sum", {}).get("stage") == "unmasking":
            transport_rounds.append(request.header["round"])
    assert set(transport_rounds) == {3}
    assert [event["event"] for event in without_changes(state.history)] == [
        "restored",
        "passed over",
    ]


def test_members_that_were_absent_need_no_rounds_passed_over(make_deployment: Any) -> None:
    """a trained rounds 3 and 4 alone. The others are a quorum, and a waits for them."""
    deployment = make_deployment(quorum=2)
    state = serve_to(deployment, 2)
    backup = back_up_server(state.path, deployment.folder / "backups").path
    ahead = deployment.state(rounds=4, quorum=1)
    deployment.serve(ahead, there=lambda name, round: name == "a")
    shutil.rmtree(state.path.parent)
    restore_server(backup, state.path.parent)
    state = serve_to(deployment, 5)
    assert [event["event"] for event in without_changes(state.history)] == ["restored"]
    assert {name: member.last_round for name, member in state.members.items()} == {
        "a": 5,
        "b": 5,
        "c": 5,
    }
    assert state.members["a"].failed == 1  # in round 3; round 4 is answered from its file


def test_as_few_rounds_are_passed_over_as_a_quorum_needs(make_deployment: Any) -> None:
    """One member lies about its last round; the others decide."""
    deployment = make_deployment(quorum=2)
    backup = lose_after_backup(deployment, backed_up=1, lost=3)
    restore_server(backup, deployment.folder / "server")

    def exaggerate(name: str, reply: Message, round: int) -> list[Message]:
        if name == "c" and "trained" in reply.header:
            return [Message(reply.header | {"trained": 5}, {})]
        return [reply]

    state = serve_to(deployment, 5, rewrite=exaggerate)
    assert without_changes(state.history)[1]["round"] == 3
    assert "a, b had trained" in without_changes(state.history)[1]["what"]


@pytest.mark.parametrize("claim", [2**31, 9, "5", True, None, -1])
def test_a_claim_that_cannot_be_true_is_not_believed(claim: Any, tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path)
    state.settings = replace(state.settings, rounds=8)
    header = {"error": "server-behind", "trained": claim}
    assert "later round" in state.note_failure("a", header)
    assert state.later_rounds == {}
    state.note_failure("a", {"error": "data-unusable", "trained": 5})
    assert state.later_rounds == {}
    state.note_failure("a", header | {"trained": 8})
    assert state.later_rounds == {"a": 8}


def test_a_state_that_nobody_restored_does_not_pass_over_rounds(make_deployment: Any) -> None:
    """It ends with a sentence that says how to enter that it was restored; then it goes on."""
    deployment = make_deployment()
    state = serve_to(deployment, 1)
    old = state.path.read_bytes()
    serve_to(deployment, 3)
    state.path.write_bytes(old)
    with pytest.raises(TrainingError, match=r"up to round 3.*`fedproto deploy restore .*safetens"):
        deployment.serve(deployment.state(rounds=4, patience=0.1))
    assert deployment.state().round == 1
    restored = restore_server(state.path, state.path.parent)
    assert (restored.kept, restored.round) == (None, 1)
    state = serve_to(deployment, 4)
    assert [member.last_round for member in state.members.values()] == [4, 4, 4]


def test_no_member_goes_back(make_deployment: Any) -> None:
    """Whatever a server claims: only a later round is trained."""
    deployment = make_deployment()
    backup = lose_after_backup(deployment, backed_up=1, lost=2)
    restore_server(backup, deployment.folder / "server")
    state = deployment.state(rounds=3)
    before = state_file_of(deployment).read_bytes()
    request = state.make_request("a")
    request.header["restored"] = True
    request.header["round"] = 1
    with pytest.raises(ServerBehind, match="was the server or this member restored") as caught:
        train_round(request, deployment.members["a"])
    assert caught.value.trained == 2
    assert state_file_of(deployment).read_bytes() == before


# --- backups


def test_a_backup_is_checked_private_and_never_overwritten(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "server")
    first = back_up_server(tmp_path, tmp_path / "backups")
    assert first.is_new and first.path.read_bytes() == state.path.read_bytes()
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    again = back_up_server(state.path, tmp_path / "backups")
    assert again == first._replace(is_new=False)
    state.registered = {"a"}
    state.save()
    other = back_up_server(state.path, tmp_path / "backups")
    assert other.is_new and other.path != first.path and other.round == first.round
    assert sorted(path.name for path in (tmp_path / "backups").iterdir()) == sorted(
        [first.path.name, other.path.name]
    )
    other.path.write_bytes(b"something else")
    with pytest.raises(RunFolderError, match="exists with other contents"):
        back_up_server(state.path, tmp_path / "backups")
    status = read_status(tmp_path)
    assert status["backup"]["round"] == 1 and status["backup"]["to"] == str(other.path)


def test_a_server_can_be_backed_up_while_it_runs(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "server")
    with state.hold_folder():
        assert back_up_server(state.path, tmp_path / "backups").is_new


@pytest.mark.parametrize("how", ["cut off", "empty", "text"])
def test_damaged_states_are_neither_backed_up_nor_restored(how: str, tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "server")
    backup = back_up_server(state.path, tmp_path / "backups").path
    damage_file(backup, how)
    with pytest.raises(RunFolderError, match=backup.name):
        restore_server(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    damage_file(state.path, how)
    with pytest.raises(RunFolderError):
        back_up_server(state.path, tmp_path / "others")
    assert list((tmp_path / "others").iterdir()) == []


def test_a_state_is_replaced_only_on_request_and_kept(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "server")
    backup = back_up_server(state.path, tmp_path / "backups").path
    state.round = 4
    state.registered = {"a"}
    state.save()
    newer = state.path.read_bytes()
    with pytest.raises(RunFolderError, match="--replace"):
        restore_server(backup, tmp_path / "server")
    assert state.path.read_bytes() == newer
    restored = restore_server(backup, tmp_path / "server", replace=True)
    assert restored.kept is not None and restored.kept.read_bytes() == newer
    assert (restored.round, restored.backup_round) == (4, 1)
    _, header = read_state(state.path)
    assert (header["round"], header["registered"]) == (4, ["a"])
    tensors, _ = read_state(state.path)
    assert trees_equal(tensors, read_state(backup)[0])


def test_a_damaged_state_can_be_replaced_and_another_federation_cannot(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "server")
    backup = back_up_server(state.path, tmp_path / "backups").path
    damage_file(state.path, "cut off")
    assert restore_server(backup, state.path.parent, replace=True).round == 1
    other = state_after_a_round(tmp_path / "other")
    with pytest.raises(RunFolderError, match="another federation"):
        restore_server(backup, other.path.parent, replace=True)


def test_a_running_server_is_not_restored(tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "server")
    backup = back_up_server(state.path, tmp_path / "backups").path
    with hold_lock(state.path.parent), pytest.raises(RunFolderError, match="is in use by process"):
        restore_server(backup, state.path.parent, replace=True)


@pytest.mark.parametrize("last_round", [0, 2**31 - 1])
def test_a_last_round_that_cannot_be_is_refused(last_round: int, tmp_path: Path) -> None:
    state = state_after_a_round(tmp_path / "server")
    backup = back_up_server(state.path, tmp_path / "backups").path
    with pytest.raises(ConfigError, match="numbers from 1"):
        restore_server(backup, tmp_path / "new", last_round=last_round)
    assert not (tmp_path / "new" / state.path.name).exists()
    assert restore_server(backup, tmp_path / "new", last_round=7).round == 7


# --- no backup


def collect_contributions(deployment: Deployment, names: str = "abc") -> list[Any]:
    folder = deployment.folder / "brought"
    return [
        read_contribution(write_contribution(deployment.members[name], folder)) for name in names
    ]


def test_members_bring_back_what_a_server_without_a_backup_had(make_deployment: Any) -> None:
    """b was absent in the last round: its upload of the one before counts, as it did."""
    deployment = make_deployment(quorum=2)
    deployment.options = {}
    state = serve_to(deployment, 2)
    state = serve_to(deployment, 3, there=lambda name, round: name != "b" or round < 3)
    tensors, header = read_state(state.path)
    shutil.rmtree(state.path.parent)
    rebuilt = rebuild_state(
        deployment.settings, deployment.terms, collect_contributions(deployment)
    )
    again, new_header = read_state(state.path)
    assert trees_equal(again, tensors)
    for key in ("id", "round", "classes", "algorithm"):
        assert new_header[key] == header[key]
    for name, member in header["members"].items():
        for key in ("number", "last_round", "spoken"):
            assert new_header["members"][name][key] == member[key]
    assert [event["event"] for event in without_changes(rebuilt.history)] == ["rebuilt"]
    assert serve_to(deployment, 4).round == 4


def test_a_member_that_brings_nothing_gets_a_number_that_nobody_had(make_deployment: Any) -> None:
    deployment = make_deployment(quorum=2)
    shutil.rmtree(serve_to(deployment, 1).path.parent)
    brought = collect_contributions(deployment, "ac")
    rebuild_state(deployment.settings, deployment.terms, brought)
    state = serve_to(deployment, 2)
    assert {name: member.number for name, member in state.members.items()} == {
        "a": 0,
        "c": 2,
        "b": 3,
    }
    assert all(member.last_round == 2 for member in state.members.values())


def test_of_secure_sums_members_bring_only_what_the_server_had_sent(make_deployment: Any) -> None:
    deployment = make_deployment("fedproto(absent=drop)", combiner=SECURE)
    state = serve_to(deployment, 2)
    before = clone_tree(state.server)
    shutil.rmtree(state.path.parent)
    brought = collect_contributions(deployment)
    assert [each.reply for each in brought] == [None] * 3
    path = next((deployment.folder / "brought").iterdir())
    tensors, header = read_tensors(path, FORMAT)
    assert {name.partition(".")[0] for name in tensors} == {"server"}
    assert "spoken" not in str(header)
    rebuilt = rebuild_state(deployment.settings, deployment.terms, brought)
    assert rebuilt.round == 2
    assert trees_equal(flatten_state(rebuilt.server), flatten_state(before))
    assert serve_to(deployment, 3).round == 3


def test_weights_come_back_and_what_only_the_server_had_does_not(make_deployment: Any) -> None:
    deployment = make_deployment("fedavg", where="mean")
    state = serve_to(deployment, 2)
    before = clone_tree(state.server)
    shutil.rmtree(state.path.parent)
    rebuilt = rebuild_state(
        deployment.settings, deployment.terms, collect_contributions(deployment)
    )
    assert trees_equal(flatten_state(rebuilt.server), flatten_state(before))
    moments = make_deployment("fedadam", where="moments")
    shutil.rmtree(serve_to(moments, 1).path.parent)
    with pytest.raises(ConfigError, match="which no member has: restore a backup"):
        rebuild_state(moments.settings, moments.terms, collect_contributions(moments))
    assert not (moments.folder / "server" / "server.safetensors").exists()


def rewrite_contribution(path: Path, **changes: Any) -> None:
    tensors, header = read_tensors(path, FORMAT)
    write_tensors(path, tensors, FORMAT, header | changes)


def test_what_members_bring_is_checked_as_any_reply(make_deployment: Any) -> None:
    deployment = make_deployment(quorum=2)
    state = serve_to(deployment, 1)
    brought = collect_contributions(deployment)
    with pytest.raises(RunFolderError, match="nothing is rebuilt over a state"):
        rebuild_state(deployment.settings, deployment.terms, brought)
    shutil.rmtree(state.path.parent)
    settings, terms = deployment.settings, deployment.terms
    huge = {name: value * 1e6 for name, value in brought[2].reply.arrays.items()}
    liar = replace(brought[2], reply=Message(brought[2].reply.header, huge))
    for wrong, error, says in [
        ([], RunFolderError, "nobody brings anything"),
        ([brought[0], brought[0]], RunFolderError, "same member"),
        ([brought[0], replace(brought[1], federation="x")], RunFolderError, "different federat"),
        ([brought[0], replace(brought[1], member="c")], Refused, "claims to be from 'b'"),
        ([brought[0], brought[1], liar], Refused, "what c brings is refused"),
    ]:
        with pytest.raises(error, match=says):
            rebuild_state(settings, terms, wrong)
    with pytest.raises(RunFolderError, match="do not list 'a'"):
        rebuild_state(replace(settings, members="b,c"), terms, brought)
    assert not state.path.exists()
    path = next((deployment.folder / "brought").glob("*-a-*"))
    rewrite_contribution(path, round="5")
    with pytest.raises(RunFolderError, match="'round' must be a whole number, not '5'"):
        read_contribution(path)
    with pytest.raises(RunFolderError, match="exists: name another folder"):
        write_contribution(deployment.members["b"], deployment.folder / "brought")
