"""How tables and texts become numbers, and that the encoding stays with a trained member."""

import gzip
import hashlib
import json
import re
import shutil

import numpy as np
import pytest
from helpers.command_line import fedproto, only_line
from helpers.sources import animals
from hypothesis import given
from hypothesis import strategies as st

from fedproto.data import DataFolders
from fedproto.data.csv import csv
from fedproto.data.shared.feature_encoding import (
    ENCODING,
    Category,
    Columns,
    Number,
    Words,
    from_json,
    to_json,
)
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.data.text import text
from fedproto.deploy.member_data import load_source
from fedproto.deploy.settings import MemberSettings
from fedproto.errors import DataError, RunFolderError
from fedproto.inference.export.read import read_exported
from fedproto.inference.input_files import read_inputs
from fedproto.runs.folder import RunFolder


def nowhere(row):
    return f"row {row}"


def texts(*values):
    return np.array(values)


# --- by hand


def test_a_number_is_standardised_and_what_is_missing_is_the_mean():
    assert Number("size", 2.0, 4.0)(texts("2", "", "-1e1"), nowhere).tolist() == [
        [0.0],
        [0.0],
        [-3.0],
    ]


def test_a_category_is_one_input_a_text_and_a_new_one_is_nothing():
    found = Category("home", ("flat", "tree"))(texts("tree", "boat", "flat", "zoo"), nowhere)
    assert found.tolist() == [[0, 1], [0, 0], [1, 0], [0, 0]]


def test_columns_stand_side_by_side_in_their_own_order_and_say_what_is_new():
    encoding = Columns((Number("size", 0.0, 1.0), Category("home", ("", "flat"))))
    table = {"other": texts("x", "y"), "home": texts("flat", "boat"), "size": texts("3", "4")}
    assert encoding(table, nowhere).tolist() == [[3, 0, 1], [4, 0, 0]]
    assert {name: rows.tolist() for name, rows in encoding.find_unknown_texts(table).items()} == {
        "home": [1]
    }
    assert encoding.width == 3


def test_words_are_ranked_by_how_often_they_occur():
    encoding = Words.fit(["The dog", "dog eats the cat"], 3, length=4)
    assert encoding.words == ("dog", "the", "cat") and encoding.width == 4
    assert encoding(["Cat, the zebra!", "a a a a dog"]).tolist() == [[4, 3, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("tall", "but the training rows hold numbers"),
        *(("inf", "not a finite"), ("1e39", "too far"), ("-1e300", "too far")),
    ],
)
def test_what_is_no_number_is_refused_where_it_stands(value, words):
    with pytest.raises(
        DataError, match=f"^row 1: column 'size' holds '{re.escape(value)}', .*{words}"
    ):
        Number("size", 0.0, 1.0)(texts("1", value), nowhere)


# --- there and back

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
finite = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.builds(Number, names, finite, finite.filter(lambda value: value > 0))
categories = st.builds(
    Category, names, st.sets(names, min_size=1).map(lambda found: tuple(sorted(found)))
)
columns = st.lists(numbers | categories, min_size=1, unique_by=lambda column: column.name)
tables = st.builds(Columns, columns.map(tuple))
vocabularies = st.builds(
    Words, st.lists(names, min_size=1, unique=True).map(tuple), st.integers(1, 1000)
)


@given(tables | vocabularies)
def test_json_gives_back_what_it_was_given(encoding):
    assert from_json(json.loads(json.dumps(to_json(encoding))), "here") == encoding


