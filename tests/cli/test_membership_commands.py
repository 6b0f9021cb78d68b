"""The commands `join` and `members`."""

import json
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto as command
from helpers.command_line import files_in, only_line
from helpers.trained_runs import NEWCOMER, cells, fail, succeed
from helpers.uploads import prototype_upload
from safetensors import safe_open
from safetensors.torch import load_file

import fedproto
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import read_prototypes


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Every command is typed in an empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


# --- join


def test_join_shows_a_table_and_leaves_a_run(run, tmp_path):
    answer = succeed("join", "--prototypes", run, *NEWCOMER, "--out", tmp_path / "new")
    assert only_line(answer.err) == "nobody in the federation has '0': the newcomer brings it"
    header, *rows = cells(answer.out, "epoch")
    assert header[:4] == ["epoch", "head, joined", "head, alone", "difference"]
    told = json.loads((tmp_path / "new" / "join.json").read_text())
    assert told["member"] == "new"  # the folder's name
    for row, epoch in zip(rows, told["epochs"], strict=True):
        head = epoch["joined"]["head"]
        alone = epoch["alone"]["head"]
        near = epoch["joined"]["prototype"]
        assert row[:5] == [
            str(epoch["epoch"]),
            f"{head:.1%}",
            f"{alone:.1%}",
            f"{head - alone:+.1%}",
            f"{near:.1%}",
        ]
    assert "joined epoch    2" in answer.out and "round" not in answer.out
    rows = told["gain"]["rows"]
    for epoch in told["epochs"]:
        correct = epoch["joined"]["head"] * rows
        assert correct == pytest.approx(round(correct))
    assert re.search(rf"joining (gained|cost) .* points .*, {rows} test rows\)", answer.out)
    assert "15 training rows in 2 epochs are about 4 steps of training" in answer.out
    target = tmp_path / "new"
    remedy = f"fold it in with: fedproto members {run} --add {target}"
    assert answer.out.splitlines()[-1] == f"written to {target}; {remedy}"


def test_what_join_says_to_type_next_works(own_run, tmp_path):
    answer = succeed("join", "--prototypes", own_run, *NEWCOMER, "--out", tmp_path / "new")
    words = answer.out.splitlines()[-1].partition("fedproto ")[2].split()
    succeed(*words)
    assert "new" in Membership.of(RunFolder.open(own_run)).members


def test_join_does_as_fedproto_join_does(run, newcomer):
    found = fedproto.join(run, "digits", classes="0,5,7", shots=5, epochs=2, lr=0.1)
    sent = Contribution.load(newcomer)
    assert sent.member == "hospital" and sent.classes == found.upload.classes
    assert torch.equal(
        sent.upload["prototypes"].sums["prototypes"],
        found.upload.upload["prototypes"].sums["prototypes"],
    )


def test_join_without_a_pull_makes_no_difference(run, tmp_path):
    answer = succeed(
        "join", "--prototypes", run, *NEWCOMER, "--set", "lam=0", "--out", tmp_path / "new"
    )
    assert {row[3] for row in cells(answer.out, "epoch")[1:]} == {"+0.0%"}


def test_join_takes_a_file_and_a_name_and_has_a_default_folder(run, tmp_path):
    """A federation may send its prototypes as a file."""
    shutil.copy(run / "prototypes.safetensors", tmp_path / "received.safetensors")
    answer = succeed(
        "join", "--prototypes", tmp_path / "received.safetensors", *NEWCOMER, "--name", "clinic"
    )
    assert answer.out.splitlines()[-1] == (
        "written to runs/newcomer; send runs/newcomer/upload.safetensors to the federation's "
        "server, which folds it in with: fedproto members RUN --add upload.safetensors"
    )
    folder = tmp_path / "work" / "runs" / "newcomer"
    assert Contribution.load(folder).member == "clinic"
    assert (folder / "result.json").exists()
    # The default folder is in use now.
    fail("join", "--prototypes", tmp_path / "received.safetensors", *NEWCOMER, writes=folder)


def test_join_that_is_interrupted_says_how_to_go_on(run, tmp_path, monkeypatch):
    written, write = [], RunFolder.add_metrics

    def add_metrics(self, line):
        write(self, line)
        written.append(line)
        if len(written) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunFolder, "add_metrics", add_metrics)
    answer = command("join", "--prototypes", run, *NEWCOMER, "--out", tmp_path / "new")
    assert answer.code == 130
    assert f"fedproto resume {tmp_path / 'new'}" in answer.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--classes": "1,ten"}, "unknown class 'ten'"),
        ({"--shots": "1000"}, "but 1000 are wanted"),
        ({"--data": "digit"}, "unknown dataset 'digit': did you mean 'digits'?"),
        ({"--data": "npz:missing.npz"}, "missing.npz does not exist"),
        ({"--model": "nlp"}, "unknown model 'nlp'"),
        ({"--weights": "missing.safetensors"}, "missing.safetensors"),
        ({"--set": "dim=9"}, "dim is 9, but the prototypes have 8 values"),
        ({"--set": "nonsense=1"}, "unknown key 'nonsense'"),
        ({"--set": "lam"}, "--set takes KEY=VALUE"),
        ({"--set": "lam=-1"}, "lam must be"),
        ({"--set": "clients=3"}, "clients"),
        ({"--set": "algorithm=fedavg"}, ""),
        ({"--prototypes": "missing"}, "missing"),
        ({"--prototypes": "."}, "prototypes.safetensors"),
        ({"--device": "tpu"}, "tpu"),
    ],
)
def test_join_refuses_before_it_writes(changes, message, run, tmp_path):
    words = ["--prototypes", str(run), *NEWCOMER]
    for flag, value in changes.items():
        if flag in words and flag != "--set":
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    answer = fail("join", *words, "--out", tmp_path / "new")
    assert message in answer.err
    assert not (tmp_path / "new").exists() and files_in(tmp_path) == ["work"]


