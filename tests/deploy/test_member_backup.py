"""A restored member: it trains no round twice, uses no mask twice, and has spent no less."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import fedproto
from helpers.deployment import (
    LocalTransport,
    damage_file,
    serve_to,
    state_file_of,
    write_member,
)

from fedproto.core.files import read_tensors
from fedproto.deploy.contributions import read_contribution, write_contribution
from fedproto.deploy.member import train_round
from fedproto.deploy.member_backup import FORMAT, back_up_member, restore_member
from fedproto.deploy.member_checkpoint import MemberCheckpoint
from fedproto.deploy.messages import SECURE_SUM
from fedproto.deploy.privacy_ledger import (
    PrivacyLedger,
    find_ledger,
    mark_as_sent,
    reserve_round,
)
from fedproto.deploy.round_protocol import serve
from fedproto.deploy.secure_stages import STAGE_FILE, STAGE_FORMAT, take_stage
from fedproto.errors import ConfigError, MessageError, RunFolderError, ServerBehind
from fedproto.privacy.accounting import Release
from fedproto.privacy.secure_sum.server import STAGES

SECURE = "secure-sum(error=1e-9,largest=1e5)"


def test_a_restored_member_takes_part_in_later_rounds_only(make_deployment: Any) -> None:
    deployment = make_deployment()
    serve_to(deployment, 1)
    own = deployment.members["a"]
    backup = back_up_member(own, deployment.folder / "backups")
    assert (backup.round, backup.is_new) == (1, True)
    assert back_up_member(own, deployment.folder / "backups") == backup._replace(is_new=False)
    state = serve_to(deployment, 3)
    shutil.rmtree(own.state)
    with pytest.raises(ConfigError, match="--last-round, the last round that this member"):
        restore_member(backup.path, own)
    assert restore_member(backup.path, own, last_round=3) == 3
    saved = MemberCheckpoint.load(own)
    assert saved is not None and saved.round == 3 and saved.is_without_reply
    for round in (1, 2, 3):
        state.round = round - 1
        with pytest.raises(ServerBehind):
            train_round(state.make_request("a"), own)
    state = serve_to(deployment, 4)
    assert state.members["a"].last_round == 4 and not state.members["a"].failed
    restored = MemberCheckpoint.load(own)
    assert restored is not None
    assert [event["event"] for event in restored.history] == ["restored"]


def test_a_restored_member_without_its_last_reply_brings_only_prototypes(
    make_deployment: Any,
) -> None:
    deployment = make_deployment()
    serve_to(deployment, 1)
    own = deployment.members["a"]
    backup = back_up_member(own, deployment.folder / "backups").path
    restore_member(backup, own, last_round=2, replace=True)
    brought = read_contribution(write_contribution(own, deployment.folder / "brought"))
    assert brought.reply is None and brought.round == 2 and brought.prototypes


def test_masks_of_a_secure_sum_are_neither_backed_up_nor_used_again(make_deployment: Any) -> None:
    """After the restore, the server repeats all requests of the round that was lost."""
    deployment = make_deployment("fedproto(absent=drop)", combiner=SECURE, rounds=1)
    deployment.serve()
    own = deployment.members["a"]
    backup = back_up_member(own, deployment.folder / "backups").path
    assert set(read_tensors(backup, FORMAT)[1]) == {
        *("format", "version", "state", "encoding", "ledger"),
    }
    state = deployment.state(rounds=2)
    transport = LocalTransport(deployment.members, state)
    serve(state, transport, deployment.said.append)
    assert restore_member(backup, own, replace=True) == 2
    stored = read_tensors(Path(own.state) / STAGE_FILE, STAGE_FORMAT)[1]
    assert (stored["stage"], stored["added"]) == (None, 2)
    repeated = [
        request
        for name, request in transport.invitations
        if name == "a" and SECURE_SUM in request.header
    ]
    assert len(repeated) == len(STAGES)
    for request in repeated:
        with pytest.raises((ServerBehind, MessageError), match=r"round 2|not part of"):
            take_stage(request, own)
    assert serve_to(deployment, 3).members["a"].last_round == 3


def test_a_member_that_lost_its_ledger_has_spent_no_less(make_deployment: Any) -> None:
    """Rounds 3 and 4, of which neither backup nor ledger knows, cost what the dearest one did."""
    deployment = make_deployment(rounds=1)
    state = deployment.serve()
    own = deployment.members["a"]
    for round, noise in ((1, 4.0), (2, 5.0)):
        reserve_round(own, state.id, round, [Release(noise)])
        mark_as_sent(own, state.id, round)
    backup = back_up_member(own, deployment.folder / "backups").path
    find_ledger(own).unlink()
    shutil.rmtree(own.state)
    restore_member(backup, own, last_round=4)
    entries = PrivacyLedger.read(own).entries
    noises = [(entry.round, entry.releases[0].noise, entry.sent) for entry in entries]
    assert noises == [(1, 4.0, True), (2, 5.0, True), (3, 4.0, True), (4, 4.0, True)]
    restore_member(backup, own, replace=True)
    assert PrivacyLedger.read(own).entries == entries


def test_backups_of_other_members_and_damaged_ones_are_refused(make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1)
    deployment.serve()
    own = deployment.members["a"]
    backup = back_up_member(own, deployment.folder / "backups").path
    before = state_file_of(deployment).read_bytes()
    with pytest.raises(RunFolderError, match="is of other settings"):
        restore_member(backup, deployment.members["b"], last_round=1, replace=True)
    with pytest.raises(RunFolderError, match="--replace"):
        restore_member(backup, own, last_round=1)
    with pytest.raises(ConfigError, match="numbers from 1"):
        restore_member(backup, own, last_round=0, replace=True)
    damage_file(backup, "cut off")
    with pytest.raises(RunFolderError, match=backup.name):
        restore_member(backup, own, last_round=1, replace=True)
    assert state_file_of(deployment).read_bytes() == before
    with pytest.raises(RunFolderError, match="has not trained yet"):
        back_up_member(replace(own, state=str(deployment.folder / "none")), deployment.folder)


def test_the_encoding_of_tables_comes_back(tmp_path: Path, make_deployment: Any) -> None:
    deployment = make_deployment(rounds=1)
    deployment.serve()
    own = deployment.members["a"]
    encoding = Path(own.state) / "encoding.json"
    encoding.write_text('{"columns": [1, 2]}')
    path = write_member(own, tmp_path / "a.toml")
    assert fedproto("deploy", "backup", path, tmp_path / "backups").code == 0
    (backup,) = (tmp_path / "backups").iterdir()
    shutil.rmtree(own.state)
    done = fedproto("deploy", "restore", backup, path, "--last-round", "4")
    assert done.code == 0 and "takes part in rounds after round 4" in done.out
    assert encoding.read_text() == '{"columns": [1, 2]}'
    assert encoding.stat().st_mode & 0o777 == 0o600