@pytest.mark.parametrize(
    "content",
    [
        *(
            None,
            3,
            [],
            {},
            {"words": ["a"]},
            {"words": [], "length": 3},
            {"words": ["a", "a"], "length": 3},
        ),
        *(
            {"words": ["a"], "length": 0},
            {"words": ["a"], "length": True},
            {"words": [1], "length": 3},
        ),
        *({"columns": []}, {"columns": [3]}, {"columns": [{"name": "a"}]}, {"columns": {"a": 1}}),
        {"columns": [{"name": 3, "values": ["a"]}]},
        {"columns": [{"name": "a", "values": ["b", "a"]}]},
        {"columns": [{"name": "a", "values": "ab"}]},
        {"columns": [{"name": "a", "mean": 0.0, "std": 0.0}]},
        {"columns": [{"name": "a", "mean": 0.0, "std": 1.0, "foo": 1}]},
        {"columns": [{"name": "a", "mean": 0.0, "std": 1.0}, {"name": "a", "values": ["b"]}]},
        {"columns": [{"name": "a", "mean": float("nan"), "std": 1.0}]},
        {"columns": [{"name": "a", "mean": "0", "std": 1.0}]},
    ],
    ids=repr,
)
def test_anything_else_is_refused(content):
    with pytest.raises(DataError, match=r"^here is not a valid encoding: "):
        from_json(content | {"version": 1} if isinstance(content, dict) else content, "here")


# --- a source's own rows, read again


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return animals(
        tmp_path_factory.mktemp("data"), lambda generator, sound, number: f"it {sound} {number}"
    )


def test_rows_of_a_table_are_read_as_in_training(folder):
    source = csv(DataFolders(), str(folder / "animals.csv"))
    found = list(read_inputs(folder / "animals.csv", source.preprocessing))
    read = np.stack([each.x for each in found])
    assert read.shape == (75, 4) and not any(each.notices for each in found)
    assert sorted(map(tuple, read)) == sorted(
        map(tuple, np.concatenate([source.train.x, source.test.x]))
    )
    assert found[1].name == f"{folder / 'animals.csv'}, line 3"


def test_texts_are_read_as_in_training(folder):
    source = text(DataFolders(), str(folder / "animals.jsonl"), length=5)
    read = np.stack(
        [each.x for each in read_inputs(folder / "animals.jsonl", source.preprocessing)]
    )
    assert sorted(map(tuple, read)) == sorted(
        map(tuple, np.concatenate([source.train.x, source.test.x]))
    )


# --- new ones


TABLE = Preprocessing(
    (3,), encoding=Columns((Number("size", 0.0, 1.0), Category("home", ("flat", "tree"))))
)
TEXT = Preprocessing((4,), encoding=Words(("dog", "the"), 4))


def test_a_new_table_needs_no_label_and_says_what_is_new(tmp_path):
    (tmp_path / "new.csv").write_text("home;more;size\ntree;1;2\nboat;2;\n")
    first, second = read_inputs(tmp_path / "new.csv", TABLE)
    assert first.x.tolist() == [2, 0, 1]
    place = f"{tmp_path / 'new.csv'}, line 3"
    assert second.x.tolist() == [0, 0, 0]
    assert first.notices == [f"{place}: column 'home' holds 'boat', which no training row holds"]
    (tmp_path / "new.csv").write_text("home,size\nboat,1\n" + ",\n" * 1200)
    (notice,) = [
        notice for each in read_inputs(tmp_path / "new.csv", TABLE) for notice in each.notices
    ]
    assert notice.endswith(
        "2 and 1,200 more rows: column 'home' holds texts that no training row holds, first 'boat'"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "home,more\ntree,1\n",
            "has no column 'size', which this client was trained on: size, home",
        ),
        (
            "home,size\ntree,tall\n",
            "line 2: column 'size' holds 'tall', but the training rows hold numbers",
        ),
        ("home,size\n", "holds no row below its header"),
        ("3,4\n", "has no header"),
        ("\0", "its first line holds NUL characters"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, content, words):
    (tmp_path / "new.csv").write_text(content)
    with pytest.raises(DataError, match=words):
        list(read_inputs(tmp_path / "new.csv", TABLE))


@pytest.mark.parametrize("name", ["new.txt", "new.csv", "new.jsonl"])
def test_a_new_text_needs_no_label_and_says_where_it_knows_nothing(tmp_path, name):
    raw = {
        "new.txt": "The dog.",
        "new.csv": "id,text\n7,The dog.\n",
        "new.jsonl": '{"text": "The dog.", "id": 7}\n',
    }
    (tmp_path / name).write_text(raw[name])
    (found,) = read_inputs(tmp_path / name, TEXT)
    assert (found.x.tolist(), found.x.dtype, found.notices) == ([3, 2, 0, 0], np.float32, [])
    (tmp_path / name).write_text(raw[name].replace("The dog", "Zebra"))
    (found,) = read_inputs(tmp_path / name, TEXT)
    assert found.x.tolist() == [1, 0, 0, 0] and found.notices[0].endswith(
        "no word that the training texts hold"
    )


