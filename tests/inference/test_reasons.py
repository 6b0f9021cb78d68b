"""Answers with their reasons: the prototypes and the training rows that are near an input."""

import json
import pickle
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.inference_runs import DIGITS
from helpers.trained_runs import fail, succeed
from PIL import Image
from sklearn.base import clone
from sklearn.neighbors import NearestNeighbors

import fedproto
from fedproto import Classifier
from fedproto.data import DataFolders
from fedproto.data.digits import digits
from fedproto.errors import ConfigError
from fedproto.inference.export.write import export_client
from fedproto.inference.predictions import Predictor
from fedproto.inference.reasons import Explainer, NearClass, NearRow
from fedproto.inference.trained_client import load_client

SMALL_MAP = "random-conv(filters=3,kernel=3,pool=2)"
SMALL = DIGITS | {"rounds": 1}
RUNS = {
    "fedproto": SMALL,
    "fedavg": SMALL | {"algorithm": "fedavg"},
    "frozen": SMALL | {"freeze": "body"},
    "teacher": SMALL | {"teacher": "lda", "feature_map": SMALL_MAP},
    "closed-form": SMALL | {"algorithm": "closed-form", "feature_map": SMALL_MAP},
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A result and its folder, by the name above; each is run once."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp("reasons") / "run"
        return fedproto.run(**RUNS[name], out=folder), folder

    return make


@pytest.fixture(scope="module")
def images():
    return digits(DataFolders()).test.x[:6]


# --- by hand: inputs that are their own embedding

TRIANGLES = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, 8.0], [6.0, 8.0]])
NAMES = np.array(["low", "low", "high", "high"])


def test_distances_of_a_small_example_by_hand() -> None:
    """The means are (3, 0) and (3, 8); from (3, 4) to all four samples it is 5."""
    few = Classifier().fit(TRIANGLES, NAMES)
    (reason,) = few.explain(np.array([[3.0, 3.0]]), count=3)
    assert reason.label == "low"
    assert reason.prototypes == (NearClass("low", 3.0), NearClass("high", 5.0))
    near, far = 18**0.5, 34**0.5
    assert [(row.row, row.name) for row in reason.rows] == [(0, "low"), (1, "low"), (2, "high")]
    assert [row.distance for row in reason.rows] == pytest.approx([near, near, far])
    assert reason.means == ()  # they are the prototypes
    assert reason.missing is None
    softmax = 1 / (1 + np.exp(-2))
    assert reason.probabilities[0] == ("low", pytest.approx(softmax))


def test_ties_are_by_order() -> None:
    few = Classifier().fit(TRIANGLES, NAMES)
    (reason,) = few.explain(np.array([[3.0, 4.0]]), count=4)
    assert [row.row for row in reason.rows] == [0, 1, 2, 3]
    assert [row.distance for row in reason.rows] == [5.0] * 4
    assert reason.prototypes == (NearClass("high", 4.0), NearClass("low", 4.0))  # as classes_
    assert reason.label == "high" == few.predict(np.array([[3.0, 4.0]]))[0]


def test_labels_keep_their_type() -> None:
    few = Classifier().fit(TRIANGLES, np.array([1, 1, 7, 7]))
    (reason,) = few.explain(np.array([[0.0, 0.0]]), count=1)
    assert (reason.label, reason.prototypes[0].name, reason.rows[0].name) == (1, 1, 1)
    assert reason.rows == (NearRow(0, 1, 0.0),)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3"])
def test_a_count_that_is_no_number_is_refused(count) -> None:
    with pytest.raises(ConfigError, match="count is a whole number above 0"):
        Classifier().fit(TRIANGLES, NAMES).explain(TRIANGLES, count=count)


def test_fitted_samples_are_scikit_learns_neighbours() -> None:
    draw = np.random.default_rng(0)
    samples = draw.normal(size=(40, 5))
    points = draw.normal(size=(8, 5))
    few = Classifier().fit(samples, draw.integers(0, 3, 40))
    wanted = NearestNeighbors(n_neighbors=4).fit(samples).kneighbors(points)
    for reason, distances, rows in zip(few.explain(points, 4), *wanted, strict=True):
        assert [near.row for near in reason.rows] == rows.tolist()
        assert [near.distance for near in reason.rows] == pytest.approx(distances.tolist())


