"""What Python programs hold, as data of a run: arrays, DataFrames and Datasets."""

import subprocess
import sys
import warnings

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from helpers.frames import as_texts, mixed_frame, same_source
from helpers.sources import build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedproto
from fedproto.data.shared.python_data import is_per_client, to_source
from fedproto.errors import ConfigError, DataError, RunFolderError

X = np.random.default_rng(2).random((60, 4)).astype(np.float32)
Y = np.arange(60) % 3
NAMES = np.array(["cat", "dog", "owl"])[Y]


def run(data, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedproto.run(dataset=data, rounds=1, device="cpu", engine="reference", **options)


# --- one pair that is divided


@pytest.mark.parametrize(
    "pair",
    [
        (X, Y),
        [X, Y],
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (X.tolist(), Y.tolist()),
        (X.tolist(), NAMES.tolist()),
        (X, pd.Series(NAMES)),
        (X, [torch.tensor(label) for label in Y]),
        (X, Y, X[:6] + 1, Y[:6]),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        (TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),) * 2,
    ],
)
def test_one_pair_is_to_be_divided(pair):
    assert not is_per_client(pair)
    source = to_source(pair, {})
    assert len(source.classes) == 3
    rows = len(source.train.y) + len(source.test.y)
    assert rows in (60, 66, 120)


@pytest.mark.parametrize(
    "clients",
    [
        [(X, Y)],
        [(X, Y), (X, Y)],
        ((X, Y), (X, Y)),
        [[X, Y], [X, Y]],
        [(X.tolist(), Y.tolist()), (X.tolist(), Y.tolist())],
        [(X, Y)] * 4,
        {"Ulm": (X, Y), "Bonn": (X, Y)},
        {"Ulm": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))},
    ],
)
def test_a_list_or_dict_of_pairs_has_one_client_each(clients):
    assert is_per_client(clients)
    result = run(clients)
    assert len(result.clients) == len(clients)
    if isinstance(clients, dict):
        assert [client["name"] for client in result.clients] == list(clients)


def test_a_pair_is_what_an_npz_file_of_it_is(tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    source = to_source((X, Y), {})
    stored = build(f"npz:{tmp_path / 'own.npz'}")
    assert source.train.x.tobytes() == stored.train.x.tobytes()
    assert source.classes == stored.classes and source.shots == stored.shots


def test_a_pair_takes_options_of_partitions_and_arrays():
    result = run((X, NAMES), clients=3, partition="iid", mean=0.5, std=0.25)
    assert [client["train"] for client in result.clients] == [16, 16, 16]
    assert {name for client in result.clients for name in client["classes"]} == set(NAMES)
    by_classes = run((X, Y), clients=4, partition="nway", ways=2, shots=3, stdev=0)
    assert [len(client["classes"]) for client in by_classes.clients] == [2] * 4


def test_a_pair_gives_what_its_file_gives(tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    one = run((X, Y), clients=3)
    other = run(f"npz:{tmp_path / 'own.npz'}", clients=3)
    assert one.metrics[0]["loss"] == other.metrics[0]["loss"]


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (5, {}, "dataset must be text; one (x, y)"),
        ([], {}, "not an empty list"),
        ({}, {}, "not an empty dict"),
        (X, {}, "not of type ndarray"),
        ((X, Y[:-1]), {}, "data has 60 inputs but 59 labels"),
        ((X, Y / 2), {}, "data has labels that are not a list of whole numbers or of text"),
        ((X, Y), {"label": "kind"}, "'label' has no meaning for arrays, which take channel_order"),
        ([(X, Y)], {"missing": "-9"}, "'missing' has no meaning for arrays"),
        ([(X, Y)], {"ways": 2}, "'ways' has no meaning for a list of arrays"),
        ({"a": (X, Y), "b": pd.DataFrame(X)}, {}, "a DataFrame for every client, or for none"),
        (pd.DataFrame({"a": [1, 2], "y": [0, 0]}), {"augment": True}, "'augment' has no meaning"),
        (pd.DataFrame({"a": [1, 2], "y": [0, 0]}), {"label": "z"}, "unknown column of the DataF"),
        ({"a": pd.DataFrame({"x": [1], "Client": [2]})}, {}, "has a column 'client': leave it out"),
        ({"a": pd.DataFrame({"x": [1]})}, {"client": "x"}, "'client' has no meaning for a dict"),
        ((pd.DataFrame(X), Y), {"label": "x"}, "'label' has no meaning for (x, y)"),
        ((pd.DataFrame(X), Y[:-1]), {}, "one label per row: there are 60 rows"),
    ],
)
def test_bad_data_from_python_is_refused_in_one_sentence(data, options, words):
    with pytest.raises((ConfigError, DataError)) as caught:
        run(data, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_name_python_alone_is_refused():
    with pytest.raises(DataError, match="stands for data that is passed from Python"):
        run("python")


# --- DataFrames


def test_a_frame_is_the_csv_that_it_would_write(tmp_path):
    frame = mixed_frame()
    frame.to_csv(tmp_path / "own.csv")
    options = {"label": "kind", "client": "site", "ignore": ("visits",)}
    source = to_source(frame, options)
    assert same_source(source, build(f"csv:{tmp_path / 'own.csv'}", **options))
    assert source.notices == ()


words = st.text("abü ,;\"'\n1", min_size=1, max_size=5).map(str.strip).filter(bool)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(
        st.tuples(
            st.floats(-1e6, 1e6) | st.none(),
            st.floats(-1e6, 1e6, width=32),
            words | st.none(),
            st.booleans() | st.none(),
            st.sampled_from(["x", "y"]),
        ),
        min_size=4,
        max_size=12,
    ),
    index=st.sampled_from([None, "row"]),
)
def test_frames_are_their_csv_to_the_bit(tmp_path, rows, index):
    rows = [*rows, *((*row[:4], label) for row in rows[:2] for label in "xy")]
    frame = pd.DataFrame(rows, columns=["size", "small", "town", "flag", "label"])
    frame = frame.astype({"small": np.float32}).rename_axis(index=index)
    frame.to_csv(tmp_path / "own.csv")
    try:
        stored = build(f"csv:{tmp_path / 'own.csv'}", keep="town")
    except DataError as error:  # such as a text in a column without training texts
        with pytest.raises(DataError) as caught:
            to_source(frame, {"keep": ("town",)})
        assert str(error).partition(": ")[2] == str(caught.value).partition(": ")[2]
    else:
        assert same_source(to_source(frame, {"keep": ("town",)}), stored)


