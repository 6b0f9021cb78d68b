"""Members of a run with a teacher come and go: whoever leaves is gone from the teacher, too."""

import shutil

import pytest
import torch
from helpers.tiny import SETTINGS
from helpers.trained_runs import fail, succeed

import fedproto
from fedproto.core.closed_form import TEACHER, Sums, solve_known
from fedproto.errors import RunFolderError
from fedproto.inference.trained_client import load_client
from fedproto.runs.teacher_files import TEACHER_FILE, read_teacher
from fedproto.teachers.lda import lda

SMALL_MAP = "random-conv(filters=3,kernel=3,pool=2)"
TAUGHT = SETTINGS | {"precision": "float32", "teacher": "lda", "feature_map": SMALL_MAP}


@pytest.fixture(scope="module", params=["lda", "lda(individual=0.5)", "ncm"])
def trained(request, tmp_path_factory):
    """A run with a teacher: its result and its folder, which nobody changes."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    settings = TAUGHT | {"algorithm": "fedproto", "teacher": request.param}
    return fedproto.run(**settings, out=folder), folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run folder."""
    return shutil.copytree(trained[1], tmp_path / "run")


def pool_sums(members, classes):
    """Return the sums over all training rows of some clients."""
    x = torch.cat([member.train.fixed[member.train.rows] for member in members]).double()
    y = torch.cat([member.train.y[member.train.rows] for member in members])
    membership = torch.nn.functional.one_hot(y, classes).double()
    return Sums(membership.T @ x, membership.sum(0), x.T @ x)


def test_who_leaves_is_gone_from_the_teacher(trained, run):
    result, _ = trained
    before = read_teacher(run)
    fedproto.members(run, remove=["1"])
    after = read_teacher(run)
    assert after.left == ("1",) and before.left == ()
    members = result.trained.federation.members
    stayed = [member for member in members if member.id != 1]
    held = pool_sums(stayed, len(after.classes)).counts > 0
    assert torch.equal(after.known > 0, held)
    assert not torch.equal(after.vectors, before.vectors)
    if before.own_vectors is not None:
        assert torch.equal(after.own_vectors[:, 1], after.vectors)  # nothing of its own is left
    client = load_client(run, 0)
    assert not any(TEACHER in way for way in client.calibration)  # the scores were the old ones
    assert client.forward(torch.rand(2, *client.preprocessing.shape)).teacher is not None


def test_the_teacher_without_a_leaver_is_that_of_the_rows_that_stay(tmp_path):
    result = fedproto.run(**TAUGHT | {"algorithm": "fedproto"}, out=tmp_path / "run")
    fedproto.members(tmp_path / "run", remove=["0"])
    fedproto.members(tmp_path / "run", remove=["2"])
    found = read_teacher(tmp_path / "run")
    members = result.trained.federation.members
    expected = solve_known(lda(), pool_sums([members[1], members[3]], len(found.classes)))
    torch.testing.assert_close(found.vectors.double(), expected.vectors, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.bias.double(), expected.bias, rtol=1e-3, atol=1e-3)
    assert found.left == ("0", "2")


def test_looking_at_the_members_changes_nothing(run):
    before = (run / TEACHER_FILE).read_bytes()
    fedproto.members(run)
    assert (run / TEACHER_FILE).read_bytes() == before


def test_a_newcomer_joins_by_prototypes_and_later_extends_the_teacher(run, tmp_path):
    newcomer = ("--data", "mnist5k", "--classes", "0,5,7", "--shots", "5", "--epochs", "1")
    joined = succeed("join", "--prototypes", run, *newcomer, "--out", tmp_path / "newcomer")
    assert "a teacher, which a newcomer does not use" in joined.err
    before = (run / TEACHER_FILE).read_bytes()
    added = succeed("members", run, "--add", tmp_path / "newcomer")
    assert "knows nothing of the rows of newcomer" in " ".join(added.err.split())
    assert (run / TEACHER_FILE).read_bytes() == before
    extended = fedproto.extend(run, rounds=2, out=tmp_path / "more")
    assert len(extended.clients) == 5 and "teacher" in extended.accuracy
    teacher = read_teacher(tmp_path / "more")
    counts = pool_sums(extended.trained.federation.members, len(teacher.classes)).counts
    assert torch.equal(teacher.known > 0, counts > 0)
    assert load_client(tmp_path / "more", "newcomer").teacher is not None


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ("closed-form", "is a run of closed-form, whose clients send no prototypes"),
        ("local", "keeps no single uploads"),
    ],
)
def test_a_run_without_prototypes_says_why_nobody_comes_or_goes(algorithm, sentence, tmp_path):
    settings = TAUGHT | {"algorithm": algorithm, "rounds": 1}
    if algorithm == "closed-form":
        del settings["teacher"]
    fedproto.run(**settings, out=tmp_path / "run")
    with pytest.raises(RunFolderError, match=sentence):
        fedproto.members(tmp_path / "run", remove=["0"])
    answer = fail("extend", tmp_path / "run", "--out", tmp_path / "more")
    assert sentence in " ".join(answer.err.split())


def test_sums_that_are_not_there_are_missed_in_one_sentence(run):
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(RunFolderError, match="has no checkpoint"):
        fedproto.members(run, remove=["1"])
