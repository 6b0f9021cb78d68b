"""Texts from files written byte by byte, and the model that reads texts."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto
from helpers.data_files import write
from helpers.sources import animals, build, refusal
from helpers.tiny import SETTINGS
from torch.nn import functional as F

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.data import DataFolders
from fedproto.data.shared.feature_encoding import from_json, to_json
from fedproto.engines.vectorised import layer_support
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.errors import ConfigError, DataError
from fedproto.inference.input_files import read_inputs
from fedproto.models import Fit
from fedproto.runs.experiment import Experiment

# --- text: what is read


LINES = [
    ("The cat, the CAT!", "cat"),
    ("a cat's life", "cat"),
    ("The dog", "dog"),
    ("dog eats dog", "dog"),
]


#: dog 2 and the 3, three times each; cat 4, twice; a 5, cat's 6, eats 7, life 8, once each.
ROWS = [[3, 4, 3, 4, 0], [5, 6, 8, 0, 0], [3, 2, 0, 0, 0], [2, 7, 2, 0, 0]]


def as_jsonl(lines):
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in lines)


def as_csv(lines):
    return "label;text\n" + "".join(f'{label};"{text}"\n' for text, label in lines)


def as_folder(path, lines):
    for number, (text, label) in enumerate(lines):
        write(path / label / f"{number}.txt", text)


def text_folder(path, kind):
    """The four lines to train with, and a line with a word that none of them has to test with."""
    for part, lines in (
        ("train", LINES),
        ("test", [("the elephant and the dog too", "dog"), ("", "cat")]),
    ):
        if kind == "txt":
            as_folder(path / part, lines)
        else:
            raw = (as_jsonl if kind.startswith("jsonl") else as_csv)(lines)
            write(path / f"{part}.{kind}", raw, gzip.compress if kind.endswith("gz") else bytes)
    return f"text:{path}"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "csv", "csv.gz", "tsv"])
def test_text_by_hand(tmp_path, kind):
    source = build(text_folder(tmp_path, kind), length=5)
    assert source.classes == ("cat", "dog")
    assert sorted(source.train.x.tolist()) == sorted(ROWS)
    assert dict(zip(source.train.y.tolist(), source.train.x.tolist(), strict=False))[1] in ROWS[2:]
    tested = dict(zip(source.test.y.tolist(), source.test.x.tolist(), strict=True))
    assert tested == {
        1: [3, 1, 1, 3, 2],
        0: [0, 0, 0, 0, 0],
    }  # unknown words are 1, five words are kept
    assert source.model == "textcnn(words=7)"


def test_text_keeps_the_most_frequent_words(tmp_path):
    source = build(text_folder(tmp_path, "jsonl"), length=5, vocabulary=3)
    known = [[each if each < 5 else 1 for each in row] for row in ROWS]
    assert source.train.x.tolist() == known and source.model == "textcnn(words=3)"


def test_text_of_a_table_may_be_as_long_as_a_book(tmp_path):
    """Python's csv reader would stop at 131,072 characters."""
    lines = [("dog " * 50_000, "dog"), ("cat " * 50_000, "cat")] * 2
    source = build(f"text:{write(tmp_path / 'own.csv', as_csv(lines))}", length=3)
    assert sorted(source.train.x.tolist()) == [[2, 2, 2], [3, 3, 3]]


def test_text_ids_travel_exactly(tmp_path):
    source = build(text_folder(tmp_path, "jsonl"), length=5)
    assert source.tensor(source.train, np.arange(4)).tolist() == ROWS
    high = torch.tensor([2**24 - 1], dtype=torch.int32)
    assert high.float().long().tolist() == [2**24 - 1]


def test_text_without_a_test_set_holds_out_a_fifth_of_each_class(tmp_path):
    as_folder(tmp_path, [(f"word{number}", "xy"[number % 2]) for number in range(20)])
    source = build(f"text:{tmp_path}")
    assert np.bincount(source.train.y).tolist() == [8, 8] and np.bincount(
        source.test.y
    ).tolist() == [2, 2]
    assert (source.test.x[:, 0] == 1).all()  # what is held out does not make the vocabulary