@pytest.mark.parametrize(
    "setting",
    ["absent=drop", "profile=released", "lost_uploads=1", "eval_every=2", "participation=0.1"],
)
def test_join_with_settings_of_a_federation_does_it_wholly_or_not_at_all(setting, run, tmp_path):
    answer = command(
        "join", "--prototypes", run, *NEWCOMER, "--set", setting, "--out", tmp_path / "new"
    )
    if answer.code:
        assert answer.code == 2 and only_line(answer.err).startswith("error: ")
        assert not (tmp_path / "new").exists()
    else:
        assert Contribution.load(tmp_path / "new").classes == ("0", "5", "7")


def test_join_refuses_a_folder_that_is_in_use(run, newcomer, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    assert (
        "is not empty"
        in fail(
            "join", "--prototypes", run, *NEWCOMER, "--out", tmp_path / "mine", writes=tmp_path
        ).err
    )
    assert (
        "already holds a run"
        in fail("join", "--prototypes", run, *NEWCOMER, "--out", newcomer, writes=newcomer).err
    )


def test_join_says_when_there_is_nothing_to_join(run, tmp_path):
    """Names that nobody there uses; one that differs by a space is the same name."""
    x, y = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32), np.arange(20) % 2
    np.savez(tmp_path / "data.npz", x=x, y=y, classes=np.array(["zero", "five "]))
    answer = succeed(
        "join", "--prototypes", run, "--data", f"npz:{tmp_path / 'data.npz'}", "--epochs", "1"
    )
    assert "there is nothing to join" in only_line(answer.err)
    np.savez(tmp_path / "data.npz", x=x, y=y, classes=np.array(["zero", "5 "]))
    data = ("--data", f"npz:{tmp_path / 'data.npz'}", "--out", tmp_path / "second")
    answer = succeed("join", "--prototypes", run, *data, "--epochs", "1")
    assert "nobody in the federation has 'zero': the newcomer brings it" in answer.err
    assert "there is nothing to join" not in answer.err


# --- members


def test_members_shows_the_members_and_changes_nothing(own_run):
    before = files_in(own_run)
    answer = succeed("members", own_run)
    assert answer.err == "" and files_in(own_run) == before
    stated = json.loads((own_run / "result.json").read_text())["clients"]
    assert cells(answer.out, "member") == [
        ["member", "classes"],
        *([str(c["id"]), ", ".join(c["classes"])] for c in stated),
    ]


def test_members_join_and_leave(own_run, newcomer):
    original = read_prototypes(own_run)
    answer = succeed("members", own_run, "--add", newcomer)
    assert cells(answer.out, "member")[-1] == ["hospital", "0, 5, 7"]
    assert answer.out.splitlines()[-2:] == ["History:", "hospital joined, and brought 0"]
    with_it = read_prototypes(own_run)
    assert with_it.known.sum() == original.known.sum() + 1
    answer = succeed("members", own_run, "--remove", "hospital")
    assert "hospital left, and took along 0" in answer.out
    without = read_prototypes(own_run)
    assert torch.equal(without.values, original.values) and torch.equal(
        without.known, original.known
    )


def test_members_writes_the_global_prototypes_and_nothing_else(own_run, newcomer, tmp_path):
    """Files of a run also hold what single members sent."""
    assert {"local", "held"} < load_file(own_run / "prototypes.safetensors").keys()
    for words in ((), ("--add", newcomer)):
        path = tmp_path / f"global-{len(words)}.safetensors"
        succeed("members", own_run, *words, "--write", path)
        assert load_file(path).keys() == {"prototypes", "known"}
        written = read_prototypes(path)
        current = read_prototypes(own_run)
        assert written.classes == current.classes
        assert torch.equal(written.values, current.values)
        assert torch.equal(written.known, current.known)
        with safe_open(path, "pt") as file:
            assert "hospital" not in str(file.metadata())
        folder = tmp_path / f"new-{len(words)}"
        succeed("join", "--prototypes", path, *NEWCOMER, "--out", folder)
        assert Contribution.load(folder).classes == ("0", "5", "7")


