"""Drills: a member gets another name, or its data another place, and goes on with its state."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import fedproto
from helpers.deployment import (
    Deployment,
    make_private_deployment,
    serve_to,
    state_file_of,
    trees_equal,
    without_changes,
    write_member,
)

from fedproto.core.files import hold_lock
from fedproto.core.tensors import flatten_state
from fedproto.deploy.member import train_round
from fedproto.deploy.member_changes import move_own_data, rename_own_state
from fedproto.deploy.member_checkpoint import MemberCheckpoint
from fedproto.deploy.privacy_ledger import (
    PrivacyLedger,
    carry_over,
    find_ledger,
    mark_as_sent,
    reserve_round,
)
from fedproto.deploy.server_backup import rename_member
from fedproto.deploy.settings import MemberSettings, read_member
from fedproto.errors import BudgetSpent, ConfigError, RunFolderError
from fedproto.privacy.accounting import Release


def rename_everywhere(deployment: Deployment, old: str, new: str) -> None:
    """Rename a member at itself and at the server, as its file has been changed already."""
    own = replace(deployment.members.pop(old), name=new)
    deployment.members[new] = own
    rename_own_state(own, old)
    rename_member(deployment.folder / "server", old, new)


# --- the drills


def test_a_renamed_member_goes_on_with_its_model_its_number_and_its_uploads(
    make_deployment: Any,
) -> None:
    """With other names, all numbers are those of the federation in which nobody was renamed."""
    plain = serve_to(make_deployment(where="plain"), 4)
    deployment = make_deployment()
    serve_to(deployment, 2)
    rename_everywhere(deployment, "a", "zurich")
    state = serve_to(deployment, 4)
    assert trees_equal(flatten_state(state.server), flatten_state(plain.server))
    assert {name: member.number for name, member in state.members.items()} == {
        "zurich": 0,
        "b": 1,
        "c": 2,
    }
    for old, new in (("a", "zurich"), ("b", "b"), ("c", "c")):
        assert state.members[new].accuracy == plain.members[old].accuracy
        assert state.members[new].bytes_up == plain.members[old].bytes_up
    assert [event["what"] for event in without_changes(state.history)] == ["a is called zurich"]
    saved = MemberCheckpoint.load(deployment.members["zurich"])
    assert saved is not None and saved.round == 4
    assert [event["event"] for event in saved.history] == ["renamed"]


def test_a_round_that_was_trained_under_the_old_name_is_answered_under_the_new_one(
    make_deployment: Any,
) -> None:
    deployment = make_deployment()
    state = serve_to(deployment, 1)
    train_round(state.make_request("a"), deployment.members["a"])
    rename_everywhere(deployment, "a", "zurich")
    state = serve_to(deployment, 2)
    assert state.members["zurich"].last_round == 2 and not state.members["zurich"].refused


def test_a_member_whose_data_has_moved_goes_on(make_deployment: Any, tmp_path: Path) -> None:
    plain = serve_to(make_deployment(where="plain"), 3)
    deployment = make_deployment()
    serve_to(deployment, 2)
    own = deployment.members["a"]
    moved = tmp_path / "new disk" / "moved.npz"
    moved.parent.mkdir()
    shutil.copy(deployment.data / "a.npz", moved)
    deployment.members["a"] = replace(own, data=f"npz:{moved}")
    with pytest.raises(RunFolderError, match="move-data"):
        train_round(deployment.state().make_request("a"), deployment.members["a"])
    assert sum(move_own_data(deployment.members["a"]).values()) == 40
    state = serve_to(deployment, 3)
    assert trees_equal(flatten_state(state.server), flatten_state(plain.server))
    assert state.members["a"].failed == 0


def test_a_member_may_be_renamed_and_moved_in_either_order(
    make_deployment: Any, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.npz"
    for order in ("rename first", "move first"):
        deployment = make_deployment(where=order, rounds=1)
        deployment.serve()
        shutil.copy(deployment.data / "a.npz", moved)
        own = replace(deployment.members["a"], name="zurich", data=f"npz:{moved}")
        if order == "rename first":
            rename_own_state(own, "a")
            move_own_data(own)
        else:
            move_own_data(own)
            rename_own_state(own, "a")
        assert MemberCheckpoint.load(own) is not None


# --- what is refused


def test_other_data_is_refused_unless_it_is_said_to_have_changed(
    make_deployment: Any, tmp_path: Path
) -> None:
    import numpy as np

    deployment = make_deployment(rounds=1)
    deployment.serve()
    before = state_file_of(deployment).read_bytes()
    own = deployment.members["a"]
    with np.load(deployment.data / "a.npz") as stored:
        arrays = dict(stored)
    fewer = arrays | {"x": arrays["x"][:-1], "y": arrays["y"][:-1]}
    smaller = arrays | {key: arrays[key][..., :4, :4] for key in ("x", "x_test")}
    for name, content in (("fewer", fewer), ("smaller", smaller)):
        np.savez(tmp_path / f"{name}.npz", **content)
    shrunk = replace(own, data=f"npz:{tmp_path}/fewer.npz")
    with pytest.raises(RunFolderError, match="has 39 training rows of 3 classes, but in round 1"):
        move_own_data(shrunk)
    other = replace(own, data=f"npz:{tmp_path}/smaller.npz")
    with pytest.raises(RunFolderError, match="has other classes or inputs"):
        move_own_data(other, changed=True)
    with pytest.raises(ConfigError, match="already: change `data`"):
        move_own_data(own)
    assert state_file_of(deployment).read_bytes() == before
    assert sum(move_own_data(shrunk, changed=True).values()) == 39


def test_wrong_names_are_refused_and_change_nothing(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1)
    path = deployment.serve().path
    before = path.read_bytes()
    for old, new, says in (("q", "z", "no member 'q'"), ("a", "b", "has a member 'b' already")):
        with pytest.raises(ConfigError, match=says):
            rename_member(path, old, new)
    with hold_lock(path.parent), pytest.raises(RunFolderError, match="is in use by process"):
        rename_member(path, "a", "z")
    assert path.read_bytes() == before
    own = deployment.members["a"]
    with pytest.raises(ConfigError, match="is of the name 'a', not of 'b'"):
        rename_own_state(replace(own, name="z"), "b")
    with pytest.raises(ConfigError, match="is of the name 'a' already"):
        rename_own_state(own, "a")
    with pytest.raises(RunFolderError, match="has not trained yet"):
        rename_own_state(replace(own, state=str(deployment.folder / "none")), "a")


def test_the_settings_must_list_the_new_name(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1)
    deployment.serve()
    settings = deployment.folder / "pyproject.toml"
    table = "[tool.flwr.app.config]\nstate = 'server'\nmembers = '{}'\n"
    for members in ("a,b,c", "b,c", "a,zurich,b,c"):
        settings.write_text(table.format(members))
        answer = fedproto("deploy", "rename", deployment.folder, "a", "zurich")
        assert answer.code == 2 and "must list 'zurich' in place of 'a'" in answer.err
    settings.write_text(table.format("zurich,b,c"))
    answer = fedproto("deploy", "rename", deployment.folder, "a", "zurich")
    assert answer.code == 0 and "a is called zurich now" in answer.out
    shown = fedproto("deploy", "status", deployment.folder)
    assert "a is called zurich" in shown.out and "renamed" in shown.out


def test_a_name_that_had_a_key_is_not_free_afterwards(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1)
    state = deployment.serve()
    state.registered = {"a", "b"}
    state.save()
    rename_member(state.path, "a", "zurich")
    assert deployment.state().registered == {"a", "b", "zurich"}


# --- the ledger


def test_what_was_spent_goes_with_a_name_and_a_place(tmp_path: Path) -> None:
    """A ledger is named by both; a new name would otherwise have a new budget."""
    own = MemberSettings("a", "npz:x.npz", str(tmp_path / "state"), max_epsilon_per_year=1.0)
    spent = reserve_round(own, "f", 1, [Release(5.0)])
    for change in ({"name": "zurich"}, {"data": "npz:y.npz"}):
        other = replace(own, **change)
        assert find_ledger(other) != find_ledger(own)
        carry_over(own, other)
        carry_over(own, other)  # once more changes nothing
        mark_as_sent(other, "f", 1)
        assert len(PrivacyLedger.read(other).entries) == 1
        with pytest.raises(BudgetSpent):
            reserve_round(other, "f", 2, [Release(5.0)])
        carry_over(other, own)  # and back again: the reply is known to have left
        (entry,) = PrivacyLedger.read(own).entries
        assert entry.sent
        assert PrivacyLedger.read(own).epsilon(entry.time) == spent


def test_ledgers_of_both_names_count_together(tmp_path: Path) -> None:
    own = MemberSettings("a", "npz:x.npz", str(tmp_path / "state"))
    other = replace(own, name="zurich")
    for each, federation in ((own, "f"), (other, "g")):
        reserve_round(each, federation, 1, [Release(5.0)], now=100.0)
        mark_as_sent(each, federation, 1)
    alone = PrivacyLedger.read(other).epsilon(100.0)
    carry_over(own, other)
    assert PrivacyLedger.read(other).epsilon(100.0) > alone
    assert {entry.federation for entry in PrivacyLedger.read(other).entries} == {"f", "g"}
    assert len(PrivacyLedger.read(own).entries) == 1


def test_a_private_member_pays_for_lost_rounds_and_under_its_new_name(
    tmp_path: Path, member_files: dict[str, Any]
) -> None:
    """The server is restored, and the member renamed: rounds 2 and 3 stay paid for."""
    from fedproto.deploy.server_backup import back_up_server, restore_server

    deployment = make_private_deployment(tmp_path / "w", member_files)
    state = serve_to(deployment, 1)
    backup = back_up_server(state.path, tmp_path / "backups").path
    serve_to(deployment, 3)
    own = deployment.members["a"]
    spent = PrivacyLedger.read(own).epsilon(0.0)
    shutil.rmtree(state.path.parent)
    restore_server(backup, state.path.parent)
    rename_everywhere(deployment, "a", "zurich")
    state = serve_to(deployment, 4)
    ledger = PrivacyLedger.read(deployment.members["zurich"])
    assert [entry.round for entry in ledger.entries] == [1, 2, 3, 4]
    assert all(entry.sent for entry in ledger.entries)
    assert ledger.epsilon(0.0) > spent
    assert state.members["zurich"].epsilon == ledger.epsilon(0.0)


# --- the command line


def test_the_commands_of_a_member(make_deployment: Any, tmp_path: Path) -> None:
    deployment = make_deployment(rounds=1)
    deployment.serve()
    own = deployment.members["a"]
    moved = tmp_path / "moved.npz"
    shutil.copy(deployment.data / "a.npz", moved)
    path = write_member(own, tmp_path / "member.toml", name="zurich")
    wrong = fedproto("deploy", "rename", path, "a", "basel")
    assert wrong.code == 2 and "has the name 'zurich': write 'basel' there first" in wrong.err
    assert fedproto("deploy", "rename", path, "a", "zurich").code == 0
    write_member(own, path, name="zurich", data=f"npz:{moved}")
    answer = fedproto("deploy", "move-data", path)
    assert answer.code == 0 and "goes on with 40 training rows" in answer.out
    assert MemberCheckpoint.load(read_member(path)) is not None
    shown = fedproto("deploy", "status", path)
    assert shown.code == 0 and "renamed" in shown.out and "data moved" in shown.out
    told = json.loads(fedproto("deploy", "status", path, "--json").out)
    assert [event["event"] for event in told["history"]] == ["renamed", "data moved"]
    brought = fedproto("deploy", "contribute", path, tmp_path / "brought")
    assert brought.code == 0
    (file,) = (tmp_path / "brought").iterdir()
    assert file.name == "contribution-zurich-round-000001.safetensors"


def test_the_commands_of_a_server(make_deployment: Any, tmp_path: Path) -> None:
    deployment = make_deployment(rounds=1)
    state = deployment.serve()
    first = fedproto("deploy", "backup", deployment.folder, tmp_path / "backups")
    assert first.code == 0 and "round 1 is backed up: " in first.out
    again = fedproto("deploy", "backup", deployment.folder, tmp_path / "backups")
    assert "has been backed up before" in again.out
    (backup,) = (tmp_path / "backups").iterdir()
    refused = fedproto("deploy", "restore", backup, state.path.parent)
    assert refused.code == 2 and "--replace" in refused.err
    state.path.write_bytes(b"damaged")
    done = fedproto(
        "deploy", "restore", backup, state.path.parent, "--replace", "--last-round", "6"
    )
    assert done.code == 0 and "it goes on after round 6" in done.out
    shown = fedproto("deploy", "status", deployment.folder)
    assert "restored" in shown.out and "last backup: round 1" in shown.out
    assert "from a backup of round 1" in shown.out
    shutil.rmtree(state.path.parent)
    folder = tmp_path / "new server"
    folder.mkdir()
    files = []
    for name, own in deployment.members.items():
        path = write_member(own, tmp_path / f"{name}.toml")
        assert fedproto("deploy", "contribute", path, tmp_path / "brought").code == 0
    files = sorted((tmp_path / "brought").iterdir())
    missing = fedproto("deploy", "rebuild", folder, *files)
    assert missing.code == 2 and "holds no pyproject.toml" in missing.err
    (folder / "pyproject.toml").write_text(
        "[tool.flwr.app.config]\n"
        f"state = {json.dumps(str(folder / 'server'))}\n"
        "classes = '0,1,2,3,4,5'\nquorum = 2\ndim = 12\n"
    )
    done = fedproto("deploy", "rebuild", folder, *files)
    assert done.code == 0 and "made of what 3 members bring" in done.out, done.err
    shown = fedproto("deploy", "status", folder)
    assert "rebuilt" in shown.out and "from what a, b, c brought back" in shown.out