def test_text_clients_and_labels_may_be_numbers(tmp_path):
    lines = [{"text": f"w{n}", "label": n % 2, "client": 10 + n % 2} for n in range(20)]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    path = write(tmp_path / "own.jsonl", content)
    source = build(f"text:{path}")
    assert source.classes == ("0", "1")
    assert source.train.writer.tolist() == [f"1{label}" for label in source.train.y]


BAD_TEXTS = [
    ("own.jsonl", '{"text": "a", "label": "x"}\n{"text": ', "own.jsonl, line 2 is not valid JSON"),
    ("own.jsonl", "[1, 2]\n", "own.jsonl, line 1 is not a JSON object like"),
    (
        "own.jsonl",
        '{"text": "a"}\n',
        "own.jsonl has no column 'label', 'class', 'target' or 'y': it has text",
    ),
    ("own.jsonl", '{"label": "a", "text": 3.5}\n', "own.jsonl has no column 'text': it has label"),
    (
        "own.jsonl",
        '{"text": "a", "label": "x"}\n{"text": "b"}\n',
        "line 2 has no 'label' that is a text or a whole",
    ),
    ("own.jsonl", '{"text": "a", "label": ""}\n', "own.jsonl, line 1 has no label"),
    (
        "own.jsonl",
        '{"text": "a", "label": "x"}\n{"text": "a", "label": "\\ud83d"}\n',
        "own.jsonl, line 2 has the label "
        r"'\ud83d', which holds half a character and cannot be written in UTF-8",
    ),
    (
        "own.jsonl",
        '{"text": "a", "label": "x", "client": " "}\n',
        "own.jsonl, line 1 has no client: fill in 'client'",
    ),
    (
        "own.csv",
        "text,label,client\na,x,p\nb,x,\n",
        "own.csv, line 3 has no client: fill in 'client', or leave it out",
    ),
    ("own.jsonl", '{"text": "a", "label": "x"}\n', "class 'x' has one row, but two are needed"),
    (
        "own.jsonl",
        '{"text": "!", "label": "x"}\n{"text": "?", "label": "x"}\n',
        "no word in its training texts",
    ),
    ("own.jsonl", "", "own.jsonl holds no text"),
    ("own.csv", "a,label\nx,y\n", "own.csv has no column 'text': it has a, label"),
    (
        "own.csv",
        "text,label\nx,y,z\n",
        "own.csv, line 2 has 3 values, but the header names 2 columns",
    ),
    ("cat/1.txt", b"\xff", "1.txt is not in UTF-8"),
    ("cat/1.md", "x", "holds no text: a folder must hold one folder of .txt files per class"),
    ("train/cat/1.txt", "x", "is a folder that does not hold train and test"),
]


@pytest.mark.parametrize(("name", "raw", "words"), BAD_TEXTS)
def test_unusable_texts_are_refused(tmp_path, name, raw, words):
    path = write(tmp_path / "data" / name, raw)
    assert words in refusal(f"text:{path if name.startswith('own') else tmp_path / 'data'}")


def test_a_label_column_that_is_not_there_is_refused(tmp_path):
    message = refusal(f"text:{write(tmp_path / 'own.csv', as_csv(LINES))}", label="labels")
    assert "unknown column of" in message and "did you mean 'label'?" in message


# --- textcnn


def textcnn(length=9, classes=3, dim=None, **options):
    torch.manual_seed(0)
    small = {"words": 10, "embedding": 4, "filters": 3, "width": 5} | options
    return (
        plugins.build("model", Part("textcnn", small), Fit((length,), classes, dim)).double().eval()
    )


