"""A finished run classifies, exports and measures rejections without its data."""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.inference_runs import DIGITS, MIXED
from torch import nn

import fedproto
from fedproto import Classifier
from fedproto.core.files import read_tensors, seal, write_tensors
from fedproto.errors import ConfigError, FedProtoError, RunFolderError
from fedproto.inference.export.read import read_exported
from fedproto.inference.export.write import export_client
from fedproto.inference.open_set import measure_rejections
from fedproto.inference.trained_client import calibrate_client, load_client
from fedproto.runs import client_models, held_out, stored_clients
from fedproto.runs.client_models import INDEX, SHARD_FORMAT
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import read_prototypes
from fedproto.runs.stored_clients import ClientModels

TWO_ROUNDS = DIGITS | {"rounds": 2}
RUNS = {
    "fedproto": TWO_ROUNDS,
    "float64": TWO_ROUNDS | {"precision": "float64"},
    "mixed": TWO_ROUNDS | MIXED,
    "fedavg": TWO_ROUNDS | {"algorithm": "fedavg"},
    "fedper": TWO_ROUNDS | {"algorithm": "fedper"},
    "fesem": TWO_ROUNDS | {"algorithm": "fesem", "clusters": 2},
    "vectorised": TWO_ROUNDS | {"engine": "vectorised"},
}