def test_texts_without_a_text_are_refused(tmp_path):
    (tmp_path / "new.jsonl").write_text('{"txt": "The dog."}\n')
    with pytest.raises(DataError, match=r"new.jsonl, line 1 has no 'text': it has txt"):
        list(read_inputs(tmp_path / "new.jsonl", TEXT))


def test_a_column_that_is_not_asked_for_may_be_as_it_likes(tmp_path):
    (tmp_path / "new.csv").write_text(f"home,notes,size\ntree,{'x' * 1500},1\n")
    assert [each.x.tolist() for each in read_inputs(tmp_path / "new.csv", TABLE)] == [[1, 0, 1]]


@pytest.mark.parametrize("name", ["new.TXT", "new.txt.gz", "new.JSONL", "new.tsv"])
def test_a_text_is_known_by_its_ending(tmp_path, name):
    raw = {"new.JSONL": '{"text": "The dog."}\n', "new.tsv": "text\tid\nThe dog.\t7\n"}.get(
        name, "The dog."
    )
    (tmp_path / name).write_bytes(
        gzip.compress(raw.encode()) if name.endswith("gz") else raw.encode()
    )
    assert [each.x.tolist() for each in read_inputs(tmp_path / name, TEXT)] == [[3, 2, 0, 0]]


@pytest.mark.parametrize("name", ["new.md", "new.json", "new.png", "new"])
@pytest.mark.parametrize("member", [TABLE, TEXT], ids=["table", "texts"])
def test_a_file_of_another_kind_is_refused_with_what_is_accepted(tmp_path, name, member):
    (tmp_path / name).write_text("text,size,home\n1,2,3\n")
    with pytest.raises(
        DataError,
        match=r"cannot be read by a client that was trained on .*: it takes .*\.csv, .*\.npy",
    ):
        list(read_inputs(tmp_path / name, member))


@pytest.mark.parametrize(("name", "content"), [("new.jsonl", ""), ("new.csv", "text\n")])
def test_a_file_without_a_text_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} holds no text"):
        list(read_inputs(tmp_path / name, TEXT))


def test_arrays_are_taken_as_they_are(tmp_path):
    np.save(tmp_path / "rows.npy", np.eye(3))
    assert [each.x.tolist() for each in read_inputs(tmp_path / "rows.npy", TABLE)] == np.eye(
        3
    ).tolist()


# --- given, or kept


def stored(path, encoding):
    path.write_text(json.dumps(to_json(encoding)))
    return str(path)


def test_a_table_may_be_read_by_anothers_encoding(folder, tmp_path):
    given = Columns((Category("home", ("boat", "tree")), Number("size", 1.0, 2.0)))
    source = csv(
        DataFolders(), str(folder / "animals.csv"), encoding=stored(tmp_path / "e.json", given)
    )
    own = csv(DataFolders(), str(folder / "animals.csv"))
    size, tree = own.encoding.columns[0], own.train.x[:, 3]
    assert source.preprocessing.encoding == given and own.encoding.columns[1].values == (
        "flat",
        "house",
        "tree",
    )
    assert source.train.x[:, 1].tolist() == tree.tolist() and not source.train.x[:, 0].any()
    assert np.allclose(
        source.train.x[:, 2], (own.train.x[:, 0] * size.std + size.mean - 1) / 2, atol=1e-6
    )


def test_texts_may_be_read_by_anothers_words(folder, tmp_path):
    given = stored(tmp_path / "e.json", Words(("hoots", "it"), 2))
    source = text(DataFolders(), str(folder / "animals.jsonl"), encoding=given)
    assert source.model == "textcnn(words=2)" and source.train.x.shape[1:] == (2,)
    assert {tuple(row) for row in source.train.x.tolist()} == {(3, 1), (3, 2)}