def kims(p, ids):
    """Kim 2014, section 2: c_i = w · x[i : i+h] + b for each window, then the maximum."""
    vectors = p["body.words.vectors.weight"][ids] * (ids != 0)[:, :, None]
    found = []
    for number, height in enumerate((3, 4, 5)):
        weight, bias = (p[f"body.convs.widths.{number}.{end}"] for end in ("weight", "bias"))
        weight = weight[:, :, 0].transpose(1, 2).flatten(1)  # word after word
        places = [
            vectors[:, i : i + height].flatten(1) @ weight.T + bias
            for i in range(ids.shape[1] - height + 1)
        ]
        found.append(torch.stack(places).max(0).values)
    hidden = F.relu(torch.cat(found, 1))
    features = F.relu(F.linear(hidden, p["body.fc1.weight"], p["body.fc1.bias"]))
    return features, F.linear(features, p["head.fc2.weight"], p["head.fc2.bias"])


def test_textcnn_computes_kims_network():
    model, ids = textcnn(), torch.randint(0, 12, (6, 9))
    ids[0], ids[1, 4:] = 0, 0
    for found, wanted in zip(model(ids.double()), kims(model.state_dict(), ids), strict=True):
        torch.testing.assert_close(found, wanted)


def test_textcnn_takes_words_beyond_its_own_as_unknown():
    model, ids = textcnn(), torch.tensor([[2.0, 11, 12, 400, 3, 4, -1, 5, 0]])
    known = torch.tensor([[2.0, 11, 1, 1, 3, 4, 1, 5, 0]])
    assert model(ids)[1].equal(model(known)[1])


def test_textcnn_learns_nothing_from_padding():
    model = textcnn().train()
    model(torch.tensor([[2.0, 3, 4, 5, 6, 0, 0, 0, 0]] * 2))[1].sum().backward()
    gradient = model.body.words.vectors.weight.grad
    assert not gradient[0].any() and gradient[2:7].any()


def test_textcnn_dim_projects_the_features():
    features, logits = textcnn(dim=7)(torch.zeros(2, 9).double())
    assert features.shape == (2, 7) and logits.shape == (2, 3)


@pytest.mark.parametrize("shape", [(4,), (1, 8, 8)])
def test_textcnn_refuses_what_is_no_row_of_words(shape):
    with pytest.raises(ConfigError, match="takes texts of at least 5 word ids per row"):
        plugins.build("model", Part("textcnn"), Fit(shape, 3))


# --- textmean


def textmean(**options):
    torch.manual_seed(0)
    small = {"words": 10, "width": 5} | options
    return plugins.build("model", Part("textmean", small), Fit((9,), 3)).double().eval()


def test_textmean_is_the_mean_of_word_vectors_by_their_importance():
    model = textmean()
    torch.nn.init.normal_(model.body.words.importance.weight)
    ids = torch.tensor([3, 7, 3, 0, 0, 0, 0, 0, 0])
    vectors = model.body.words.vectors.weight
    factor = model.body.words.importance.weight[:, 0].exp()
    total = 2 * factor[3] * vectors[3] + factor[7] * vectors[7]
    features, logits = model(ids[None].double())
    torch.testing.assert_close(features[0], total / (2 * factor[3] + factor[7]))
    torch.testing.assert_close(logits, model.head.fc1(features))


def test_textmean_of_a_text_without_words_is_zero_and_unknown_words_are_one_word():
    model = textmean()
    assert not model(torch.zeros(1, 9).double())[0].any()
    ids = torch.tensor([[2.0, 11, 12, 400, 3, 4, -1, 5, 0]]).double()
    known = torch.tensor([[2.0, 11, 1, 1, 3, 4, 1, 5, 0]]).double()
    assert model(ids)[1].equal(model(known)[1])


def test_textmean_refuses_what_is_no_row_of_words():
    with pytest.raises(ConfigError, match="takes rows of word ids"):
        plugins.build("model", Part("textmean"), Fit((1, 8, 8), 3))


