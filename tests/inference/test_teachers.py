"""A trained client of a run with a closed-form teacher classifies as the run measured it."""

import json
import re
import shutil
from dataclasses import replace
from typing import get_args

import numpy as np
import onnxruntime
import pytest
import torch
from helpers.tiny import SETTINGS
from helpers.trained_runs import fail, succeed

import fedproto
from fedproto import Classifier
from fedproto.core.files import read_tensors, write_tensors
from fedproto.errors import ConfigError, FedProtoError
from fedproto.inference.export.read import read_exported
from fedproto.inference.export.write import export_client
from fedproto.inference.judgement import judge_inputs
from fedproto.inference.trained_client import load_client, take_client
from fedproto.inference.ways import By
from fedproto.runs.client_models import INDEX
from fedproto.runs.folder import RunFolder
from fedproto.runs.teacher_files import (
    TEACHER_FILE,
    TEACHER_FORMAT,
    SolvedTeacher,
    read_teacher,
    write_teacher,
)

WAY_NAMES = get_args(By)
SMALL_MAP = "random-conv(filters=3,kernel=3,pool=2)"
TAUGHT = SETTINGS | {"precision": "float32", "validation": 0.4, "shots": 10, "test_shots": 20}
DIGITS = TAUGHT | {"teacher": "lda", "feature_map": SMALL_MAP}
RUNS = {
    "local": DIGITS | {"algorithm": "local"},
    "fedproto": DIGITS | {"algorithm": "fedproto"},
    "individual": DIGITS | {"algorithm": "local", "teacher": "lda(individual=0.5)"},
    "ncm": DIGITS | {"algorithm": "fedavg", "teacher": "ncm"},
    "float64": DIGITS | {"algorithm": "local", "precision": "float64"},
    "closed-form": TAUGHT | {"algorithm": "closed-form", "feature_map": SMALL_MAP},
    "frozen": DIGITS | {"algorithm": "fedproto", "freeze": "body"},
    "mnist5k": DIGITS
    | {"algorithm": "local", "dataset": "mnist5k", "model": "cnn", "rounds": 1, "clients": 2},
}


@pytest.fixture(scope="module", params=RUNS)
def trained(request, tmp_path_factory):
    """A run's result and its folder."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    return fedproto.run(**RUNS[request.param], out=folder), folder


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The result of a run of fedproto with a teacher, and its folder."""
    folder = tmp_path_factory.mktemp("taught") / "fedproto"
    return fedproto.run(**RUNS["fedproto"], out=folder), folder


def assert_accuracies(trained, result, client):
    """Every accuracy that the run measured is that of the answers afterwards."""
    member = result.trained.federation.members[client]
    x = member.test.x[member.test.rows]
    names = np.array(result.trained.federation.classes)
    labels = names[member.test.y[member.test.rows].numpy()]
    accuracies = result.clients[client]["accuracy"]
    assert {"teacher", "teacher_own"} <= accuracies.keys()
    for name, expected in accuracies.items():
        among = "own" if name.endswith("_own") else "all"
        _, judged = judge_inputs(trained, x, name.removesuffix("_own"), among)
        assert (judged.labels == labels).mean() == pytest.approx(expected), name


def test_every_way_has_the_accuracy_that_the_run_measured(trained):
    result, folder = trained
    if result.trained.federation.members[0].frozen is not None:
        pytest.skip("its test rows are features of the frozen body")
    for client in range(len(result.clients)):
        assert_accuracies(load_client(folder, client), result, client)
        assert_accuracies(take_client(result, client), result, client)


def test_a_folder_and_the_result_in_memory_give_one_client(trained):
    result, folder = trained
    loaded = load_client(folder, 1)
    taken = take_client(result, 1)
    assert loaded.teacher_weight == taken.teacher_weight
    assert torch.equal(loaded.teacher.vectors, taken.teacher.vectors)
    assert loaded.teacher.known_classes() == taken.teacher.known_classes()
    assert loaded.calibration.keys() == taken.calibration.keys()
    assert "teacher all" in loaded.calibration and "teacher own" in loaded.temperatures
    for way, values in taken.calibration.items():
        np.testing.assert_allclose(loaded.calibration[way], values, atol=1e-4)
    x = torch.rand(3, *loaded.preprocessing.shape)
    scores = loaded.forward(x).teacher
    torch.testing.assert_close(scores, taken.forward(x).teacher)


