"""Newcomers that join fixed prototypes: start, training, run folder and upload."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto as command
from helpers.command_line import files_in
from helpers.uploads import prototype_upload
from safetensors.torch import load_file, save_file

import fedproto
from fedproto import Classifier
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core import files
from fedproto.core.tensors import flatten_upload
from fedproto.data import DataFolders
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.partitions import PartitionRequest
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import UPLOAD_FORMAT, read_prototypes

DIGITS = {
    "dataset": "digits",
    "clients": 4,
    "rounds": 15,
    "shots": 5,
    "lr": 0.1,
    "engine": "reference",
}
MODEL = "mlp(hidden=16,width=8)"
#: Two of the federation's classes, and a new one; another architecture, which must project to 8
#: values.
NEWCOMER = {"classes": "0,5,7", "shots": 10, "epochs": 3, "lr": 0.1, "engine": "reference"}
NEWCOMER |= {"model": "mlp(hidden=32,width=24)"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A federation of clients that have all digits but 0."""
    found = fedproto.run(**DIGITS, model=MODEL, out=tmp_path_factory.mktemp("federation") / "run")
    assert {name for client in found.clients for name in client["classes"]} == set("123456789")
    return found


@pytest.fixture(scope="module")
def run(result):
    return result.folder


@pytest.fixture(scope="module")
def joined(run, tmp_path_factory):
    return fedproto.join(run, "digits", **NEWCOMER, out=tmp_path_factory.mktemp("newcomer") / "new")


def bits(prototypes):
    rows = zip(prototypes.classes, prototypes.values, prototypes.known.tolist(), strict=True)
    return {name: value.numpy().tobytes() for name, value, known in rows if known}


def saved_body(path, state, prefix="body."):
    body = {
        name.replace("body.", prefix): value
        for name, value in state.items()
        if name.startswith("body.")
    }
    save_file(body, path) if path.suffix == ".safetensors" else torch.save(body, path)
    return path


def refused(error, message, out, *arguments, **options):
    """In one sentence, and nothing is written."""
    with pytest.raises(error, match=message) as caught:
        fedproto.join(*arguments, **NEWCOMER | options, out=out)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_no_module_has_the_name_of_a_public_function():
    """Once imported, it would take its place: fedproto.join would work once."""
    assert callable(fedproto.join)
    assert [name for name in fedproto.__all__ if importlib.util.find_spec(f"fedproto.{name}")] == []
    assert callable(fedproto.join)


# --- what it learns


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_joining_with_lambda_zero_equals_training_alone(engine, run):
    found = fedproto.join(run, "digits", **NEWCOMER | {"engine": engine}, lam=0)
    assert len(found.epochs) == 4
    assert all(epoch.joined == epoch.alone for epoch in found.epochs)


def test_joined_and_alone_start_alike_and_then_differ(joined):
    assert [epoch.epoch for epoch in joined.epochs] == [0, 1, 2, 3]
    first, *_, last = joined.epochs
    assert first.joined == first.alone
    assert last.joined != last.alone
    assert last.joined == {key: value["mean"] for key, value in joined.result.accuracy.items()}


@pytest.mark.parametrize("options", [{"lam": 5}, {"algorithm.lam": 5}])
def test_training_alone_does_not_depend_on_the_regulariser(options, run):
    alone = fedproto.join(run, "digits", **NEWCOMER, lam=0).epochs
    found = fedproto.join(run, "digits", **NEWCOMER, **options).epochs
    assert [epoch.alone for epoch in found] == [epoch.alone for epoch in alone]
    assert found[-1].joined != found[-1].alone


def test_joining_moves_embeddings_closer_to_the_prototypes(joined):
    """What the prototypes are for: images of a class lie where others have theirs."""
    last = joined.epochs[-1]
    assert last.joined["prototype"] > last.alone["prototype"] + 0.1


# --- what it starts from


@pytest.mark.parametrize("client", range(4))
def test_with_a_members_body_and_data_a_newcomer_starts_at_its_accuracy(
    client, result, run, tmp_path
):
    weights = saved_body(tmp_path / "body.safetensors", result.states[client])
    classes = ",".join(result.clients[client]["classes"])
    options = NEWCOMER | {"classes": classes, "model": MODEL, "epochs": 1, "weights": weights}
    start = fedproto.join(run, "digits", **options).epochs[0].joined
    for key in ("prototype", "prototype_own"):
        assert start[key] == result.clients[client]["accuracy"][key]