class TwoLayers(nn.Module):
    """A caller's own module; its head is used twice, so its state has one name for two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 10)
        self.middle = nn.Linear(10, 10)
        self.again = self.middle
        self.decide = nn.Linear(10, 2)

    def forward(self, x):
        features = self.again(self.middle(self.embed(x.flatten(1))).relu())
        return features, self.decide(features)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A run folder by its name in RUNS; each is run once."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp("runs") / name
        fedproto.run(**RUNS[name], out=folder)
        return folder

    return make


@pytest.fixture
def damaged(run_of, tmp_path):
    """A copy of a run to damage."""
    return Path(shutil.copytree(run_of("fedproto"), tmp_path / "run"))


@pytest.fixture
def nowhere(run_of, monkeypatch, tmp_path):
    """No data set can be read any more; the run is there already."""
    run_of("fedproto")

    def refuse(*args):
        raise AssertionError("a data set was read")

    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr("fedproto.runs.experiment.Experiment.prepare", refuse)


def arrays(count=20):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 8, 8)).astype(np.float32)
    y = np.array(["cat", "dog"] * (count // 2))
    x[y == "dog"] += 1
    return x, y


def rewrite_index(run, change):
    """Change the content of the index and seal it again, as a stranger could."""
    content = json.loads((run / INDEX).read_text())
    del content["checksum"]
    changed = change(content)
    if changed is not None:
        content = changed
    if isinstance(content, dict):
        content = seal(content, 1)
    (run / INDEX).write_text(json.dumps(content))


# --- the same as with the data


@pytest.mark.parametrize("name", RUNS)
def test_models_and_calibration_are_those_that_the_data_gives(name, run_of):
    folder = RunFolder.open(run_of(name))
    experiment, _ = reopen(folder)
    with closing(experiment.engine):
        states = experiment.client_states()
    shared = read_prototypes(folder.path) if "prototypes" in experiment.progress.server else None
    classes = experiment.federation.classes
    for member in experiment.federation.members:
        state = experiment.as_evaluated(member, states[member.id])
        wanted = calibrate_client(member, state, classes, shared, {})
        found = load_client(folder.path, member.id)
        assert found.classes == wanted.classes
        assert found.own == wanted.own
        assert found.preprocessing == wanted.preprocessing
        assert found.calibration.keys() == wanted.calibration.keys()
        for way, values in wanted.calibration.items():
            assert np.array_equal(found.calibration[way], values)
        inputs = member.test.x[member.test.rows]
        mine = found.forward(inputs)
        theirs = wanted.forward(inputs)
        assert torch.equal(mine.features, theirs.features)
        assert torch.equal(mine.logits, theirs.logits)


def test_about_says_what_the_result_says(run_of):
    run = run_of("fedproto")
    result = json.loads((run / "result.json").read_text())
    about = load_client(run, 2).about
    assert about["accuracy"] == result["clients"][2]["accuracy"]
    assert (about["run"], about["client"], about["round"]) == ("fedproto", 2, 2)


def test_the_calibration_follows_the_prototypes_of_now(run_of, tmp_path):
    """After a member left, distances and thresholds are those of the remaining prototypes."""
    from fedproto.membership.membership import Membership

    folder = RunFolder.open(shutil.copytree(run_of("fedproto"), tmp_path / "run"))
    before = load_client(folder.path, 0)
    Membership.of(folder).without("1").save(folder)
    after = load_client(folder.path, 0)
    assert not np.array_equal(
        before.calibration["prototype all"], after.calibration["prototype all"]
    )
    assert np.array_equal(before.calibration["head all"], after.calibration["head all"])


# --- without the data


def test_classify_export_and_measure_without_data(run_of, nowhere, tmp_path):
    run = run_of("fedproto")
    x = np.zeros((3, 8, 8))
    classifier = Classifier.of(run, 1, reject=0.2)
    assert len(classifier.predict(x)) == 3
    export_client(classifier.trained, tmp_path / "exported", onnx=False)
    exported = Classifier.from_trained(read_exported(tmp_path / "exported"), reject=0.2)
    assert np.array_equal(exported.distances(x), classifier.distances(x))
    assert exported.threshold_ == classifier.threshold_
    found = measure_rejections(run, 0.2)
    assert {each.client for each in found} == {0, 1, 2, 3}


def test_predict_after_the_data_file_was_deleted(tmp_path):
    rows = [f"{number % 7},{'red' if number % 2 else 'white'}" for number in range(60)]
    table = tmp_path / "wine.csv"
    table.write_text("\n".join(["acid,kind", *rows]) + "\n")
    run = tmp_path / "run"
    fedproto.run(dataset=f"csv:{table}", label="kind", clients=2, rounds=1, out=run)
    table.unlink()
    (tmp_path / "new.csv").write_text("acid\n3\n6\n")
    command = [sys.executable, "-m", "fedproto", "predict", str(run), str(tmp_path / "new.csv")]
    found = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert len(found.stdout.splitlines()) == 2


def test_a_run_of_arrays_with_a_built_in_model(tmp_path):
    x, y = arrays()
    run = tmp_path / "run"
    result = fedproto.run(dataset=[(x, y), (x, y)], rounds=1, model="mlp", out=run)
    classifier = Classifier.of(run, 1, by="head")
    assert classifier.classes_.tolist() == ["cat", "dog"]
    assert classifier.predict(x).shape == (20,)
    accuracy = result.clients[1]["accuracy"]["head"]
    assert load_client(run, 1).about["accuracy"]["head"] == accuracy
    export_client(load_client(run, 0), tmp_path / "exported", onnx=False)


def test_a_run_of_modules_takes_the_module_again(tmp_path):
    x, y = arrays()
    module = TwoLayers()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run = tmp_path / "run"
    result = fedproto.run(dataset=[(x, y), (x, y)], rounds=2, model=module, out=run)
    with pytest.raises(ConfigError, match=r"passed from Python \(TwoLayers\).*pass the module"):
        Classifier.of(run)
    classifier = Classifier.of(run, 1, module=module)
    trained_weights = classifier.trained.module.state_dict()
    assert torch.equal(trained_weights["embed.weight"], result.states[1]["embed.weight"])
    assert torch.equal(trained_weights["again.weight"], trained_weights["middle.weight"])
    assert all(torch.equal(before[name], module.state_dict()[name]) for name in before)
    with pytest.raises(RunFolderError, match="the weights are not those of the module"):
        Classifier.of(run, module=nn.Linear(64, 2))
    assert measure_rejections(run, 0.2) == []  # both clients have both classes


# --- what is written


def test_a_run_that_has_not_finished_says_so(run_of, tmp_path):
    run = Path(shutil.copytree(run_of("fedproto"), tmp_path / "run"))
    shutil.rmtree(run / "models")
    (run / "result.json").unlink()
    with pytest.raises(RunFolderError, match=r"has not finished.*`fedproto resume .*` finishes it"):
        load_client(run)


def test_weights_that_all_clients_share_are_stored_once(run_of):
    (shard,) = (run_of("fedavg") / "models").glob("*.safetensors")
    tensors, _ = read_tensors(shard, SHARD_FORMAT)
    owners = {name.split(".")[0] for name in tensors if ".weights." in name}
    assert owners == {"0"}
    (shard,) = (run_of("fedper") / "models").glob("*.safetensors")
    tensors, _ = read_tensors(shard, SHARD_FORMAT)
    bodies = {name for name in tensors if ".weights.body." in name}
    heads = {name for name in tensors if ".weights.head." in name}
    assert {name.split(".")[0] for name in bodies} == {"0"}
    assert {name.split(".")[0] for name in heads} == {"0", "1", "2", "3"}


def test_clients_in_several_shards(monkeypatch, tmp_path, run_of):
    monkeypatch.setattr(client_models, "SHARD_BYTES", 1)
    fedproto.run(**RUNS["fedper"], out=tmp_path / "run")
    assert len(list((tmp_path / "run" / "models").glob("*.safetensors"))) == 4
    x = torch.rand(5, 1, 8, 8)
    for client in range(4):
        mine = load_client(tmp_path / "run", client).forward(x)
        theirs = load_client(run_of("fedper"), client).forward(x)
        assert torch.equal(mine.logits, theirs.logits)


@pytest.mark.parametrize("name", ["fedproto", "fedavg"])
def test_a_shard_is_read_once_for_all_its_clients(name, run_of, monkeypatch):
    read = []

    def note_and_read(path, format):
        read.append(path.name)
        return read_tensors(path, format)

    monkeypatch.setattr(stored_clients, "read_tensors", note_and_read)
    measure_rejections(run_of(name), 0.05)
    assert len(read) == 1


def test_unseen_rows_are_limited(monkeypatch, tmp_path):
    monkeypatch.setattr(held_out, "MAX_UNSEEN_ROWS_PER_RUN", 40)
    monkeypatch.setattr(held_out, "MAX_HELD_OUT_ROWS", 7)
    fedproto.run(**TWO_ROUNDS | {"rounds": 1}, out=tmp_path / "run")
    stored = ClientModels.open(RunFolder.open(tmp_path / "run")).read(0)
    assert len(stored.held_out.unseen.features) == 10
    assert len(stored.held_out.calibration.features) == 7
    assert len(stored.held_out.known_labels) == 7


def test_dropping_checkpoints_drops_the_models(damaged):
    RunFolder.open(damaged).drop_checkpoints()
    assert not (damaged / "models").exists()


# --- damaged and hostile files


def assert_refused(run):
    for read in (lambda: load_client(run, 1), lambda: measure_rejections(run, 0.05, [1])):
        with pytest.raises(FedProtoError) as refused:
            read()
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["index", "shard"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_flipped_bit_is_found(damaged, name, place):
    (shard,) = (damaged / "models").glob("*.safetensors")
    path = damaged / INDEX if name == "index" else shard
    content = bytearray(path.read_bytes())
    content[(len(content) - 30) * place // 2] ^= 1
    path.write_bytes(content)
    assert_refused(damaged)


def test_a_missing_shard_is_named(damaged):
    (shard,) = (damaged / "models").glob("*.safetensors")
    shard.unlink()
    with pytest.raises(RunFolderError, match=rf"{shard.name} does not exist"):
        load_client(damaged)


def test_a_shard_of_another_run_is_refused(damaged, run_of):
    (theirs,) = (run_of("float64") / "models").glob("*.safetensors")
    shutil.copy(theirs, damaged / "models" / theirs.name)
    with pytest.raises(RunFolderError, match="belongs to another run"):
        load_client(damaged)


WRONG = [None, -1, 1.5, 10**30, "x", "../../etc", [], [None], {}, {"x": 1}, True, float("nan")]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_wrong_entries_of_the_index_are_refused_or_read(damaged, wrong):
    """Every key of the index and of a client, sealed again: one sentence, or an answer."""
    original = json.loads((damaged / INDEX).read_text())
    del original["checksum"]
    places = [(key,) for key in original]
    places += [("clients", 1, key) for key in original["clients"][1]]
    places += [("clients", 1, "preprocessing", key) for key in ("shape", "mean", "std", "scale")]
    places += [("layouts", 0), ("layouts", 0, "head.fc2.weight")]
    for place in places:
        changed = json.loads(json.dumps(original))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        if isinstance(inner, dict) and place[-1] not in inner:
            continue
        inner[place[-1]] = wrong
        (damaged / INDEX).write_text(json.dumps(seal(changed, 1)))
        for read in (
            lambda: load_client(damaged, 1),
            lambda: measure_rejections(damaged, 0.05, [1]),
        ):
            try:
                read()
            except FedProtoError as error:
                assert len(str(error).splitlines()) == 1


def test_weights_of_another_model_are_refused(damaged):
    def change(index):
        index["clients"][1]["model"] = "mlp(hidden=3)"

    rewrite_index(damaged, change)
    with pytest.raises(RunFolderError, match="the weights are not those of mlp"):
        load_client(damaged, 1)


def test_held_out_rows_of_another_width_are_refused(damaged):
    (shard,) = (damaged / "models").glob("*.safetensors")
    tensors, header = read_tensors(shard, SHARD_FORMAT)
    header = {"run": header["run"]}
    tensors["1.calibration.features"] = tensors["1.calibration.features"][:, 1:]
    write_tensors(shard, tensors, SHARD_FORMAT, header)
    assert_refused(damaged)


def test_a_plug_in_model_is_not_imported_without_trust(damaged, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def change(index):
        index["clients"][1]["model"] = "stranger:model"

    rewrite_index(damaged, change)
    with pytest.raises(FedProtoError, match="stranger:model"):
        load_client(damaged, 1)
    assert "stranger" not in sys.modules