def test_the_weight_is_each_clients_own(tmp_path):
    """Eight validation rows and models that are far from trained: some weights leave 1."""
    result = fedproto.run(**RUNS["local"] | {"lr": 0.001}, out=tmp_path / "run")
    weights = [load_client(tmp_path / "run", client).teacher_weight for client in range(4)]
    assert weights == list(result.trained.teacher_weights)
    assert set(weights) <= {0.0, 0.25, 0.5, 1.0, 2.0} and len(set(weights)) > 1


def test_the_sum_is_that_of_the_log_probabilities(taught):
    """By hand: log softmax(head) + weight · log softmax(teacher / scale), over known classes."""
    _, folder = taught
    trained = load_client(folder, 0)
    outputs = trained.forward(torch.rand(5, *trained.preprocessing.shape))
    known = trained.teacher.known > 0
    scores = outputs.teacher.masked_fill(~known, torch.inf)
    least = scores.amin(1, keepdim=True)
    filled = torch.where(known, outputs.teacher, least)
    opinion = (filled / trained.teacher.scale).log_softmax(1)
    expected = outputs.logits.log_softmax(1) + trained.teacher_weight * opinion
    torch.testing.assert_close(trained.score("head+teacher", "all", outputs), expected)


def test_without_a_wish_the_teacher_helps(taught, tmp_path):
    _, folder = taught
    assert Classifier.of(folder, 0).by == "prototype+teacher"
    fedproto.run(**RUNS["local"], out=tmp_path / "local")
    assert Classifier.of(tmp_path / "local", 0).by == "head+teacher"
    fedproto.run(**RUNS["closed-form"], out=tmp_path / "alone")
    assert Classifier.of(tmp_path / "alone", 0).by == "teacher"
    with pytest.raises(ConfigError, match="closed-form has trained no model: classify by teacher"):
        Classifier.of(tmp_path / "alone", 0, by="head")
    with pytest.raises(ConfigError, match="has trained no model: classify by teacher"):
        Classifier.of(tmp_path / "alone", 0, by="head+teacher")


def test_a_run_without_a_teacher_refuses_to_classify_by_one(tmp_path):
    fedproto.run(**TAUGHT | {"algorithm": "local"}, out=tmp_path / "run")
    assert not (tmp_path / "run" / TEACHER_FILE).exists()
    for by in ("teacher", "head+teacher"):
        with pytest.raises(ConfigError, match="there is no teacher to classify by"):
            Classifier.of(tmp_path / "run", 0, by=by)


def write_table(path, rows=80):
    """Write a table of two numbers and a colour whose sum says the class; return its path."""
    generator = np.random.default_rng(0)
    lines = ["acid,sugar,colour,kind"]
    for acid, sugar in generator.uniform(0, 6, (rows, 2)).round(1):
        colour = "dark" if acid > 3 else "pale"
        lines.append(f"{acid},{sugar},{colour},{'dry' if acid > sugar else 'sweet'}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("algorithm", ["local", "closed-form"])
def test_rows_of_a_table_are_classified_as_the_run_measured(algorithm, tmp_path):
    path = write_table(tmp_path / "rows.csv")
    settings = {"dataset": f"csv:{path}", "label": "kind", "clients": 2, "rounds": 2}
    settings |= {"algorithm": algorithm, "feature_map": "random-fourier(values=20)"}
    if algorithm == "local":
        settings["teacher"] = "ridge"
    result = fedproto.run(**settings, out=tmp_path / "run")
    for client in range(2):
        assert_accuracies(load_client(tmp_path / "run", client), result, client)
    answer = succeed("predict", tmp_path / "run", path, "--by", "teacher")
    found = re.search(r"by teacher, 80 inputs: accuracy ([\d.]+)%", answer.out)
    assert float(found[1]) > 85


def test_all_ways_are_shown_and_written(taught, tmp_path):
    _, folder = taught
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8), np.float32))
    answer = succeed("predict", folder, tmp_path / "x.npy", "--json")
    (first, _) = map(json.loads, answer.out.splitlines())
    ways = ["prototype", "head", "both", "teacher", "both+teacher"]
    assert [way for way in first if way in WAY_NAMES] == ways
    out = tmp_path / "answers.csv"
    succeed("predict", folder, tmp_path / "x.npy", "--by", "head+teacher", "--out", out)
    assert out.read_text().splitlines()[0] == "id,head+teacher,head+teacher_probability"
    shown = succeed("predict", folder)
    assert "both+teacher own" in shown.out and "teacher all" in shown.out