def test_weights_may_be_written_in_any_usual_form(result, run, tmp_path):
    options = NEWCOMER | {"model": MODEL, "epochs": 1}
    forms = [("a.safetensors", "body."), ("b.safetensors", ""), ("c.pth", "body."), ("d.pt", "")]
    found = [
        fedproto.join(
            run, "digits", **options, weights=saved_body(tmp_path / name, result.states[1], prefix)
        )
        for name, prefix in forms
    ]
    assert all(each.epochs == found[0].epochs for each in found)
    assert found[0].epochs != fedproto.join(run, "digits", **options).epochs


def test_a_federations_bodies_may_start_from_a_file(result, tmp_path):
    """`initial` is a run's own key: every body is the file's, and every head as drawn."""
    weights = saved_body(tmp_path / "body.safetensors", result.states[2])
    options = DIGITS | {"rounds": 1, "lr": 1e-30, "model": MODEL}
    started, drawn = fedproto.run(**options, initial=str(weights)), fedproto.run(**options)
    for state, plain in zip(started.states, drawn.states, strict=True):
        for name, value in state.items():
            expected = result.states[2][name] if name.startswith("body.") else plain[name]
            assert torch.allclose(value, expected, atol=1e-12)


def test_a_federation_may_start_from_prototypes_and_move_them(run):
    """Without `fixed` they are only the start; without prototypes the first regulariser is 0."""
    options = DIGITS | {"rounds": 2, "model": MODEL}
    given, plain = fedproto.run(**options, prototypes=str(run)), fedproto.run(**options)
    assert plain.metrics[0]["loss"]["regulariser"] == 0 < given.metrics[0]["loss"]["regulariser"]
    assert not torch.equal(
        given.prototypes["prototypes"], load_file(run / "prototypes.safetensors")["prototypes"]
    )


def test_a_path_and_its_text_give_the_same_run(run):
    options = DIGITS | {"rounds": 1, "model": MODEL}
    assert (
        fedproto.run(**options, prototypes=run).accuracy
        == fedproto.run(**options, prototypes=str(run)).accuracy
    )


def test_fixed_without_given_prototypes_changes_nothing():
    options = DIGITS | {"rounds": 3, "model": MODEL}
    plain, fixed = fedproto.run(**options), fedproto.run(**options, fixed=True)
    assert torch.equal(plain.prototypes["prototypes"], fixed.prototypes["prototypes"])
    assert plain.accuracy == fixed.accuracy


@pytest.mark.parametrize(
    ("data", "model"),
    [("digits", "mlp(hidden=9,width=50)"), ("digits", MODEL), ("mnist5k", "cnn(width=12)")],
)
def test_any_architecture_projects_to_the_prototypes(data, model, run):
    found = fedproto.join(run, data, **NEWCOMER | {"model": model, "shots": 5, "epochs": 1})
    assert found.upload.upload["prototypes"].sums["prototypes"].shape == (3, 8)
    assert found.result.prototypes["prototypes"].shape[1] == 8
    width = int(model.removesuffix(")").rpartition("=")[2])
    assert ("body.project.weight" in found.result.states[0]) == (width != 8)


# --- what it leaves behind


def test_fixed_prototypes_do_not_change_by_a_bit(joined, run):
    federations, newcomers = bits(read_prototypes(run)), bits(read_prototypes(joined.result.folder))
    assert {name: value for name, value in newcomers.items() if name != "0"} == federations


def test_a_class_that_nobody_had_gets_a_prototype_of_its_own(joined):
    group = joined.upload.upload["prototypes"]
    row = joined.upload.classes.index("0")
    mean = group.sums["prototypes"][row] / group.weight[row]
    after = read_prototypes(joined.result.folder)
    assert torch.equal(after.values[after.classes.index("0")], mean)
    assert after.known[after.classes.index("0")] == 1


def test_the_upload_is_the_newcomers_class_means(joined):
    """From its training images and its model, in numpy."""
    folder = joined.result.folder
    rows = np.array(json.loads((folder / "partition.json").read_text())["clients"][0]["train"])
    digits = plugins.build("dataset", Part("digits"), DataFolders())
    x, names = (
        digits.train.x[rows].reshape(len(rows), 64) / 16,
        np.array(digits.classes)[digits.train.y[rows]],
    )
    h = (x - 0.3053) / 0.3760
    state = {name: value.double().numpy() for name, value in joined.result.states[0].items()}
    for layer in ("fc1", "fc2"):
        h = np.maximum(h @ state[f"body.{layer}.weight"].T + state[f"body.{layer}.bias"], 0)
    h = h @ state["body.project.weight"].T + state["body.project.bias"]
    sent = Contribution.load(folder)
    assert sent.member == "new" and sent.classes == ("0", "5", "7")
    assert sent.upload["prototypes"].weight.tolist() == [10, 10, 10]
    for row, name in enumerate(sent.classes):
        expected = h[names == name].sum(0)
        assert np.allclose(sent.upload["prototypes"].sums["prototypes"][row], expected, atol=1e-4)