def test_a_newcomer_learns_the_same_from_the_written_file(run, newcomer, tmp_path):
    succeed("members", run, "--write", tmp_path / "global.safetensors")
    folder = tmp_path / "hospital"
    prototypes = tmp_path / "global.safetensors"
    succeed("join", "--prototypes", prototypes, *NEWCOMER, "--out", folder)
    expected = Contribution.load(newcomer).upload["prototypes"].sums["prototypes"]
    assert torch.equal(Contribution.load(folder).upload["prototypes"].sums["prototypes"], expected)


def test_members_writes_over_no_file_and_not_into_the_run(own_run, newcomer, tmp_path):
    (tmp_path / "mine").write_text("precious")
    for path, message in (
        (tmp_path / "mine", "exists already"),
        (own_run / "prototypes.safetensors", "exists already"),
        (own_run / "members.safetensors", "is in the run folder"),
    ):
        answer = fail("members", own_run, "--add", newcomer, "--write", path, writes=own_run)
        assert message in answer.err
    assert (tmp_path / "mine").read_text() == "precious"
    path = tmp_path / "missing" / "global.safetensors"
    answer = command("members", own_run, "--write", path)
    assert answer.code == 2 and "cannot be written" in only_line(answer.err)


def test_members_may_replace_one_by_another(own_run, newcomer):
    """As when somebody trained anew."""
    succeed("members", own_run, "--add", newcomer)
    succeed(
        "members",
        own_run,
        "--remove",
        "hospital",
        "--remove",
        "1",
        "--add",
        newcomer / "upload.safetensors",
    )
    assert list(Membership.of(RunFolder.open(own_run)).members) == ["0", "2", "3", "hospital"]


def test_members_says_which_names_look_alike(own_run, tmp_path):
    upload = prototype_upload(torch.ones(2, 8), torch.ones(2))
    Contribution("zoo", ("Cat", "cat"), upload).save(tmp_path / "upload.safetensors")
    answer = succeed("members", own_run, "--add", tmp_path / "upload.safetensors")
    assert only_line(answer.err).startswith(
        "classes 'Cat', 'cat' differ only in case, spaces or hyphens"
    )


def test_members_refuses_and_leaves_all_as_it_was(own_run, newcomer, tmp_path):
    (tmp_path / "text").write_text("hello")
    wide = prototype_upload(torch.ones(1, 9), torch.ones(1))
    Contribution("wide", ("0",), wide).save(tmp_path / "wide")
    for words, message in (
        (("--remove", "nobody"), "there is no member 'nobody': there are 0, 1, 2, 3"),
        (("--remove", "0", "--remove", "nobody"), "there is no member 'nobody'"),
        (("--remove", "0", "--remove", "0"), "there is no member '0'"),
        (("--add", newcomer, "--add", newcomer), "or remove the member first"),
        (("--add", newcomer, "--add", tmp_path / "text"), "text"),
        (("--add", tmp_path / "missing"), "missing"),
        (("--add", tmp_path), "upload.safetensors"),
        (("--add", tmp_path / "wide"), "(1, 9)"),
        (("--add", own_run / "prototypes.safetensors"), "is not a file of upload"),
        (("--remove", "0", "--remove", "1", "--remove", "2", "--remove", "3"), "the last member"),
    ):
        assert message in fail("members", own_run, *words, writes=own_run).err
    assert not (own_run / "members.safetensors").exists()


def test_members_may_all_be_replaced_or_not_but_never_by_a_traceback(own_run, newcomer):
    everybody = [word for name in "0123" for word in ("--remove", name)]
    answer = command("members", own_run, *everybody, "--add", newcomer)
    assert answer.code in (0, 2)
    if answer.code == 0:
        assert list(Membership.of(RunFolder.open(own_run)).members) == ["hospital"]
    else:
        assert (
            only_line(answer.err).startswith("error: ")
            and not (own_run / "members.safetensors").exists()
        )


def test_members_refuses_runs_without_any(runs, tmp_path):
    for each in (runs("fedavg"), runs("fedproto(absent=drop)")):
        assert "keeps no single uploads" in fail("members", each, writes=each).err
    assert "no checkpoint" in fail("members", runs(checkpoint_every=0)).err
    assert "is not a run" in fail("members", tmp_path).err


def test_members_of_a_newcomers_folder_never_forget_the_federation(run, newcomer, tmp_path):
    """Most of its prototypes are from others, without uploads: refused, or kept as they are."""
    folder = shutil.copytree(newcomer, tmp_path / "new")
    before = read_prototypes(folder)
    answer = command("members", folder)
    if answer.code == 2:
        assert only_line(answer.err).startswith("error: ")
        return
    upload = prototype_upload(torch.ones(1, 8), torch.ones(1))
    Contribution("zoo", ("zebra",), upload).save(tmp_path / "upload.safetensors")
    succeed("members", folder, "--add", tmp_path / "upload.safetensors")
    after = read_prototypes(folder)
    assert torch.equal(after.values[: len(before.values)], before.values)
    assert torch.equal(after.known[: len(before.known)], before.known)


@pytest.mark.parametrize("name", ["predict", "export", "join", "members", "extend"])
def test_every_command_explains_itself(name):
    out = succeed(name, "--help").out
    assert "Usage" in out and "[required]" in out
    assert "\\" not in out