def test_an_encoding_of_another_kind_or_of_other_columns_is_refused(folder, tmp_path):
    words, other = Words(("it",), 2), Columns((Number("weight", 0.0, 1.0),))
    for source, file, wrong, sentence in (
        (csv, "animals.csv", words, "is the encoding of texts, but .*animals.csv is a table"),
        (
            csv,
            "animals.csv",
            other,
            "has no column 'weight', which .*e.json names: it has size, home",
        ),
        (
            text,
            "animals.jsonl",
            other,
            "is the encoding of a table, but .*animals.jsonl holds texts",
        ),
    ):
        with pytest.raises(DataError, match=sentence):
            source(DataFolders(), str(folder / file), encoding=stored(tmp_path / "e.json", wrong))
    with pytest.raises(DataError, match=r"nowhere.json cannot be read: No such file"):
        csv(DataFolders(), str(folder / "animals.csv"), encoding=str(tmp_path / "nowhere.json"))


def test_members_of_different_tables_that_agree_on_an_encoding_can_average_weights(
    folder, tmp_path
):
    """Their own would give inputs of different sizes: one of them has never seen a tree."""
    rows = (folder / "animals.csv").read_text().splitlines(keepends=True)
    few = [rows[0], *(row for row in rows[1:] if "tree" not in row)]
    (tmp_path / "few.csv").write_text("".join(few))
    agreed = stored(tmp_path / "e.json", csv(DataFolders(), str(folder / "animals.csv")).encoding)
    settings = (
        "--algorithm",
        "fedavg",
        "--clients",
        "2",
        "--shots",
        "3",
        "--rounds",
        "1",
        "--model",
        "mlp",
    )
    mixed = f"csv:{folder / 'animals.csv'},csv:{tmp_path / 'few.csv'}"
    apart = fedproto("run", "--dataset", mixed, *settings, "--out", tmp_path / "apart")
    assert "fedavg shares weights within each of 2 architectures" in apart.out
    answer = fedproto(
        "run", "--dataset", f"{mixed}(encoding={agreed})", *settings, "--out", tmp_path / "run"
    )
    assert answer.code == 0, answer.err
    assert "architectures" not in answer.out


def test_a_deployed_members_columns_keep_their_meaning_while_its_table_grows(folder, tmp_path):
    table = shutil.copy(folder / "animals.csv", tmp_path / "mine.csv")
    own = MemberSettings("a", f"csv:{table}", state=str(tmp_path / "state"))
    before = load_source(own)
    with table.open("a") as file:
        file.write("".join(f"{number}.5,boat,0,cat\n" for number in range(20)))
    after = load_source(own)
    assert len(after.train.y) == len(before.train.y) + 16 and after.encoding == before.encoding
    assert csv(DataFolders(), str(table)).encoding != before.encoding


# --- with a trained member


NEW = {
    "csv": ("animals.csv", "home,size\nflat,-0.5\ntree,2.5\nboat,0\n"),
    "text": (
        "animals.jsonl",
        '{"text": "listen: it hoots"}\n{"text": "it barks"}\n{"text": "moo"}\n',
    ),
}


@pytest.mark.parametrize("kind", NEW)
def test_an_exported_member_reads_new_rows_where_its_data_is_gone(kind, folder, tmp_path):
    data, content = NEW[kind]
    mine = shutil.copytree(folder, tmp_path / "data") / data
    settings = (
        "--clients",
        "3",
        "--ways",
        "3",
        "--stdev",
        "0",
        "--shots",
        "6",
        "--rounds",
        "15",
        "--lr",
        "0.1",
    )
    run, new, exported = (
        tmp_path / "run",
        tmp_path / f"new.{data.split('.')[1]}",
        tmp_path / "exported",
    )
    assert fedproto("run", "--dataset", f"{kind}:{mine}", *settings, "--out", run).code == 0
    new.write_text(content)
    answer = fedproto("predict", run, new, "--json")
    assert answer.code == 0, answer.err
    lines = [json.loads(line) for line in answer.out.splitlines()]
    assert [line["input"] for line in lines] == [
        f"{new}, line {n}" for n in ((2, 3, 4) if kind == "csv" else (1, 2, 3))
    ]
    wanted = {"csv": ["cat", "owl"], "text": ["owl", "dog"]}[kind]
    assert [line["head"]["label"] for line in lines][:2] == wanted
    assert ("no training row holds" if kind == "csv" else "no word that the training") in only_line(
        answer.err
    )
    about_rejecting, told = fedproto("export", run, "--to", exported, "--no-onnx").err.splitlines()
    assert "client 0 has" in about_rejecting and "states no threshold" in about_rejecting
    assert told.startswith(f"{exported / ENCODING} ") and told.endswith(
        ": read it before you hand it on"
    )
    mine.write_text(
        mine.read_text().replace("it ", "listen ").replace("0.", "10.")
    )  # what it learnt stays learnt
    assert fedproto("predict", run, new, "--json").out == answer.out
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(run)
    again = fedproto("predict", exported, new, "--json")
    assert (again.code, again.out, again.err) == (0, answer.out, answer.err)