# --- trained clients


@pytest.mark.parametrize("name", RUNS)
def test_rows_are_scikit_learns_neighbours_among_the_clients_training_rows(
    name, run_of, images
) -> None:
    """Read from the run folder again, or taken from memory: the same rows of the same data."""
    result, folder = run_of(name)
    source = digits(DataFolders())
    partition = json.loads((folder / "partition.json").read_text())
    for client in (0, 3):
        classifier = Classifier.of(folder, client)
        trained = classifier.trained
        rows = np.array(partition["clients"][client]["train"])
        inputs = source.train.x[rows].reshape(len(rows), 1, 8, 8)
        embedded = trained.embed(trained.preprocessing(inputs)).double().numpy()
        points = trained.embed(trained.preprocessing(images)).double().numpy()
        distances, places = NearestNeighbors(n_neighbors=3).fit(embedded).kneighbors(points)
        from_folder = classifier.explain(images)
        for number, reason in enumerate(from_folder):
            near = reason.rows
            assert [each.distance for each in near] == pytest.approx(
                distances[number].tolist(), rel=1e-5, abs=1e-5
            )
            assert [each.row for each in near] == rows[places[number]].tolist()
            names = [source.classes[source.train.y[each.row]] for each in near]
            assert [each.name for each in near] == names
        from_memory = Classifier.of(result, client).explain(images)
        for one, other in zip(from_folder, from_memory, strict=True):
            assert [each.row for each in one.rows] == [each.row for each in other.rows]
            assert [each.name for each in one.means] == [each.name for each in other.means]
            assert one.label == other.label


def test_prototypes_are_those_that_decide(run_of, images) -> None:
    _, folder = run_of("fedproto")
    for among in ("all", "own"):
        classifier = Classifier.of(folder, 1, among=among)
        distances = classifier.distances(images)
        for reason, gaps in zip(classifier.explain(images, count=2), distances, strict=True):
            nearest = np.argsort(gaps, kind="stable")[:2]
            assert [near.name for near in reason.prototypes] == list(classifier.classes_[nearest])
            assert [near.distance for near in reason.prototypes] == gaps[nearest].tolist()
            assert reason.prototypes[0].name == reason.label
            owned = [near.name in classifier.trained.own for near in reason.prototypes]
            assert [near.own for near in reason.prototypes] == owned


def test_means_are_those_of_the_clients_own_rows(run_of, images) -> None:
    """FedAvg has no prototypes: the means of the client's own classes stand in for them."""
    _, folder = run_of("fedavg")
    classifier = Classifier.of(folder, 2)
    trained = classifier.trained
    rows = trained.training.load(trained)
    labels = np.array(rows.labels)
    features = rows.features.double().numpy()
    points = trained.embed(trained.preprocessing(images)).double().numpy()
    for reason, point in zip(classifier.explain(images, count=10), points, strict=True):
        assert reason.prototypes == ()
        assert {near.name for near in reason.means} == set(trained.own)
        for near in reason.means:
            mean = features[labels == near.name].mean(0)
            assert near.distance == pytest.approx(np.linalg.norm(point - mean), rel=1e-4)


def test_reasons_change_no_answer(run_of, images, tmp_path) -> None:
    np.save(tmp_path / "x.npy", images)
    for name in RUNS:
        _, folder = run_of(name)
        classifier = Classifier.of(folder, 0)
        before = classifier.predict(images), classifier.predict_proba(images)
        reasons = classifier.explain(images)
        assert [reason.label for reason in reasons] == before[0].tolist()
        for reason, probabilities in zip(reasons, before[1], strict=True):
            told = dict(reason.probabilities)
            assert [told[label] for label in classifier.classes_] == probabilities.tolist()
        plain = succeed("predict", folder, tmp_path / "x.npy", "--json").out
        with_reasons = succeed("predict", folder, tmp_path / "x.npy", "--json", "--why").out
        told = [json.loads(line) for line in with_reasons.splitlines()]
        assert all(answer.pop("why")["rows"] for answer in told)
        assert told == [json.loads(line) for line in plain.splitlines()]