def test_a_run_without_a_teacher_says_so_in_one_sentence(tmp_path):
    settings = {"algorithm": "local", "rounds": 1}
    fedproto.run(**SETTINGS | settings, out=tmp_path / "run")
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8), np.float32))
    answer = fail("predict", tmp_path / "run", tmp_path / "x.npy", "--by", "teacher")
    assert "there is no teacher to classify by" in answer.err


# --- exported


def run_onnx(folder, x):
    """Return what onnxruntime makes of a batch: its outputs by name."""
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


def test_an_exported_client_has_its_teacher(trained, tmp_path):
    _, folder = trained
    client = load_client(folder, 1)
    assert export_client(client, tmp_path / "exported", onnx=False) == []
    read = read_exported(tmp_path / "exported")
    x = torch.rand(3, *client.preprocessing.shape)
    outputs = client.forward(x)
    assert torch.equal(read.forward(x).teacher, outputs.teacher)
    assert read.teacher_weight == client.teacher_weight
    assert read.calibration.keys() == client.calibration.keys()
    assert read.temperatures == client.temperatures
    for by in client.list_ways():
        found = read.score(by, "all", read.forward(x))
        torch.testing.assert_close(found, client.score(by, "all", outputs))


@pytest.mark.parametrize("name", ["fedproto", "closed-form"])
def test_onnx_computes_the_teacher(name, tmp_path):
    fedproto.run(**RUNS[name], out=tmp_path / "run")
    client = load_client(tmp_path / "run", 0)
    assert export_client(client, tmp_path / "exported") == []
    preprocessing = client.preprocessing
    x = np.random.default_rng(0).uniform(0, 16, (5, *preprocessing.shape)).astype(np.float32)
    outputs = client.forward_raw(x)
    found = run_onnx(tmp_path / "exported", x)
    manifest = json.loads((tmp_path / "exported" / "manifest.json").read_text())
    columns = manifest["onnx"]["teacher"]
    expected = client.teacher.judge(outputs.teacher, columns)
    np.testing.assert_allclose(found["teacher"], expected, atol=1e-4)
    if name == "closed-form":
        assert list(found) == ["teacher"]
        return
    head = torch.from_numpy(found["logits"]).log_softmax(1)
    total = head + manifest["teacher_weight"] * torch.from_numpy(found["teacher"])
    summed = client.score("head+teacher", "all", outputs)
    torch.testing.assert_close(total, summed, atol=1e-4, rtol=1e-4)


def test_a_map_that_onnx_cannot_express_is_left_out_with_a_sentence(taught, tmp_path):
    _, folder = taught
    client = load_client(folder, 0)

    def count_in_numpy(x):
        return torch.from_numpy(np.array(x.detach().numpy().reshape(len(x), -1)[:, :12]))

    odd = replace(client, feature_map=count_in_numpy)
    (notice,) = export_client(odd, tmp_path / "exported")
    assert "model.onnx leaves the teacher out: feature map random-conv" in notice
    assert "\n" not in notice and (tmp_path / "exported" / TEACHER_FILE).exists()
    manifest = json.loads((tmp_path / "exported" / "manifest.json").read_text())
    assert "teacher" not in manifest["onnx"]


def test_a_map_that_needs_a_file_is_not_exported(taught, tmp_path):
    _, folder = taught
    client = load_client(folder, 0)
    needs_file = replace(client.teacher, feature_map="frozen(weights=/weights.safetensors)")
    odd = replace(client, teacher=needs_file)
    (notice,) = export_client(odd, tmp_path / "exported", onnx=False)
    assert "leaves the teacher out, because its feature map needs a file" in notice
    read = read_exported(tmp_path / "exported")
    assert read.teacher is None and "head all" in read.calibration
    assert not any("teacher" in way for way in (*read.calibration, *read.temperatures))
    for path in (tmp_path / "exported").iterdir():
        assert b"/weights.safetensors" not in path.read_bytes()
    alone = replace(odd, teacher=replace(needs_file, is_alone=True))
    with pytest.raises(ConfigError, match="it classifies by its teacher alone"):
        export_client(alone, tmp_path / "alone", onnx=False)


@pytest.mark.parametrize("weight", [-1, "1", None, True])
def test_an_exported_weight_that_is_no_number_is_refused(taught, tmp_path, weight):
    _, folder = taught
    export_client(load_client(folder, 0), tmp_path / "exported", onnx=False)
    path = tmp_path / "exported" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"teacher_weight": weight}))
    with pytest.raises(FedProtoError, match="'teacher_weight' must be a number of 0 or more"):
        read_exported(tmp_path / "exported")