def test_frames_of_named_clients_are_one_table_with_a_column_of_clients():
    frame = mixed_frame().drop(columns="small")
    parts = {site: part.drop(columns="site") for site, part in frame.groupby("site")}
    joined = pd.concat(parts.values())
    joined["client"] = [site for site, part in parts.items() for _ in range(len(part))]
    assert same_source(to_source(parts, {"label": "kind"}), to_source(joined, {"label": "kind"}))
    result = run(parts, label="kind")
    assert [client["name"] for client in result.clients] == ["Bonn", "Köln", "Ulm"]


def test_a_frame_of_inputs_and_its_labels():
    frame = mixed_frame().drop(columns=["small", "site"])
    kinds = frame.pop("kind")
    source = to_source((frame, kinds), {})
    assert same_source(source, to_source(frame.assign(label=kinds), {"label": "label"}))
    numbered = pd.DataFrame(X)  # columns 0 to 3
    assert to_source((numbered, NAMES), {}).classes == ("cat", "dog", "owl")
    both = to_source((numbered, NAMES, numbered[:6], NAMES[:6]), {})
    assert len(both.test.y) == 6


def test_a_classifier_takes_a_frame(tmp_path):
    frame = mixed_frame(60).drop(columns="small")
    result = run(frame, label="kind", client="site", out=tmp_path / "run")
    classifier = fedproto.Classifier.of(tmp_path / "run", 0)
    new = frame.drop(columns=["kind", "site"])
    new.to_csv(tmp_path / "new.csv", index=False)
    source = to_source(frame, {"label": "kind", "client": "site"})
    inputs = source.encoding(as_texts(new), str)
    assert classifier.predict_proba(new).tobytes() == classifier.predict_proba(inputs).tobytes()
    assert len(classifier.predict(new)) == 60 and len(result.clients) == 3
    with pytest.raises(DataError, match="the DataFrame has no column 'size', which this client"):
        classifier.predict(new.drop(columns="size"))
    strange = new.assign(home="boat")
    with pytest.warns(UserWarning, match="holds texts that no training row holds, first 'boat'"):
        classifier.predict(strange)


def test_a_run_of_a_frame_is_resumed_with_the_frame_and_its_options(tmp_path):
    frame = mixed_frame(60).drop(columns="small")
    options = {"label": "kind", "client": "site", "ignore": "visits"}
    whole = fedproto.run(dataset=frame, rounds=3, device="cpu", **options)
    steps = fedproto.stream(dataset=frame, rounds=3, device="cpu", out=tmp_path / "run", **options)
    next(steps)
    steps.close()
    with pytest.raises(RunFolderError, match="was started from Python with arrays of its own"):
        fedproto.resume(tmp_path / "run")
    with pytest.raises(RunFolderError, match="other arrays than those given"):
        fedproto.resume(tmp_path / "run", dataset=frame.assign(count=frame["count"] ** 2))
    resumed = fedproto.resume(tmp_path / "run", dataset=frame)
    assert [line["loss"] for line in resumed.metrics] == [line["loss"] for line in whole.metrics]