# --- federations


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts with the sound somewhere among other words."""

    def said(generator, sound, number):
        words = [sound, *(f"w{n}" for n in generator.integers(0, 30, generator.integers(1, 12)))]
        return " ".join(generator.permutation(words))

    return animals(tmp_path_factory.mktemp("data"), said)


def experiment(engine, algorithm="fedproto", **options):
    return Experiment.prepare(
        configure(SETTINGS | {"engine": engine, "algorithm": algorithm} | options)[0]
    )


SMALL_TEXT = "textcnn(embedding=6, filters=4, width=8)"


@pytest.mark.parametrize("algorithm", ["fedproto", "fedavg", "fedrep"])
@pytest.mark.parametrize(
    ("data", "model"), [("csv:{}/animals.csv", "mlp"), ("text:{}/animals.jsonl", SMALL_TEXT)]
)
def test_engines_agree(folder, data, model, algorithm):
    options = {
        "dataset": data.format(folder),
        "model": model,
        "ways": 2,
        "shots": 3,
        "test_shots": 3,
    }
    runs = [experiment(engine, algorithm, **options) for engine in ("reference", "vectorised")]
    assert isinstance(runs[1].engine, VectorisedEngine) and not runs[1].notices
    first, second = [run.execute() for run in runs]
    for mine, theirs in zip(first.states, second.states, strict=True):
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-8
    for mine, theirs in zip(first.clients, second.clients, strict=True):
        assert mine | {"metrics": 0} == theirs | {"metrics": 0}  # metrics are compared elsewhere


def test_texts_come_out_the_same_by_the_layers_of_a_gpu(folder, monkeypatch):
    options = {
        "dataset": f"text:{folder}/animals.jsonl(length=15)",
        "model": SMALL_TEXT,
        "shots": 3,
    }
    first = experiment("reference", **options).execute()
    monkeypatch.setattr(layer_support, "on_gpu", lambda x: True)
    second = experiment("vectorised", **options).execute()
    for mine, theirs in zip(first.states, second.states, strict=True):
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-8


def test_tables_and_texts_are_one_federation(folder):
    """They share nothing but the names of three animals, and both learn to tell them apart."""
    run = experiment(
        "vectorised",
        dataset=f"csv:{folder}/animals.csv*2,text:{folder}/animals.jsonl(length=15)*2",
        model="mlp(width=8)*2,textcnn(embedding=20, filters=10, width=8, dropout=0)*2",
        ways=3,
        stdev=0,
        shots=8,
        rounds=30,
        test_shots=5,
    )
    result = run.execute()
    assert run.federation.classes == ("cat", "dog", "owl")
    assert min(client["accuracy"]["head"] for client in result.clients) > 0.5


@pytest.mark.parametrize("data", ["csv:{}/animals.csv", "text:{}/animals.jsonl"])
def test_the_model_that_the_data_names_and_natural_clients(folder, data):
    options = {"dataset": data.format(folder), "model": "auto", "partition": "natural", "rounds": 1}
    kept = {
        key: value for key, value in SETTINGS.items() if key not in ("shots", "stdev", "test_shots")
    }
    for algorithm in ("fedproto", "fedproto-mh"):
        run = Experiment.prepare(configure(kept | {"algorithm": algorithm} | options)[0])
        names = {member.model for member in run.federation.members}
        assert len(names) == (1 if algorithm == "fedproto" else 3)
        assert sum(len(member.train) for member in run.federation.members) == 60
        run.execute()


def test_a_run_of_texts_can_be_resumed_from_its_folder(folder, tmp_path):
    """Vocabulary and classes are made again from the files, the same."""
    options = (
        "--dataset",
        f"text:{folder}/animals.jsonl",
        "--clients",
        "4",
        "--shots",
        "4",
        "--rounds",
        "2",
    )
    answer = fedproto("run", *options, "--set", "length=20", "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    again = fedproto("run", tmp_path / "run" / "config.toml", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    one, two = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "again")
    )
    assert one["clients"] == two["clients"]


def test_numbers_with_a_stray_word_or_decimal_commas_are_refused(tmp_path):
    for name, odd, rest in (("word", "about 3", "."), ("comma", "1,5", ",")):
        rows = [f"{i}{rest}25;{'ab'[i % 2]}" for i in range(40)]
        rows[7] = f"{odd};b"
        (tmp_path / f"{name}.csv").write_text("a;label\n" + "\n".join(rows) + "\n")
        with pytest.raises(DataError, match="most of its values are numbers"):
            plugins.build("dataset", Part(f"csv:{tmp_path / name}.csv"), DataFolders())
    rows = ["?;a" if i == 4 else f"{i};{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "missing.csv").write_text("a;label\n" + "\n".join(rows) + "\n")
    assert (
        plugins.build("dataset", Part(f"csv:{tmp_path}/missing.csv"), DataFolders()).train.x.shape[
            1
        ]
        == 1
    )


def test_a_hidden_folder_is_no_class(tmp_path):
    for part in ("train", "test"):
        for label in ("good", "bad"):
            for number in range(3):
                file = tmp_path / part / label / f"{number}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{label} word{number}")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert plugins.build("dataset", Part(f"text:{tmp_path}"), DataFolders()).classes == (
        "bad",
        "good",
    )


# --- columns by name


NAMED = "body,kind,site,text\n" + "it barks,dog,Ulm,-\nit purrs,cat,Bonn,-\n" * 5


def test_the_columns_of_text_label_and_client_can_be_named(tmp_path):
    path = write(tmp_path / "own.csv", NAMED)
    source = build(f"text:{path}", text="body", label="kind", client="site")
    assert source.classes == ("cat", "dog") and set(source.train.writer) == {"Ulm", "Bonn"}
    assert set(source.encoding.words) == {"it", "barks", "purrs"}
    again = from_json(json.loads(json.dumps(to_json(source.encoding))), "here")
    assert again == source.encoding and again.column == "body"
    new = write(tmp_path / "new.csv", "body\nit barks\n")
    (only,) = read_inputs(new, replace(source.preprocessing, encoding=again))
    assert only.x.tolist() == source.encoding(["it barks"])[0].tolist()
    with pytest.raises(DataError, match="has no 'body': it has text"):
        list(read_inputs(write(tmp_path / "new.csv", "text\nit barks\n"), source.preprocessing))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": "bodies"}, "unknown column of"),
        ({"client": "sites"}, "unknown column of"),
        ({"text": "kind", "label": "kind"}, "must be different columns, not kind, kind"),
        ({"text": "body"}, "name the column with label=COLUMN"),
    ],
)
def test_columns_that_are_not_there_or_named_twice_are_refused(tmp_path, options, words):
    assert words in refusal(f"text:{write(tmp_path / 'own.csv', NAMED)}", **options)


def test_a_folder_of_texts_has_no_columns_to_name(tmp_path):
    for name in ("a/1.txt", "a/2.txt", "b/1.txt", "b/2.txt"):
        write(tmp_path / name, "it barks")
    assert "text names column 'body', but" in refusal(f"text:{tmp_path}", text="body")


def test_texts_with_the_index_that_pandas_writes_and_in_another_encoding(tmp_path):
    path = write(tmp_path / "own.csv", f",text,label\n{ROWS_OF_KOELN}".encode("latin-1"))
    source = build(f"text:{path}", text_encoding="latin-1")
    assert "köln" in source.encoding.words and source.encoding.text_encoding == "latin-1"
    new = write(tmp_path / "new.txt", "Köln".encode("latin-1"))
    (only,) = read_inputs(new, source.preprocessing)
    assert only.notices == []


ROWS_OF_KOELN = "".join(f"{row},in Köln,{'ab'[row % 2]}\n" for row in range(10))