def test_the_newcomers_folder_is_a_run_folder_with_its_accuracies(joined):
    folder = joined.result.folder
    extra = {"start.json", "start.safetensors", "upload.safetensors", "join.json"}
    usual = {
        "config.toml",
        "metrics.jsonl",
        "partition.json",
        "prototypes.safetensors",
        "result.json",
    }
    assert {
        name for name in files_in(folder) if (folder / name).is_file() and "/" not in name
    } == usual | extra
    told = json.loads((folder / "join.json").read_text())
    assert told["member"] == "new"
    assert told["epochs"] == [vars(epoch) for epoch in joined.epochs]


def test_the_newcomers_folder_does_not_need_the_federations(joined, run, tmp_path):
    federation = shutil.copytree(run, tmp_path / "federation")
    weights = saved_body(tmp_path / "body.safetensors", joined.result.states[0])
    found = fedproto.join(federation, "digits", **NEWCOMER, weights=weights, out=tmp_path / "new")
    x = plugins.build("dataset", Part("digits"), DataFolders()).test.x
    before = Classifier.of(tmp_path / "new").distances(x)
    for change in ("somebody leaves", "all is gone"):
        if change == "somebody leaves":
            Membership.of(RunFolder.open(federation)).without("2").save(RunFolder.open(federation))
        else:
            shutil.rmtree(federation)
        assert (Classifier.of(tmp_path / "new").distances(x) == before).all()
        again, _ = reopen(RunFolder.open(tmp_path / "new"))
        states = zip(again.client_states(), found.result.states, strict=True)
        assert all(torch.equal(one[name], other[name]) for one, other in states for name in other)
    assert command("resume", tmp_path / "new").code == 0


def test_a_newcomer_classifies_its_own_and_the_federations_classes(joined):
    folder = joined.result.folder
    for by in ("prototype", "head"):
        for among in ("all", "own"):
            classifier = Classifier.of(folder, by=by, among=among)
            digits = plugins.build("dataset", Part("digits"), DataFolders())
            rows = np.array(
                json.loads((folder / "partition.json").read_text())["clients"][0]["test"]
            )
            names = np.array(digits.classes)[digits.test.y[rows]]
            stated = joined.result.clients[0]["accuracy"][by if among == "all" else f"{by}_own"]
            assert classifier.score(digits.test.x[rows], names) == stated
    assert set(Classifier.of(folder).classes_) == set("0123456789")


