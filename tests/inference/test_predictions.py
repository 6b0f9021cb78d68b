"""Files with ids and true classes, answers in chunks, their score, and the files they go to."""

import csv

import numpy as np
import pandas as pd
import pytest
from helpers import command_line
from PIL import Image
from sklearn.datasets import load_wine
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score

import fedproto
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.data.shared.tables import Table
from fedproto.errors import ConfigError, DataError
from fedproto.inference import predictions
from fedproto.inference.labelled_inputs import InputFile, find_input_files, read_labelled_file
from fedproto.inference.predictions import Predictor, check_answer_path, write_answers
from fedproto.inference.trained_client import load_client

CLASSES = ("cat", "dog")


def make_files(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_files_lie_in_folders_of_their_classes(tmp_path) -> None:
    make_files(tmp_path, "x.png", "dog/b.png", "cat/p1/a.png", "cat/.hidden", "mouse/c.png")
    found = find_input_files([tmp_path], CLASSES)
    assert [(str(file.path.relative_to(tmp_path)), file.label) for file in found] == [
        ("x.png", None),
        ("cat/p1/a.png", "cat"),
        ("dog/b.png", "dog"),
        ("mouse/c.png", "mouse"),
    ]


def test_folders_that_no_class_names_are_not_searched(tmp_path) -> None:
    make_files(tmp_path, "x.png", "old/b.png")
    assert find_input_files([tmp_path], CLASSES) == [InputFile(tmp_path / "x.png")]
    with pytest.raises(DataError, match="only if they are called like classes"):
        make_files(tmp_path / "deep", "old/b.png")
        find_input_files([tmp_path / "deep"], CLASSES)


def test_a_path_that_does_not_exist_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match=r"nothing\.png does not exist"):
        find_input_files([tmp_path / "nothing.png"], CLASSES)


# --- a table, its ids and its classes


@pytest.fixture(scope="module")
def wine(tmp_path_factory):
    """A run on scikit-learn's wines, and the table it was trained on, with an id per row."""
    folder = tmp_path_factory.mktemp("wine")
    data = load_wine(as_frame=True)
    table = data.frame.iloc[:, [0, 6, 9]].copy()
    table["grape"] = [f"grape {label}" for label in data.target]
    table.to_csv(folder / "train.csv", index=False)
    table.insert(0, "bottle", [f"B{row:03d}" for row in range(len(table))])
    table.to_csv(folder / "wine.csv", index=False)
    fedproto.run(
        dataset=f"csv:{folder / 'train.csv'}", clients=2, rounds=3, lr=0.05, out=folder / "run"
    )
    return folder


def read(wine, **options):
    trained = load_client(wine / "run")
    file = InputFile(wine / "wine.csv")
    return trained, read_labelled_file(file, trained.preprocessing, trained.classes, **options)


def test_the_only_column_of_class_names_is_found(wine) -> None:
    _, found = read(wine)
    assert found.label_column == "grape"
    assert found.inputs[0].label == "grape 0"
    assert found.inputs[-1].label == "grape 2"
    assert found.inputs[0].id.endswith("wine.csv, line 2")


def test_a_column_gives_the_ids(wine) -> None:
    _, found = read(wine, id_column="bottle", label_column="grape")
    assert [each.id for each in found.inputs[:2]] == ["B000", "B001"]


def test_a_column_that_is_no_input_may_hold_anything(wine, tmp_path) -> None:
    """A long remark was refused: the other columns were read as if they were inputs."""
    table = pd.read_csv(wine / "wine.csv").head(3)
    table["remark"] = ["long " * 1000, "1.234,5", "NA"]
    table["grape"] = ["grape 0", "NA", "grape 1"]
    table.to_csv(tmp_path / "new.csv", index=False)
    trained = load_client(wine / "run")
    file = InputFile(tmp_path / "new.csv")
    found = read_labelled_file(
        file, trained.preprocessing, trained.classes, id_column="remark", label_column="grape"
    )
    assert [each.id for each in found.inputs] == [("long " * 1000).strip(), "1.234,5", ""]
    assert [each.label for each in found.inputs] == ["grape 0", None, "grape 1"]


def test_a_file_is_read_once(wine, monkeypatch) -> None:
    opened = []
    read = Table.read.__func__

    def watch(cls, path, *arguments, **options):
        opened.append(path)
        return read(cls, path, *arguments, **options)

    monkeypatch.setattr(Table, "read", classmethod(watch))
    trained = load_client(wine / "run")
    file = InputFile(wine / "wine.csv")
    read_labelled_file(file, trained.preprocessing, trained.classes)
    assert opened == [wine / "wine.csv"]


@pytest.mark.parametrize("option", ["id_column", "label_column"])
def test_a_column_that_is_not_there_is_refused(wine, option) -> None:
    with pytest.raises(ConfigError, match=r"botle.*did you mean 'bottle'"):
        read(wine, **{option: "botle"})


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_score_is_scikit_learns(wine, chunk, monkeypatch) -> None:
    monkeypatch.setattr(predictions, "INPUTS_PER_CHUNK", chunk)
    trained, found = read(wine)
    predictor = Predictor(trained, ["prototype", "head"])
    predictor.add(found.inputs)
    truth = [each.label for each in found.inputs]
    for way, measured in predictor.measure().items():
        answers = [answer[way]["label"] for answer in predictor.answers]
        expected = accuracy_score(truth, answers)
        assert measured.values["accuracy"] == pytest.approx(expected, abs=1e-9)
        expected = balanced_accuracy_score(truth, answers)
        assert measured.values["balanced_accuracy"] == pytest.approx(expected, abs=1e-9)
        expected = f1_score(truth, answers, average="macro")
        assert measured.values["macro_f1"] == pytest.approx(expected, abs=1e-9)
    assert expected > 0.5