# --- Datasets


class Pictures(Dataset):
    classes = ("grey", "white")

    def __len__(self):
        return 20

    def __getitem__(self, row):
        if row >= 20:
            raise IndexError(row)
        return torch.full((1, 28, 28), row / 20), int(row >= 10)


class Odd(Pictures):
    def __init__(self, example):
        self.example = example

    def __getitem__(self, row):
        return self.example(row)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


def test_a_torch_dataset_with_the_names_of_its_classes():
    source = to_source(Pictures(), {})
    assert source.classes == ("grey", "white") and source.train.x.shape[1:] == (1, 28, 28)
    assert source.model == "cnn"
    assert run(Pictures(), clients=2).clients[0]["classes"] == ["grey", "white"]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Endless(), "has no length: it must be a map-style Dataset of"),
        (Odd(lambda row: torch.zeros(3)), "in every row, but row 0 is a Tensor"),
        (Odd(lambda row: (torch.zeros(row + 1), 0)), "inputs of one shape: it has (1,) and (2,)"),
        (Odd(lambda row: (torch.zeros(3), 0.5)), "labels that are not a list of whole numbers"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(dataset, words):
    with pytest.raises(DataError) as caught:
        run(dataset)
    assert words in str(caught.value)


def test_a_hub_dataset_of_a_table_of_texts_and_of_images():
    frame = mixed_frame().drop(columns=["small", "home", "visits"])
    table = datasets.Dataset.from_pandas(frame)
    assert same_source(to_source(table, {"label": "kind"}), to_source(frame, {"label": "kind"}))

    kinds = datasets.ClassLabel(names=["bad", "good"])
    texts = datasets.Dataset.from_dict(
        {"text": ["it barks", "it purrs"] * 10, "label": [0, 1] * 10, "who": ["a", "b"] * 10}
    ).cast_column("label", kinds)
    source = to_source(datasets.DatasetDict({"train": texts, "test": texts}), {"client": "who"})
    assert source.classes == ("bad", "good") and source.model == "textcnn(words=3)"
    assert set(source.train.writer) == {"a", "b"} and len(source.test.y) == 20

    pixels = [np.full((8, 8, 3), value, np.uint8) for value in range(20)]
    images = datasets.Dataset.from_dict(
        {"picture": pixels, "label": [0, 1] * 10},
        features=datasets.Features({"picture": datasets.Image(), "label": kinds}),
    )
    source = to_source(images, {})
    assert source.train.x.shape == (16, 3, 8, 8) and source.classes == ("bad", "good")
    with pytest.raises(ConfigError, match="unknown column of the Dataset 'pictures'"):
        to_source(images, {"image": "pictures"})
    with pytest.raises(DataError, match="the DatasetDict has no part 'train': it has dev"):
        to_source(datasets.DatasetDict({"dev": images}), {})


def hub_dataset(kind):
    """Return 24 rows of images or texts, four per patient, as a Hugging Face Dataset."""
    columns = {"label": ["bad", "good"] * 12, "patient": np.repeat(np.arange(6), 4).tolist()}
    if kind == "texts":
        return datasets.Dataset.from_dict({"text": ["it barks", "it purrs"] * 12} | columns)
    pixels = [np.full((8, 8, 3), value, np.uint8) for value in range(24)]
    kinds = {"label": datasets.Value("string"), "patient": datasets.Value("int64")}
    features = datasets.Features({"picture": datasets.Image()} | kinds)
    return datasets.Dataset.from_dict({"picture": pixels} | columns, features=features)


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_the_groups_of_a_hub_dataset_stay_together(kind):
    source = to_source(hub_dataset(kind), {"group": "patient"})
    in_training = set(source.train.group)
    in_test = set(source.test.group)
    assert in_training and in_test and not in_training & in_test
    assert len(in_training | in_test) == 6


@pytest.mark.parametrize("kind", ["images", "texts"])
@pytest.mark.parametrize("option", ["ignore", "keep", "missing"])
def test_an_option_of_tables_is_refused_for_images_and_texts_of_the_hub(kind, option):
    words = f"'{option}' has no meaning for a Hugging Face Dataset of {kind}: it takes label, cl"
    with pytest.raises(ConfigError, match=words):
        to_source(hub_dataset(kind), {option: ("patient",)})


# --- what is not imported


def test_runs_from_arrays_import_neither_pandas_nor_datasets():
    code = (
        "import sys, numpy as np, fedproto\n"
        "from fedproto.data.shared.python_data import to_source\n"
        "to_source((np.eye(4), [0, 0, 1, 1]), {})\n"
        "assert not {'pandas', 'pyarrow', 'datasets', 'openpyxl'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