def killed_after(epochs, monkeypatch, arguments, options):
    """A join whose machine stops in the middle of training beside the prototypes."""
    lines, write = [], RunFolder.add_metrics

    def add_metrics(self, line):
        if len(lines) == epochs:
            raise SystemExit
        lines.append(line)
        write(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add_metrics", add_metrics)
        with pytest.raises(SystemExit):
            fedproto.join(*arguments, **options)


def test_a_killed_and_resumed_join_gives_the_same_result(run, tmp_path, monkeypatch):
    options = NEWCOMER | {"epochs": 4, "checkpoint_every": 1}
    whole = fedproto.join(run, "digits", **options, out=tmp_path / "whole")
    federation = shutil.copytree(run, tmp_path / "federation")
    killed_after(2, monkeypatch, (federation, "digits"), options | {"out": tmp_path / "new"})
    assert RunFolder.open(tmp_path / "new").checkpoint_round() == 2
    shutil.rmtree(federation)
    assert command("resume", tmp_path / "new").code == 0
    ours, theirs = (
        load_file(tmp_path / name / "prototypes.safetensors") for name in ("new", "whole")
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    stated = json.loads((tmp_path / "new" / "result.json").read_text())
    assert stated["accuracy"] == whole.result.accuracy


def test_a_killed_and_resumed_newcomer_can_still_be_added(run, tmp_path, monkeypatch):
    federation = shutil.copytree(run, tmp_path / "federation")
    options = NEWCOMER | {"epochs": 4, "checkpoint_every": 1}
    whole = fedproto.join(run, "digits", **options)
    killed_after(2, monkeypatch, (federation, "digits"), options | {"out": tmp_path / "new"})
    assert command("resume", tmp_path / "new").code == 0
    assert command("members", federation, "--add", tmp_path / "new").code == 0
    expected = Membership.of(RunFolder.open(run)).with_member(whole.upload)
    assert bits(read_prototypes(federation)) == bits(expected.prototypes())


# --- folded in


@pytest.mark.parametrize("weighting", ["samples", "uniform", "eq6"])
def test_an_added_newcomer_is_weighted_like_the_members(weighting, tmp_path):
    """|D_ij| images, one holder, or Eq. 6: the newcomer's share by hand."""
    fedproto.run(**DIGITS | {"rounds": 1}, model=MODEL, weighting=weighting, out=tmp_path / "run")
    found = fedproto.join(tmp_path / "run", "digits", **NEWCOMER | {"epochs": 1})
    stored = load_file(tmp_path / "run" / "prototypes.safetensors")
    membership = Membership.of(RunFolder.open(tmp_path / "run")).with_member(found.upload)
    after = membership.prototypes()
    group = found.upload.upload["prototypes"]
    own = {
        name: group.sums["prototypes"][row] / group.weight[row]
        for row, name in enumerate(found.upload.classes)
    }
    for name, mean in own.items():
        place = after.classes.index(name)
        held = stored["held"][:, place]
        means = torch.stack([*stored["local"][held > 0, place], mean])
        shares = (
            torch.tensor([*held[held > 0].tolist(), 10.0])
            if weighting != "uniform"
            else torch.ones(len(means))
        )
        expected = (
            (means * shares[:, None]).sum(0)
            / shares.sum()
            / (len(means) if weighting == "eq6" else 1)
        )
        assert torch.allclose(after.values[place], expected, atol=1e-5), name


def test_other_members_then_recognise_the_new_class(run, joined, tmp_path):
    """No member trains: the prototype is enough to be told from."""
    federation = shutil.copytree(run, tmp_path / "run")
    assert "0" not in Classifier.of(federation, 1).classes_
    folder = RunFolder.open(federation)
    Membership.of(folder).with_member(joined.upload).save(folder)
    assert set(Classifier.of(federation, 1).classes_) == set("0123456789")
    assert "0" not in Classifier.of(federation, 1, among="own").classes_


# --- what is refused, before anything is written


def test_unusable_prototypes_are_refused(run, tmp_path):
    out = tmp_path / "new"
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    fedproto.run(**DIGITS | {"rounds": 1}, model=MODEL, algorithm="fedavg", out=tmp_path / "fedavg")
    for name in ("text", "empty", "fedavg", "missing"):
        refused(DataError, name, out, tmp_path / name, "digits")
    refused(DataError, "upload", out, saved_upload(tmp_path / "upload"), "digits")
    refused(
        ConfigError,
        "dim is 9, but the prototypes have 8 values: leave it out",
        out,
        run,
        "digits",
        dim=9,
    )
    assert fedproto.join(run, "digits", **NEWCOMER | {"epochs": 1}, dim=8).epochs


def saved_upload(path):
    tensors = flatten_upload(prototype_upload(torch.zeros(1, 8), torch.ones(1)))
    files.write_tensors(path, tensors, UPLOAD_FORMAT, {"classes": ["0"]})
    return path


@pytest.mark.parametrize("algorithm", ["fedavg", "local", "fedrep", "fesem"])
def test_prototypes_are_refused_for_algorithms_without_prototypes(algorithm, run, tmp_path):
    with pytest.raises(ConfigError, match=f"{algorithm} has no prototypes to start from"):
        fedproto.run(
            **DIGITS, model=MODEL, algorithm=algorithm, prototypes=str(run), out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_are_refused(result, run, tmp_path):
    out = tmp_path / "new"
    other = saved_body(
        tmp_path / "other.safetensors", result.states[0]
    )  # 16 wide, where the newcomer has 32
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "text.pth").write_text("hello")
    save_file({"head.fc3.weight": torch.zeros(1)}, tmp_path / "head.safetensors")
    refused(
        ConfigError,
        r"do not fit the model: its body.* have shape \(16, 64\)",
        out,
        run,
        "digits",
        weights=other,
    )
    refused(
        ConfigError, "are missing there", out, run, "digits", weights=tmp_path / "head.safetensors"
    )
    for name in ("text.safetensors", "text.pth", "missing.safetensors", "missing.pth"):
        refused(ConfigError, name, out, run, "digits", weights=tmp_path / name)


def test_missing_classes_and_images_are_refused(run, tmp_path):
    refused(ConfigError, "unknown class 'ten'", tmp_path / "new", run, "digits", classes="1,ten")
    refused(
        ConfigError,
        "training rows, but 1000 are wanted: lower shots",
        tmp_path / "new",
        run,
        "digits",
        shots=1000,
    )


@pytest.mark.parametrize(
    "options", [{"clients": 2}, {"algorithm": "fedavg"}, {"algorithm": "local"}]
)
def test_settings_that_are_fixed_for_a_newcomer_are_refused(options, run, tmp_path):
    refused(FedProtoError, None, tmp_path / "new", run, "digits", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"absent": "drop"},  # a server that remembers no upload has none to give
        {"profile": "released"},  # which says the same
        {"lost_uploads": 1},  # its only upload is lost
        {"eval_every": 3},
        {"participation": 0.1},
        {"checkpoint_every": 0},
    ],
)
def test_settings_for_federations_are_refused_or_ignored(options, run, tmp_path):
    try:
        found = fedproto.join(run, "digits", **NEWCOMER, **options, out=tmp_path / "new")
    except FedProtoError:
        assert not (tmp_path / "new").exists()
    else:
        assert len(found.epochs) == 4 and Contribution.load(tmp_path / "new").classes == (
            "0",
            "5",
            "7",
        )