def test_a_changed_file_of_an_export_is_refused(taught, tmp_path):
    _, folder = taught
    export_client(load_client(folder, 0), tmp_path / "exported", onnx=False)
    write_teacher(
        tmp_path / "exported" / TEACHER_FILE,
        replace(read_teacher(folder), feature_map="os:system"),
    )
    with pytest.raises(FedProtoError, match="SHA-256"):
        read_exported(tmp_path / "exported")


# --- the file


@pytest.fixture
def stored(tmp_path):
    """A small teacher, and the file that holds it."""
    teacher = SolvedTeacher(
        classes=("a", "b", "c"),
        vectors=torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]),
        bias=torch.tensor([0.5, 0.0, 0.0]),
        known=torch.tensor([1.0, 1.0, 0.0]),
        feature_map="flat",
        scale=2.0,
        is_alone=False,
    )
    write_teacher(tmp_path / TEACHER_FILE, teacher)
    return teacher, tmp_path / TEACHER_FILE


def test_scores_and_opinions_by_hand(stored):
    _, path = stored
    teacher = read_teacher(path)
    scores = teacher.score(torch.tensor([[2.0, 3.0]]))
    assert scores.tolist() == [[2.5, 6.0, 0.0]]
    assert teacher.known_classes() == ["a", "b"]
    assert teacher.select(scores, ["b", "a"]).tolist() == [[6.0, 2.5]]
    # c is unknown and counts as a, the least likely; so does d, which the teacher never heard of.
    expected = torch.tensor([[6.0, 2.5, 2.5, 2.5]]).div(2).log_softmax(1)[:, [0, 3, 2]]
    torch.testing.assert_close(teacher.judge(scores, ["b", "d", "c"]), expected)


@pytest.mark.parametrize(
    ("tensors", "header", "sentence"),
    [
        ({"vectors": torch.zeros(2, 2)}, {}, "holds no teacher"),
        ({"vectors": torch.zeros(())}, {}, "holds no teacher"),
        ({"own_vectors": torch.zeros(3, 2, 2)}, {}, "`own_bias` \\(classes, clients\\)"),
        ({"own_vectors": torch.zeros(3, 2)}, {}, "holds no teacher"),
        ({"bias": torch.tensor([0.0, torch.inf, 0.0])}, {}, "of finite numbers are required"),
        ({"known": torch.zeros(3, dtype=torch.int64)}, {}, "holds no teacher"),
        ({}, {"scale": 0}, "a scale that is not a positive number"),
        ({}, {"scale": True}, "a scale that is not a positive number"),
        ({}, {"feature_map": 3}, "names no feature map"),
        ({}, {"is_alone": "no"}, "whether the teacher is alone"),
        ({}, {"left": "Ulm"}, "which clients have left"),
        ({}, {"classes": ["a", "a", "b"]}, "names no classes, or one twice"),
        ({}, {"feature_map": "os:system"}, "os:system"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(stored, tensors, header, sentence):
    _, path = stored
    good_tensors, good_header = read_tensors(path, TEACHER_FORMAT)
    keys = ("classes", "feature_map", "scale", "is_alone", "left")
    kept = {key: good_header[key] for key in keys}
    write_tensors(path, good_tensors | tensors, TEACHER_FORMAT, kept | header)
    with pytest.raises(FedProtoError, match=sentence) as refusal:
        read_teacher(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("feature_map", ["flat", "hashed-ngrams", "none"])
def test_a_map_that_does_not_fit_is_refused(taught, tmp_path, feature_map):
    _, folder = taught
    copied = shutil.copytree(folder, tmp_path / "run")
    teacher = read_teacher(copied)
    write_teacher(copied / TEACHER_FILE, replace(teacher, feature_map=feature_map))
    with pytest.raises(FedProtoError, match="the teacher"):
        load_client(copied, 0)


@pytest.mark.parametrize("weight", [-1.0, "much", None])
def test_a_wrong_weight_is_refused(taught, tmp_path, weight):
    _, folder = taught
    copied = shutil.copytree(folder, tmp_path / "run")
    opened = RunFolder.open(copied)
    index = opened.read_json(INDEX)
    for entry in index["clients"]:
        entry["teacher_weight"] = weight
    opened.write_json(INDEX, index)
    with pytest.raises(FedProtoError, match="teacher_weight"):
        load_client(copied, 0)