def test_a_client_of_one_class(tmp_path) -> None:
    draw = np.random.default_rng(0)
    clients = []
    for name in ("a", "b"):
        x = draw.normal(loc=3.0 * (name == "b"), size=(12, 4)).astype(np.float32)
        clients.append((x, np.full(12, name)))
    result = fedproto.run(dataset=clients, rounds=1, lr=0.01)
    (reason,) = Classifier.of(result, 0).explain(clients[0][0][:1], count=3)
    assert [near.name for near in reason.means] == ["a"]
    assert {near.name for near in reason.rows} == {"a"}
    assert {(near.name, near.own) for near in reason.prototypes} == {("a", True), ("b", False)}


def test_an_array_of_which_rows_were_held_out_says_which_row_it_was(tmp_path) -> None:
    """A number counts training rows; the place is that of the array as it was given."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(30, 4)).astype(np.float32)
    y = np.arange(30) % 2
    for result in (
        fedproto.run(dataset=(x, y), clients=1, rounds=1),
        fedproto.run(dataset=[(x, y)], rounds=1),
    ):
        rows = Classifier.of(result, 0).trained.training.load(Classifier.of(result, 0).trained)
        for reason, number in zip(
            Classifier.of(result, 0).explain(x[:20], count=1), range(20), strict=True
        ):
            (near,) = reason.rows
            if near.distance < 1e-6:
                assert near.place == f"row {number} of the array"
                assert near.row <= number
        held_out = 30 - len(rows.numbers)
        found = [reason.rows[0] for reason in Classifier.of(result, 0).explain(x, count=1)]
        assert sum(near.distance < 1e-6 for near in found) == 30 - held_out


# --- tables, texts and image files, and where their rows are


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A run on a table of two classes whose names are not to be believed, and its first rows."""
    folder = tmp_path_factory.mktemp("table")
    acids = np.random.default_rng(0).uniform(0, 6, 60).round(2)
    lines = [f"{acid},{'=1+1' if acid > 3 else '[red]<b>'}" for acid in acids]
    (folder / "wine.csv").write_text("\n".join(["acid,label", *lines]) + "\n")
    (folder / "new.csv").write_text("\n".join(["acid,label", *lines[:3]]) + "\n")
    run = {"dataset": f"csv:{folder / 'wine.csv'}", "clients": 2, "rounds": 2, "lr": 0.05}
    fedproto.run(**run, out=folder / "run")
    return folder


def test_rows_of_a_table_have_their_line(table) -> None:
    trained = load_client(table / "run", 0)
    near = trained.training.load(trained)
    lines = (table / "wine.csv").read_text().splitlines()
    assert len(near.numbers) > 10
    for number, label in zip(near.numbers.tolist(), near.labels, strict=True):
        place = near.place(number)
        line = int(place.removeprefix(f"{table / 'wine.csv'}, line "))
        assert lines[line - 1].endswith(f",{label}")


def test_hostile_names_stay_text(table, tmp_path) -> None:
    answer = succeed("predict", table / "run", table / "new.csv", "--why")
    assert "[red]<b> at " in answer.out
    assert "=1+1 at " in answer.out
    succeed("predict", table / "run", table / "new.csv", "--why", "--out", tmp_path / "a.csv")
    told = pd.read_csv(tmp_path / "a.csv")
    for column in ("near_prototype_1", "near_mean_2", "near_row_3_class"):
        assert set(told[column]) <= {"'=1+1", "[red]<b>"}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_answers_in_a_file_have_their_reasons(table, tmp_path, ending) -> None:
    out = tmp_path / f"answers.{ending}"
    arguments = ("predict", table / "run", table / "new.csv", "--why")
    succeed(*arguments, "--out", out)
    told = [json.loads(line) for line in succeed(*arguments, "--json").out.splitlines()]
    written = pd.read_csv(out) if ending == "csv" else pd.read_parquet(out)
    assert len(written) == len(told) == 3
    for rank in (1, 2, 3):
        near = [answer["why"]["rows"][rank - 1] for answer in told]
        assert list(written[f"near_row_{rank}"]) == [each["row"] for each in near]
        assert list(written[f"near_row_{rank}_place"]) == [each["place"] for each in near]
        distances = [each["distance"] for each in near]
        assert list(written[f"near_row_{rank}_distance"]) == pytest.approx(distances)
    distances = [answer["why"]["prototypes"][0]["distance"] for answer in told]
    assert list(written["near_prototype_1_distance"]) == pytest.approx(distances)
    assert list(written["near_prototype_1_distance"]) == list(written["prototype_distance"])