def test_a_folder_in_use_is_refused(run, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("precious")
    with pytest.raises(RunFolderError, match="is not empty"):
        fedproto.join(run, "digits", **NEWCOMER, out=tmp_path / "new")
    assert files_in(tmp_path) == ["new", "new/mine"]


# --- the partition of a newcomer


def dealt(clients=1, **options):
    """Portions of three classes with 12, 5 and 7 images."""
    train, test = np.repeat([0, 1, 2], [12, 5, 7]), np.repeat([0, 1, 2], [4, 2, 3])
    pool = PartitionRequest(
        train, test, ("cat", "dog", "owl"), clients, 2, np.random.default_rng(0), "source"
    )
    return train, test, plugins.build("partition", Part("classes", options), pool)


def test_classes_gives_one_client_all_images_of_the_named_ones():
    train, test, (portion,) = dealt(names="owl, cat")
    assert (portion.train == np.flatnonzero(train != 1)).all()
    assert (portion.test == np.flatnonzero(test != 1)).all()
    everything, _, (whole,) = dealt()
    assert (whole.train == np.arange(len(everything))).all() and (whole.test == np.arange(9)).all()


def test_classes_deals_equal_parts_that_share_no_image():
    train, _, portions = dealt(clients=3)
    together = np.concatenate([portion.train for portion in portions])
    assert sorted(together) == list(range(24))
    counts = np.array([np.bincount(train[portion.train], minlength=3) for portion in portions])
    assert (counts.max(0) - counts.min(0) <= 1).all()


def test_classes_gives_shots_of_each():
    train, test, portions = dealt(clients=2, names="cat,dog,cat", shots=2, test_shots=1)
    for portion in portions:
        assert np.bincount(train[portion.train], minlength=3).tolist() == [2, 2, 0]
        assert np.bincount(test[portion.test], minlength=3).tolist() == [1, 1, 0]
    assert not set(portions[0].train) & set(portions[1].train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "cat,cow"}, "unknown class 'cow'.* accepted: cat, dog, owl"),
        ({"shots": 6}, "class 'dog' has 5 training rows, but 6 are wanted"),
        (
            {"clients": 3, "names": "dog", "shots": 2},
            "class 'dog' has 5 training rows, but 6 are wanted",
        ),
        ({"names": "dog", "test_shots": 3}, "class 'dog' has 2 test rows, but 3 are wanted"),
        ({"shots": 0}, "shots must be a whole number of at least 1"),
    ],
)
def test_classes_that_cannot_be_dealt_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        dealt(**options)


def test_classes_with_odd_names_can_be_asked_for(tmp_path):
    """Through the text of a configuration and back."""
    names = ["it's", "a (b)", "c=d", "e*2", "ü 3"]
    y = np.arange(50) % 5
    x = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=y, classes=np.array(names))
    dataset = f"npz:{tmp_path / 'data.npz'}"
    fedproto.run(
        dataset=dataset, partition="classes", clients=1, rounds=1, model=MODEL, out=tmp_path / "run"
    )
    for name in names:
        out = tmp_path / f"new-{names.index(name)}"
        found = fedproto.join(
            tmp_path / "run", dataset, classes=name, epochs=1, model=MODEL, out=out
        )
        assert found.upload.classes == (name,)
        assert Path(found.result.folder, "config.toml").exists()
        assert Classifier.of(out, among="own").classes_.tolist() == [name]
