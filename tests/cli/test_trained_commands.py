"""The commands for a trained federation, as a person or a script meets them: predict, join, members."""

import json
import re
import shutil
import signal
from functools import cache

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto as command
from helpers.command_line import files_in, only_line
from PIL import Image

import fedproto
from fedproto import Classifier
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.types import Upload
from fedproto.data import DataFolders
from fedproto.inference.open_set import rejections
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import read_prototypes

DIGITS = {
    "dataset": "digits",
    "clients": 4,
    "rounds": 5,
    "shots": 5,
    "lr": 0.1,
    "engine": "reference",
}
DIGITS |= {"model": "mlp(hidden=16,width=8)"}
NEWCOMER = (
    "--data",
    "digits",
    "--classes",
    "0,5,7",
    "--shots",
    "5",
    "--epochs",
    "2",
    "--set",
    "lr=0.1",
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Every command is typed in an empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders by the method's name and options; each is run once, and none may be changed."""

    @cache
    def make(algorithm="fedproto", **options):
        folder = tmp_path_factory.mktemp("runs") / "run"
        fedproto.run(**DIGITS, algorithm=algorithm, out=folder, **options)
        return folder

    return make


@pytest.fixture(scope="module")
def run(runs):
    return runs()


@pytest.fixture
def own_run(run, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(run, tmp_path / "federation")


@pytest.fixture(scope="module")
def newcomer(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomers") / "hospital"
    succeed("join", "--prototypes", run, *NEWCOMER, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def digits():
    """A thousand test images would be too many; ten of each class."""
    source = plugins.build("dataset", Part("digits"), DataFolders())
    return np.concatenate([source.test.x[source.test.y == label][:10] for label in range(10)])


@pytest.fixture(scope="module")
def files(digits, tmp_path_factory):
    """The same digits as an array, and five of them as images, whose bytes go to 255."""
    folder = tmp_path_factory.mktemp("files")
    np.save(folder / "digits.npy", digits)
    (folder / "images").mkdir()
    for number in range(0, 100, 20):
        bright = (digits[number].astype(int) * 255 // 16).astype(np.uint8)
        Image.fromarray(bright).save(folder / "images" / f"{number:02}.png")
    return folder


def succeed(*arguments):
    answer = command(*arguments)
    assert answer.code == 0, answer.err
    return answer


def fail(*arguments, writes=None):
    """Exit code 2, one line that says why, nothing printed, and nothing half-written."""
    before = files_in(writes) if writes and writes.exists() else None
    answer = command(*arguments)
    assert answer.code == 2, answer
    assert only_line(answer.err).startswith("error: ")
    assert "Traceback" not in answer.err
    assert (files_in(writes) if writes and writes.exists() else None) == before
    return answer


def cells(out, header):
    """The rows of the table whose header holds this word."""
    lines = out.splitlines()
    start = next(place for place, line in enumerate(lines) if header in line and "┃" in line)
    rows = [re.split(r"\s*│\s*", line.strip()) for line in lines[start + 2 :] if "│" in line]
    return [re.split(r"\s*┃\s*", lines[start].strip()), *rows]


def lines_of(answer):
    return [json.loads(line) for line in answer.out.splitlines()]


# --- predict


@pytest.mark.parametrize("client", [None, 2])
@pytest.mark.parametrize("among", ["all", "own"])
def test_predict_says_what_the_classifier_says(client, among, run, files, digits):
    options = () if client is None else ("--client", str(client))
    answer = succeed(
        "predict", run, files / "digits.npy", "--json", "--top", "3", "--among", among, *options
    )
    assert answer.err == ""
    told = lines_of(answer)
    assert [each["input"] for each in told] == [
        f"{files / 'digits.npy'}[{number}]" for number in range(100)
    ]
    for way in ("prototype", "head"):
        classifier = Classifier.of(run, client or 0, by=way, among=among)
        shares, names = classifier.predict_proba(digits), list(classifier.classes_)
        assert [each[way]["label"] for each in told] == classifier.predict(digits).tolist()
        for row, each in enumerate(told):
            candidates = each[way]["candidates"]
            assert len(candidates) == min(3, len(names))
            assert candidates[0]["class"] == each[way]["label"]
            probabilities = [c["probability"] for c in candidates]
            assert probabilities == sorted(probabilities, reverse=True)
            assert probabilities == pytest.approx(
                [shares[row, names.index(c["class"])] for c in candidates], abs=1e-4
            )
            assert [c["own"] for c in candidates] == [
                c["class"] in classifier.member.own for c in candidates
            ]
            if way == "prototype":
                apart = classifier.distances(digits[row : row + 1])[0]
                found = [c["distance"] for c in candidates]
                assert found == pytest.approx(
                    [apart[names.index(c["class"])] for c in candidates], abs=1e-4
                )
            else:
                assert all("distance" not in c for c in candidates)


def test_predict_shows_a_table(run, files):
    answer = succeed("predict", run, files / "images", files / "digits.npy", "--client", "1")
    assert answer.err == ""
    header, *rows = cells(answer.out, "input")
    assert header == ["input", "by prototype", "by head"]
    assert len(rows) == 5 + 100
    assert (
        rows[0][0] == str(files / "images" / "00.png")
        and rows[5][0] == f"{files / 'digits.npy'}[0]"
    )
    by_prototype, by_head = (Classifier.of(run, 1, by=by) for by in ("prototype", "head"))
    x = np.load(files / "digits.npy")
    for row, near, likely in zip(
        rows[5:], by_prototype.predict(x), by_head.predict(x), strict=True
    ):
        assert re.fullmatch(rf"{near}\*? at [\d.e+-]+", row[1]) and re.fullmatch(
            rf"{likely}\*? [\d.]+%", row[2]
        )
        assert ("*" in row[1]) == (near not in by_prototype.member.own)
    assert "* the client has never seen this class itself" in answer.out
    assert "never seen" not in succeed("predict", run, files / "images", "--among", "own").out


def test_predict_takes_images_as_it_takes_arrays(run, files):
    """A png of 0 to 255 is the same digit as an array of 0 to 16."""
    png = lines_of(succeed("predict", run, files / "images", "--json"))
    array = lines_of(succeed("predict", run, files / "digits.npy", "--json"))[::20]
    for one, other in zip(png, array, strict=True):
        assert one["prototype"]["label"] == other["prototype"]["label"]
        near, there = (each["prototype"]["candidates"][0]["distance"] for each in (one, other))
        assert near == pytest.approx(there, abs=0.1)


@pytest.mark.parametrize("level", [0, 1, 5, 15, 16, 17, 255])
def test_predict_takes_an_image_however_dark(level, run, tmp_path):
    """Bytes of a file are bytes, and no floats that somebody forgot to multiply."""
    Image.fromarray(np.full((8, 8), level, np.uint8)).save(tmp_path / "a.png")
    (found,) = lines_of(succeed("predict", run, tmp_path / "a.png", "--json"))
    classifier = Classifier.of(run)
    values = torch.full((1, 1, 8, 8), (level / 255 - 0.3053) / 0.3760)
    features = classifier.member.see_prepared(values)[0]
    shared = classifier.member.prototypes
    expected = (shared.values[shared.known > 0] - features).norm(dim=1).min()
    assert found["prototype"]["candidates"][0]["distance"] == pytest.approx(
        float(expected), abs=1e-3
    )


@pytest.mark.parametrize("kind", ["uint8", "int64"])
def test_predict_takes_whole_numbers_however_small(kind, run, tmp_path):
    x = np.eye(8).astype(kind)
    np.save(tmp_path / "a.npy", x)
    (found,) = lines_of(succeed("predict", run, tmp_path / "a.npy", "--json"))
    assert found["prototype"]["label"] == Classifier.of(run).predict(x[None])[0]


def test_predict_says_what_it_did_to_an_image(run, tmp_path):
    Image.fromarray(np.full((20, 16, 3), 200, np.uint8)).save(tmp_path / "a.png")
    answer = succeed("predict", run, tmp_path / "a.png", "--json")
    assert len(lines_of(answer)) == 1  # what a script reads is not disturbed
    resized, grey = answer.err.splitlines()
    assert resized == f"{tmp_path / 'a.png'} was resized from 20x16 to 8x8 pixels"
    assert grey == f"{tmp_path / 'a.png'} was turned from colour to grey"


def test_predict_may_say_none_of_these(run, files, digits):
    told = lines_of(
        succeed("predict", run, files / "digits.npy", "--json", "--reject", "0.5", "--top", "2")
    )
    for way in ("prototype", "head"):
        classifier = Classifier.of(run, by=way, reject=0.5)
        # The limit is how new one of these images is, which the last bits decide when it is seen alone.
        clear = np.abs(classifier.novelty(digits) - classifier.threshold_) > 1e-4
        labels, expected = (
            np.array([each[way]["label"] for each in told]),
            classifier.predict(digits),
        )
        assert (labels[clear] == expected[clear]).all() and clear.mean() > 0.9
        assert {"none of these"} < set(labels)
        assert all(
            len(each[way]["candidates"]) == 2 for each in told
        )  # what it would have been is shown all the same
    _, *rows = cells(succeed("predict", run, files / "digits.npy", "--reject", "0.5").out, "input")
    strange = [each["prototype"]["label"] == "none of these" for each in told]
    assert [row[1].startswith("none of these (") for row in rows] == strange


def test_predict_names_one_of_two_that_are_equally_near(own_run, files):
    """A newcomer's class with the very prototype of another: answer and first candidate are one and the same."""
    folder = RunFolder.open(own_run)
    bank = Membership.of(folder)
    made = bank.prototypes()
    place = int(made.known.nonzero()[-1])
    twin = Upload({"prototypes": made.values[place : place + 1]}, {"weight": torch.ones(1)})
    bank.with_member(Contribution("twin", ("twin",), twin)).save(folder)
    told = lines_of(
        succeed(
            "predict", own_run, files / "digits.npy", "--by", "prototype", "--json", "--top", "2"
        )
    )
    tied = [
        each
        for each in told
        if {c["class"] for c in each["prototype"]["candidates"]} == {made.classes[place], "twin"}
    ]
    assert tied
    for each in tied:
        assert each["prototype"]["candidates"][0]["class"] == each["prototype"]["label"]


@pytest.mark.parametrize("by", ["prototype", "head"])
def test_predict_by_one_way_only(by, run, files):
    told = lines_of(succeed("predict", run, files / "images", "--by", by, "--json"))
    assert all(set(each) == {"input", by} for each in told)


def test_predict_with_weights_that_were_averaged_is_by_head(runs, files):
    told = lines_of(succeed("predict", runs("fedavg"), files / "images", "--json"))
    assert all(set(each) == {"input", "head"} for each in told)
    answer = fail("predict", runs("fedavg"), files / "images", "--by", "prototype")
    assert "fedavg has no prototypes: classify by head" in answer.err


def test_predict_without_images_shows_how_strangers_are_told(run):
    answer = succeed("predict", run)
    header, *rows = cells(answer.out, "classified by")
    assert header[:2] == ["classified by", "clients"]
    assert [row[0] for row in rows] == ["prototype all", "prototype own", "head all", "head own"]
    found = rejections(run, 0.05)
    for row in rows:
        some = [each for each in found if each.way == row[0]]
        means = [
            np.mean([getattr(each, name) for each in some])
            for name in ("accuracy", "known_rejected", "unseen_rejected")
        ]
        assert row[1] == "4" and row[2:5] == [f"{mean:.1%}" for mean in means]
        assert row[5] == f"{np.mean([each.auroc for each in some]):.3f}"
    assert "rejecting 5% of known images was asked for" in answer.out


def test_predict_without_images_as_json(run):
    told = lines_of(succeed("predict", run, "--json", "--reject", "0.3", "--client", "2"))
    assert told == [vars(each) for each in rejections(run, 0.3, [2])]
    assert {each["client"] for each in told} == {2}


def test_predict_refuses_to_reject_by_too_few_held_out_images(runs, files):
    """Its threshold would be infinite, and everything accepted."""
    small = runs(test_shots=4, ways=3, stdev=0)
    answer = fail("predict", small, files / "digits.npy", "--client", "2", "--reject", "0.05")
    assert re.search(
        r"client 2 has \d held-out rows .* needs 19: the smallest share that \d can give is 0\.",
        answer.err,
    )
    succeed("predict", small, files / "digits.npy", "--client", "2", "--reject", "0.5")


def test_predict_without_images_names_the_clients_that_cannot_reject(runs):
    small = runs(test_shots=4, ways=3, stdev=0)
    rows = {each.client: each.calibrated_on for each in rejections(small, 0.05)}
    answer = succeed("predict", small)
    assert (
        "4 of 4 clients cannot reject 0.05 of known images, which needs 19 held-out images"
        in answer.err
    )
    assert ", ".join(f"{client} ({count})" for client, count in rows.items()) in answer.err
    _, *table = cells(answer.out, "classified by")
    assert all(row[3:5] == ["–", "–"] and float(row[5]) >= 0 for row in table)
    told = lines_of(succeed("predict", small, "--json"))
    assert all(each["known_rejected"] is None for each in told)
    assert succeed("predict", small, "--reject", "0.5").err == ""


def test_predict_goes_by_the_prototypes_there_are_now(own_run, newcomer, files):
    before = lines_of(
        succeed(
            "predict", own_run, files / "digits.npy", "--by", "prototype", "--json", "--top", "99"
        )
    )
    assert "0" not in {c["class"] for c in before[0]["prototype"]["candidates"]}
    succeed("members", own_run, "--add", newcomer)
    after = lines_of(
        succeed(
            "predict", own_run, files / "digits.npy", "--by", "prototype", "--json", "--top", "99"
        )
    )
    assert "0" in {c["class"] for c in after[0]["prototype"]["candidates"]}


def test_predict_refuses_what_is_no_input(run, files, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "odd.npy", np.zeros((3, 7, 7), np.uint8))
    np.save(tmp_path / "small.npy", np.random.default_rng(0).random((3, 8, 8)))
    assert "text.png is damaged or no image" in fail("predict", run, tmp_path / "text.png").err
    assert (
        "missing.png does not exist"
        in fail("predict", run, files / "images", tmp_path / "missing.png").err
    )
    assert "holds no file to classify" in fail("predict", run, tmp_path / "empty").err
    assert "(7, 7)" in fail("predict", run, tmp_path / "odd.npy", "--json").err
    assert "multiply by 16" in fail("predict", run, tmp_path / "small.npy").err


@pytest.mark.parametrize("client", ["4", "99", "-1"])
def test_predict_refuses_a_client_that_is_not_there(client, run, files):
    for inputs in ((), (files / "images",)):
        assert "there are clients 0 to 3" in fail("predict", run, *inputs, "--client", client).err


def test_predict_refuses_what_is_no_trained_run(runs, files, tmp_path):
    forgotten = runs(checkpoint_every=0)
    fedproto.run(
        dataset=[(np.zeros((8, 8, 8)), [0, 1] * 4)] * 2,
        rounds=1,
        model="mlp",
        out=tmp_path / "arrays",
    )
    for inputs in ((), (files / "images",)):
        assert "is not a run" in fail("predict", tmp_path / "missing", *inputs).err
        assert "is not a run" in fail("predict", files, *inputs).err
        assert "no checkpoint" in fail("predict", forgotten, *inputs).err
        assert "started from Python" in fail("predict", tmp_path / "arrays", *inputs).err


def test_predict_among_own_classes_of_which_no_prototype_is_left(own_run, files):
    """All who have one of client 3's classes leave; somebody stays."""
    bank = Membership.of(RunFolder.open(own_run))
    leaving = [name for name in bank.members if set(bank.held_by("3")) & set(bank.held_by(name))]
    succeed("members", own_run, *(word for name in leaving for word in ("--remove", name)))
    fail(
        "predict", own_run, files / "images", "--client", "3", "--among", "own", "--by", "prototype"
    )
    assert succeed(
        "predict", own_run, files / "images", "--client", "3", "--among", "own", "--by", "head"
    )
    assert succeed("predict", own_run, files / "images", "--client", "3")
    assert succeed("predict", own_run)


@pytest.mark.parametrize(
    "options", [("--top", "0"), ("--reject", "1.5"), ("--by", "colour"), ("--among", "some")]
)
def test_predict_refuses_values_out_of_range(options, run, files):
    answer = command("predict", run, files / "images", *options)
    assert answer.code == 2 and answer.out == "" and options[0] in answer.err


# --- join


def test_join_shows_a_table_and_leaves_a_run(run, tmp_path):
    answer = succeed("join", "--prototypes", run, *NEWCOMER, "--out", tmp_path / "new")
    assert only_line(answer.err) == "nobody in the federation has '0': the newcomer brings it"
    header, *rows = cells(answer.out, "epoch")
    assert header[:4] == ["epoch", "head, joined", "head, alone", "difference"]
    told = json.loads((tmp_path / "new" / "join.json").read_text())
    assert told["member"] == "new"  # the folder's name
    for row, epoch in zip(rows, told["epochs"], strict=True):
        head, alone, near = (
            epoch["joined"]["head"],
            epoch["alone"]["head"],
            epoch["joined"]["prototype"],
        )
        assert row[:5] == [
            str(epoch["epoch"]),
            f"{head:.1%}",
            f"{alone:.1%}",
            f"{head - alone:+.1%}",
            f"{near:.1%}",
        ]
    last = answer.out.splitlines()[-1]
    assert (
        last
        == f"written to {tmp_path / 'new'}; fold it in with: fedproto members {run} --add {tmp_path / 'new'}"
    )


def test_what_join_says_to_type_next_works(own_run, tmp_path):
    answer = succeed("join", "--prototypes", own_run, *NEWCOMER, "--out", tmp_path / "new")
    words = answer.out.splitlines()[-1].partition("fedproto ")[2].split()
    succeed(*words)
    assert "new" in Membership.of(RunFolder.open(own_run)).members


def test_join_does_as_fedproto_join_does(run, newcomer):
    found = fedproto.join(run, "digits", classes="0,5,7", shots=5, epochs=2, lr=0.1)
    sent = Contribution.load(newcomer)
    assert sent.member == "hospital" and sent.classes == found.upload.classes
    assert torch.equal(sent.upload.sums["prototypes"], found.upload.upload.sums["prototypes"])


def test_join_without_a_pull_makes_no_difference(run, tmp_path):
    answer = succeed(
        "join", "--prototypes", run, *NEWCOMER, "--set", "lam=0", "--out", tmp_path / "new"
    )
    assert {row[3] for row in cells(answer.out, "epoch")[1:]} == {"+0.0%"}


def test_join_has_a_folder_and_takes_a_file_and_a_name(run, tmp_path):
    """A federation may send its prototypes by post."""
    shutil.copy(run / "prototypes.safetensors", tmp_path / "received.safetensors")
    succeed(
        "join", "--prototypes", tmp_path / "received.safetensors", *NEWCOMER, "--name", "clinic"
    )
    folder = tmp_path / "work" / "runs" / "newcomer"
    assert Contribution.load(folder).member == "clinic"
    assert (folder / "result.json").exists()
    fail(
        "join", "--prototypes", tmp_path / "received.safetensors", *NEWCOMER, writes=folder
    )  # it is in use now


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
    assert "nobody in the federation has 'zero', 'five'" in answer.err
    assert "there is nothing to join" in answer.err
    np.savez(tmp_path / "data.npz", x=x, y=y, classes=np.array(["zero", "5 "]))
    data = ("--data", f"npz:{tmp_path / 'data.npz'}", "--out", tmp_path / "second")
    answer = succeed("join", "--prototypes", run, *data, "--epochs", "1")
    assert "nobody in the federation has 'zero': the newcomer brings it" in answer.err
    assert "there is nothing to join" not in answer.err


# --- members


def test_members_shows_who_there_is_and_changes_nothing(own_run):
    before = files_in(own_run)
    answer = succeed("members", own_run)
    assert answer.err == "" and files_in(own_run) == before
    stated = json.loads((own_run / "result.json").read_text())["clients"]
    assert cells(answer.out, "member") == [
        ["member", "classes"],
        *([str(c["id"]), ", ".join(c["classes"])] for c in stated),
    ]


def test_members_come_and_go(own_run, newcomer):
    original = read_prototypes(own_run)
    answer = succeed("members", own_run, "--add", newcomer)
    assert cells(answer.out, "member")[-1] == ["hospital", "0, 5, 7"]
    assert "hospital joined, and brought 0" in answer.out
    with_it = read_prototypes(own_run)
    assert with_it.known.sum() == original.known.sum() + 1
    answer = succeed("members", own_run, "--remove", "hospital")
    assert "hospital left, and took along 0" in answer.out
    without = read_prototypes(own_run)
    assert torch.equal(without.values, original.values) and torch.equal(
        without.known, original.known
    )


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
    upload = Upload({"prototypes": torch.ones(2, 8)}, {"weight": torch.ones(2)})
    Contribution("zoo", ("Cat", "cat"), upload).save(tmp_path / "upload.safetensors")
    answer = succeed("members", own_run, "--add", tmp_path / "upload.safetensors")
    assert only_line(answer.err).startswith(
        "classes 'Cat', 'cat' differ only in case, spaces or hyphens"
    )


def test_members_refuses_and_leaves_all_as_it_was(own_run, newcomer, tmp_path):
    (tmp_path / "text").write_text("hello")
    wide = Upload({"prototypes": torch.ones(1, 9)}, {"weight": torch.ones(1)})
    Contribution("wide", ("0",), wide).save(tmp_path / "wide")
    for words, message in (
        (("--remove", "nobody"), "there is no member 'nobody': there are 0, 1, 2, 3"),
        (("--remove", "0", "--remove", "nobody"), "there is no member 'nobody'"),
        (("--remove", "0", "--remove", "0"), "there is no member '0'"),
        (("--add", newcomer, "--add", newcomer), "there is a member 'hospital' already"),
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
    """Its prototypes are mostly others', whose uploads are not there: refused, or kept as they are."""
    folder = shutil.copytree(newcomer, tmp_path / "new")
    before = read_prototypes(folder)
    answer = command("members", folder)
    if answer.code == 2:
        assert only_line(answer.err).startswith("error: ")
        return
    upload = Upload({"prototypes": torch.ones(1, 8)}, {"weight": torch.ones(1)})
    Contribution("zoo", ("zebra",), upload).save(tmp_path / "upload.safetensors")
    succeed("members", folder, "--add", tmp_path / "upload.safetensors")
    after = read_prototypes(folder)
    assert torch.equal(after.values[: len(before.values)], before.values)
    assert torch.equal(after.known[: len(before.known)], before.known)


@pytest.mark.parametrize("name", ["predict", "join", "members"])
def test_every_command_explains_itself(name):
    assert "Usage" in succeed(name, "--help").out