def test_image_files_are_named(tmp_path) -> None:
    draw = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(10):
            pixels = draw.integers(level - 50, level + 50, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    run = tmp_path / "run"
    fedproto.run(dataset=f"folder:{tmp_path / 'data'}", clients=1, rounds=1, out=run)
    classifier = Classifier.of(run)
    near = classifier.trained.training.load(classifier.trained)
    file = Path(near.place(int(near.numbers[3])))
    assert file.parent.name == near.labels[3]
    told = json.loads(succeed("predict", run, file, "--why", "--json").out)
    assert told["why"]["rows"][0]["place"] == str(file)
    assert told["why"]["rows"][0]["distance"] == pytest.approx(0, abs=1e-4)


def test_texts_are_named(tmp_path) -> None:
    words = {"sea": "the ship sails over water", "sky": "a bird flies high in clouds"}
    lines = []
    for number in range(20):
        label = ("sea", "sky")[number % 2]
        lines.append(json.dumps({"text": f"{words[label]} {number}", "label": label}))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    result = fedproto.run(dataset=f"text:{tmp_path / 'texts.jsonl'}", clients=1, rounds=1)
    trained = Classifier.of(result).trained
    near = trained.training.load(trained)
    for number, label in zip(near.numbers.tolist(), near.labels, strict=True):
        line = int(near.place(number).removeprefix(f"{tmp_path / 'texts.jsonl'}, line "))
        assert json.loads(lines[line - 1])["label"] == label


# --- the data is not there


@pytest.fixture
def moved(table, tmp_path):
    """A copy of the table's run whose data may be changed."""
    shutil.copytree(table / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(table), str(tmp_path)))
    shutil.copy(table / "wine.csv", tmp_path / "wine.csv")
    return tmp_path


def explain_table(folder):
    return Classifier.of(folder / "run", 0).explain(np.array([[0.5]], np.float32))[0]


def test_without_its_data_a_client_gives_prototypes_and_a_sentence(moved, table) -> None:
    assert explain_table(moved).missing is None
    (moved / "wine.csv").unlink()
    reason = explain_table(moved)
    assert len(reason.prototypes) == 2
    assert reason.rows == reason.means == ()
    assert "cannot be read" in reason.missing and "wine.csv" in reason.missing
    answer = succeed("predict", moved / "run", table / "new.csv", "--why", "--json")
    told = json.loads(answer.out.splitlines()[0])
    assert list(told["why"]) == ["prototypes"]
    assert answer.err.count("no training rows are shown: ") == 1


def test_other_data_is_not_taken_for_that_of_training(moved) -> None:
    text = (moved / "wine.csv").read_text()
    lines = text.splitlines()
    for changed, problem in (
        ("\n".join([lines[0], *reversed(lines[1:])]) + "\n", "has other"),
        (text.replace("0.", "900."), "has other inputs than in training"),
        ("\n".join(lines[:20]) + "\n", "has other labels than in training"),
    ):
        (moved / "wine.csv").write_text(changed)
        reason = explain_table(moved)
        assert problem in reason.missing
        assert reason.rows == ()