def test_inputs_of_a_class_that_nobody_has_are_not_scored(wine) -> None:
    trained, found = read(wine)
    inputs = [found.inputs[0]._replace(label="grape 9"), *found.inputs[1:]]
    predictor = Predictor(trained, ["head"])
    predictor.add(inputs)
    assert predictor.unknown_labels == 1
    assert predictor.measure()["head"].rows == len(inputs) - 1


def test_without_true_classes_nothing_is_scored(wine) -> None:
    trained, found = read(wine)
    predictor = Predictor(trained, ["head"])
    predictor.add([each._replace(label=None) for each in found.inputs])
    assert predictor.measure() == {}
    assert "class" not in predictor.answers[0]


@pytest.mark.parametrize("name", ["answers.csv", "answers.parquet"])
def test_answers_are_written_as_a_table(wine, tmp_path, name) -> None:
    trained, found = read(wine, id_column="bottle")
    predictor = Predictor(trained, ["prototype", "head"])
    predictor.add(found.inputs)
    check_answer_path(tmp_path / name)
    write_answers(tmp_path / name, predictor.answers, predictor.ways)
    reader = pd.read_csv if name.endswith("csv") else pd.read_parquet
    table = reader(tmp_path / name)
    assert list(table["id"]) == [each.id for each in found.inputs]
    assert list(table["class"]) == [each.label for each in found.inputs]
    assert list(table["head"]) == [answer["head"]["label"] for answer in predictor.answers]
    first = predictor.answers[0]["prototype"]["candidates"][0]
    assert table["prototype_distance"][0] == first["distance"]
    assert table["prototype_probability"][0] == first["probability"]


def test_names_in_a_file_of_answers_are_no_formulas(wine, tmp_path) -> None:
    trained, found = read(wine)
    hostile = [found.inputs[0]._replace(id="=cmd|' /C calc'!A0", label="@SUM(A1)")]
    hostile.append(found.inputs[1]._replace(id="-3", label="+tea"))
    predictor = Predictor(trained, ["head"])
    predictor.add(hostile)
    predictor.answers[0]["head"]["label"] = "=1+1"
    write_answers(tmp_path / "answers.csv", predictor.answers, predictor.ways)
    table = pd.read_csv(tmp_path / "answers.csv")
    assert list(table["id"]) == ["'=cmd|' /C calc'!A0", "-3"]
    assert list(table["class"]) == ["'@SUM(A1)", "'+tea"]
    assert table["head"][0] == "'=1+1"
    probabilities = [answer["head"]["candidates"][0]["probability"] for answer in predictor.answers]
    assert list(table["head_probability"]) == probabilities


def test_a_file_of_answers_must_be_a_table_in_a_folder_that_exists(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"\.csv or \.parquet"):
        check_answer_path(tmp_path / "answers.xlsx")
    with pytest.raises(ConfigError, match="does not exist"):
        check_answer_path(tmp_path / "nowhere" / "answers.csv")


# --- arrays and images


def test_an_array_states_its_classes(tmp_path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.savez(tmp_path / "some.npz", x=x, y=np.array([1, 0, 1, 1]))
    np.save(tmp_path / "x.npy", x)
    preprocessing = Preprocessing((3,), (0.0,), (1.0,), 1.0)
    found = read_labelled_file(InputFile(tmp_path / "some.npz"), preprocessing, ("0", "1"))
    assert [each.label for each in found.inputs] == ["1", "0", "1", "1"]
    found = read_labelled_file(InputFile(tmp_path / "x.npy"), preprocessing, ("0", "1"))
    assert [each.label for each in found.inputs] == [None] * 4
    with pytest.raises(DataError, match="has no columns, so --id bottle names nothing"):
        read_labelled_file(
            InputFile(tmp_path / "x.npy"), preprocessing, ("0", "1"), id_column="bottle"
        )


def test_predict_scores_class_folders_and_skips_what_is_no_image(tmp_path) -> None:
    """From the command line: the exit code is 1, and all other files have their answer."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 20), ("new", 4)):
        for name, level in (("dark", 60), ("light", 190)):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(level - 50, level + 50, (8, 8)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    (tmp_path / "new" / "dark" / "broken.png").write_bytes(b"not an image")
    run = tmp_path / "run"
    fedproto.run(dataset=f"folder:{tmp_path / 'train'}", clients=2, rounds=5, out=run)
    out = tmp_path / "answers.csv"
    answer = command_line.fedproto("predict", run, tmp_path / "new", "--out", out)
    assert answer.code == 1
    assert "skipped:" in answer.err
    assert "broken.png" in answer.err
    assert "1 file could not be read and was skipped" in answer.err
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    correct = np.mean([row["head"] == row["class"] for row in rows])
    assert f"by head, 8 inputs: accuracy {correct:.1%}" in answer.out
    assert "nobody knows more classes (2 of 2)" in answer.out


def test_the_client_that_knows_most_answers_by_default(tmp_path) -> None:
    """Of the clients with the most classes, the one with the most rows; the first of equals."""
    generator = np.random.default_rng(0)
    clients = []
    for counts in ([9, 0, 4], [5, 5, 5], [5, 10, 5], [5, 10, 5]):
        y = np.repeat(["a", "b", "c"], counts)
        clients.append((generator.normal(size=(len(y), 4)).astype(np.float32), y))
    result = fedproto.run(dataset=clients, rounds=1, out=tmp_path / "run")
    assert load_client(tmp_path / "run").about["client"] == 2
    assert fedproto.Classifier.of(result).trained.about["client"] == 2
