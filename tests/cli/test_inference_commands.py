"""The command `predict`."""

import json
import re

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto as command
from helpers.trained_runs import cells, fail, succeed
from helpers.uploads import prototype_upload
from PIL import Image

from fedproto import Classifier
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.inference.open_set import measure_rejections
from fedproto.inference.ways import WAYS
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Every command is typed in an empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture(scope="module")
def digits():
    """Ten test images of each class."""
    source = plugins.build("dataset", Part("digits"), DataFolders())
    return np.concatenate([source.test.x[source.test.y == label][:10] for label in range(10)])


@pytest.fixture(scope="module")
def files(digits, tmp_path_factory):
    """The digits as an array, and five of them as images with values from 0 to 255."""
    folder = tmp_path_factory.mktemp("files")
    np.save(folder / "digits.npy", digits)
    (folder / "images").mkdir()
    for number in range(0, 100, 20):
        bright = (digits[number].astype(int) * 255 // 16).astype(np.uint8)
        Image.fromarray(bright).save(folder / "images" / f"{number:02}.png")
    return folder


def lines_of(answer):
    return [json.loads(line) for line in answer.out.splitlines()]


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
        classifier = Classifier.of(run, client, by=way, among=among)
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
                c["class"] in classifier.trained.own for c in candidates
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
    assert header == ["input", "by prototype", "by head", "by both"]
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
        assert ("*" in row[1]) == (near not in by_prototype.trained.own)
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
    """Bytes of a file are taken as bytes, never as fractions."""
    Image.fromarray(np.full((8, 8), level, np.uint8)).save(tmp_path / "a.png")
    (found,) = lines_of(succeed("predict", run, tmp_path / "a.png", "--json"))
    classifier = Classifier.of(run)
    values = torch.full((1, 1, 8, 8), (level / 255 - 0.3053) / 0.3760)
    features = classifier.trained.forward(values)[0]
    shared = classifier.trained.prototypes
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
    assert grey == f"{tmp_path / 'a.png'} was converted from colour to grey"


def test_predict_may_say_none_of_these(run, files, digits):
    told = lines_of(
        succeed("predict", run, files / "digits.npy", "--json", "--reject", "0.5", "--top", "2")
    )
    for way in ("prototype", "head"):
        classifier = Classifier.of(run, by=way, reject=0.5)
        # The threshold is the novelty of one of these images, which differs in its last bits.
        clear = np.abs(classifier.novelty(digits) - classifier.threshold_) > 1e-4
        labels = np.array([each[way]["label"] for each in told])
        expected = classifier.predict(digits)
        assert (labels[clear] == expected[clear]).all() and clear.mean() > 0.9
        assert {"none of these"} < set(labels)
        # The candidates of rejected inputs are shown, too.
        assert all(len(each[way]["candidates"]) == 2 for each in told)
    _, *rows = cells(succeed("predict", run, files / "digits.npy", "--reject", "0.5").out, "input")
    strange = [each["prototype"]["label"] == "none of these" for each in told]
    assert [row[1].startswith("none of these (") for row in rows] == strange


def test_predict_names_one_of_two_that_are_equally_near(own_run, files):
    """Two classes with the same prototype: the answer is the first candidate."""
    folder = RunFolder.open(own_run)
    bank = Membership.of(folder)
    made = bank.prototypes()
    place = int(made.known.nonzero()[-1])
    twin = prototype_upload(made.values[place : place + 1], torch.ones(1))
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


def test_predict_without_images_shows_how_unseen_classes_are_recognised(run):
    answer = succeed("predict", run)
    header, *rows = cells(answer.out, "classified by")
    assert header[:2] == ["classified by", "clients"]
    assert [row[0] for row in rows] == list(WAYS)
    found = measure_rejections(run, 0.05)
    for row in rows:
        some = [each for each in found if each.way == row[0]]
        means = [
            np.mean([getattr(each, name) for each in some])
            for name in ("accuracy", "known_rejected", "unseen_rejected")
        ]
        assert row[1] == "4" and row[2:5] == [f"{mean:.1%}" for mean in means]
        assert row[5] == f"{np.mean([each.auroc for each in some]):.3f}"
    assert "rejecting 5% of known rows was asked for" in answer.out


def test_predict_without_images_needs_a_run_folder(run, tmp_path):
    member = tmp_path / "dale.toml"
    member.write_text('name = "dale"\ndata = "digits"\nstate = "state-dale"\n')
    succeed("export", run, "--to", tmp_path / "exported", "--no-onnx")
    for path in (member, tmp_path / "exported"):
        answer = fail("predict", path)
        assert f"name an image or another input after {path}" in answer.err
        assert "needs a run folder" in answer.err


def test_predict_without_images_as_json(run):
    told = lines_of(succeed("predict", run, "--json", "--reject", "0.3", "--client", "2"))
    assert told == [vars(each) for each in measure_rejections(run, 0.3, [2])]
    assert {each["client"] for each in told} == {2}


def test_predict_refuses_to_reject_by_too_few_held_out_images(runs, files):
    """Its threshold would be infinite, and everything accepted."""
    small = runs(test_shots=4, ways=3, stdev=0)
    answer = fail("predict", small, files / "digits.npy", "--client", "2", "--reject", "0.05")
    assert re.search(
        r"client 2 has \d held-out rows .* needs 19: the smallest fraction that \d can give is 0\.",
        answer.err,
    )
    succeed("predict", small, files / "digits.npy", "--client", "2", "--reject", "0.5")


def test_predict_without_images_names_the_clients_that_cannot_reject(runs):
    small = runs(test_shots=4, ways=3, stdev=0)
    rows = {each.client: each.calibrated_on for each in measure_rejections(small, 0.05)}
    answer = succeed("predict", small)
    assert (
        "4 of 4 clients cannot reject 0.05 of known rows, which needs 19 held-out rows"
        in answer.err
    )
    assert ", ".join(f"{client} ({count})" for client, count in rows.items()) in answer.err
    _, *table = cells(answer.out, "classified by")
    assert all(row[3:5] == ["–", "–"] and float(row[5]) >= 0 for row in table)
    told = lines_of(succeed("predict", small, "--json"))
    assert all(each["known_rejected"] is None for each in told)
    assert succeed("predict", small, "--reject", "0.5").err == ""


def test_predict_uses_the_current_prototypes(own_run, newcomer, files):
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


def test_predict_refuses_files_that_are_not_inputs(run, files, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "odd.npy", np.zeros((3, 7, 7), np.uint8))
    np.save(tmp_path / "small.npy", np.random.default_rng(0).random((3, 8, 8)))
    assert (
        "text.png is not an image (or is damaged)"
        in fail("predict", run, tmp_path / "text.png").err
    )
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


def test_predict_refuses_folders_that_are_not_trained_runs(runs, files, tmp_path):
    without_models = runs(checkpoint_every=0)
    for inputs in ((), (files / "images",)):
        assert "is not a run" in fail("predict", tmp_path / "missing", *inputs).err
        assert "is not a run" in fail("predict", files, *inputs).err
        assert "keeps no models" in fail("predict", without_models, *inputs).err


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