def test_data_from_python_is_in_no_file(tmp_path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    fedproto.run(dataset=[(x, np.arange(20) % 2)], rounds=1, out=tmp_path / "run")
    (reason,) = Classifier.of(tmp_path / "run", 0).explain(x[:1])
    assert "was started from Python with arrays" in reason.missing


def test_a_data_set_that_is_a_plug_in_is_not_imported(moved) -> None:
    config = moved / "run" / "config.toml"
    text = config.read_text()
    name = f'name = "csv:{moved / "wine.csv"}"'
    assert name in text
    config.write_text(text.replace(name, 'name = "evil_module_of_a_stranger:read"'))
    reason = explain_table(moved)
    assert "evil_module_of_a_stranger:read" in reason.missing
    assert "--trust-plugins" in reason.missing
    assert len(reason.prototypes) == 2


def test_an_export_has_prototypes_and_no_training_rows(table, tmp_path) -> None:
    """Training rows stay home, although the data lies where the run found it."""
    export_client(load_client(table / "run", 0), tmp_path / "member", onnx=False)
    classifier = Classifier.load(tmp_path / "member")
    (reason,) = classifier.explain(np.array([[0.5]], np.float32))
    assert reason.missing.startswith("an exported client has no training rows")
    assert reason.prototypes == explain_table(table).prototypes
    answer = succeed("predict", tmp_path / "member", table / "new.csv", "--why")
    assert "no training rows are shown: an exported client" in answer.err


def test_a_pickle_holds_no_training_rows(run_of, images) -> None:
    result, _ = run_of("fedproto")
    classifier = Classifier.of(result, 0)
    assert classifier.explain(images)[0].rows
    # A clone is fitted anew; it still knows where its client's rows are.
    assert clone(classifier).trained.training is classifier.trained.training
    stored = pickle.dumps(classifier)
    (reason, *_) = pickle.loads(stored).explain(images)
    assert reason.rows == ()
    assert reason.missing == "a classifier from a pickle has no training rows"
    few = pickle.loads(pickle.dumps(Classifier().fit(TRIANGLES, NAMES)))
    (reason,) = few.explain(np.array([[3.0, 3.0]]))
    assert (reason.rows, reason.label) == ((), "low")


def test_without_prototypes_and_data_there_are_probabilities_only(tmp_path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    run = tmp_path / "run"
    fedproto.run(dataset=[(x, np.arange(20) % 2)], algorithm="local", rounds=1, out=run)
    np.save(tmp_path / "x.npy", x[:2])
    answer = succeed("predict", run, tmp_path / "x.npy", "--why")
    assert "the probabilities are all that is known" in answer.out
    out = tmp_path / "answers.csv"
    succeed("predict", run, tmp_path / "x.npy", "--why", "--out", out)
    assert not [column for column in pd.read_csv(out) if column.startswith("near")]


# --- the command line


def test_the_table_of_reasons_shows_what_is_near(run_of, images, tmp_path) -> None:
    _, folder = run_of("fedproto")
    np.save(tmp_path / "one.npy", images[:1])
    answer = succeed("predict", folder, tmp_path / "one.npy", "--why", "--client", "1")
    classifier = Classifier.of(folder, 1)
    (reason,) = classifier.explain(images[:1])
    for near in reason.rows:
        assert f"row {near.row}, {near.name} at {near.distance:.3g}" in answer.out
    for near in reason.prototypes:
        mark = "" if near.own else "*"
        assert f"{near.name}{mark} at {near.distance:.3g}" in answer.out
    assert "L2 distances between embeddings" in answer.out


def test_more_reasons_are_shown_where_more_classes_are_asked_for(run_of, images, tmp_path) -> None:
    _, folder = run_of("closed-form")
    np.save(tmp_path / "one.npy", images[:1])
    answer = succeed("predict", folder, tmp_path / "one.npy", "--why", "--json", "--top", "5")
    assert len(json.loads(answer.out)["why"]["rows"]) == 5
    answer = succeed("predict", folder, tmp_path / "one.npy", "--why")
    assert "L2 distances between the teacher's features" in answer.out


def test_reasons_need_an_input(run_of) -> None:
    _, folder = run_of("fedproto")
    answer = fail("predict", folder, "--why")
    assert "name an input to classify" in answer.err


def test_rows_are_read_once_for_many_chunks(run_of, images, monkeypatch) -> None:
    from fedproto.inference import predictions, training_rows
    from fedproto.inference.input_files import Input
    from fedproto.inference.labelled_inputs import LabelledInput

    _, folder = run_of("fedproto")
    loaded = []
    load = training_rows.load_source
    monkeypatch.setattr(
        training_rows, "load_source", lambda *given: loaded.append(given) or load(*given)
    )
    monkeypatch.setattr(predictions, "INPUTS_PER_CHUNK", 2)
    trained = load_client(folder, 0)
    predictor = Predictor(trained, ["prototype"], explainer=Explainer.of(trained))
    inputs = [Input(str(number), x, []) for number, x in enumerate(images.reshape(-1, 1, 8, 8))]
    inputs = [each._replace(x=each.x.astype(np.float32)) for each in inputs]
    predictor.add([LabelledInput(each.name, None, each) for each in inputs])
    assert len(loaded) == 1
    assert all(len(answer["why"]["rows"]) == 3 for answer in predictor.answers)