def test_what_the_model_makes_no_finite_number_of_is_refused(folder, tmp_path):
    settings = ("--clients", "2", "--shots", "3", "--rounds", "1", "--out", tmp_path / "run")
    assert fedproto("run", "--dataset", f"csv:{folder / 'animals.csv'}", *settings).code == 0
    (tmp_path / "new.csv").write_text("home,size\nflat,1\nflat,1e37\n")
    answer = fedproto("predict", tmp_path / "run", tmp_path / "new.csv")
    assert answer.code == 2 and "new.csv, line 3 is out of range" in only_line(answer.err)


def test_clients_of_tables_and_of_texts_each_have_their_own_encoding(folder, tmp_path):
    data = f"csv:{folder / 'animals.csv'}*2,text:{folder / 'animals.jsonl'}(length=5)*2"
    settings = (
        "--clients",
        "4",
        "--shots",
        "3",
        "--rounds",
        "1",
        "--set",
        "dim=8",
        "--out",
        tmp_path / "run",
    )
    answer = fedproto(
        "run", "--dataset", data, "--model", "mlp(width=8)*2,textcnn(width=8)*2", *settings
    )
    assert answer.code == 0, answer.err
    found = RunFolder(tmp_path / "run").encodings()
    assert [type(found[client]) for client in range(4)] == [Columns, Columns, Words, Words]
    assert len(json.loads((tmp_path / "run" / ENCODING).read_text())["encodings"]) == 2
    RunFolder(tmp_path / "run").write_json(ENCODING, {"encodings": [], "clients": [0]})
    with pytest.raises(RunFolderError, match=r"encoding.json is damaged"):
        RunFolder(tmp_path / "run").encodings()


def test_an_encoding_that_does_not_fit_its_member_is_refused(folder, tmp_path):
    run, exported = tmp_path / "run", tmp_path / "exported"
    settings = ("--clients", "2", "--shots", "3", "--rounds", "1", "--out", run)
    assert fedproto("run", "--dataset", f"csv:{folder / 'animals.csv'}", *settings).code == 0
    assert fedproto("export", run, "--to", exported, "--no-onnx").code == 0
    assert json.loads((exported / ENCODING).read_text())["columns"][1]["values"] == [
        "flat",
        "house",
        "tree",
    ]
    other = '{"version": 2, "words": ["a"], "length": 3}'
    for content, words in (
        (
            other.replace("2", "1"),
            r"encoding.json makes inputs of shape \(3,\), where \(4,\) is wanted",
        ),
        ("{", "encoding.json is not valid JSON"),
        ('{"version": 1}', "encoding.json is not a valid encoding"),
        (other, r"encoding.json has version '2'; this fedproto reads version 1"),
        (
            '{"words": ["a"], "length": 3}',
            r"encoding.json states no version; this fedproto reads version 1",
        ),
    ):
        (exported / ENCODING).write_text(content)
        with pytest.raises(DataError, match=r"encoding.json is corrupted or from another export"):
            read_exported(exported)
        manifest = json.loads((exported / "manifest.json").read_text())
        manifest["files"][ENCODING] = hashlib.sha256(content.encode()).hexdigest()
        (exported / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=words):
            read_exported(exported)
