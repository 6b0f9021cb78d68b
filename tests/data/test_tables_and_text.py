"""Tables and texts of a user's own, from files written byte by byte, and the model that reads texts."""

import csv
import gzip
import json
import math

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto, only_line
from helpers.sources import animals, build, refusal
from helpers.tiny import SETTINGS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.data import DataFolders, hold_out
from fedproto.engines.vectorised import layers as stacked
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.errors import ConfigError, DataError
from fedproto.models import Fit
from fedproto.runs.experiment import Experiment


def write(path, content, pack=bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(content if isinstance(content, bytes) else content.encode()))
    return path


def split_table(folder, train, test, **options):
    """A source of two tables that say themselves which rows are for testing, so that nothing is drawn."""
    write(folder / "train.csv", train)
    write(folder / "test.csv", test)
    return build(f"csv:{folder}", **options)


# --- csv: what is read ------------------------------------------------------------------------------------------------

TRAIN = "age,town,label\n1,Ulm,yes\n3,Bonn,no\n"
TEST = "age,town,label\n5,Bonn,yes\n2,Rome,no\n"


def test_csv_by_hand(tmp_path):
    """Ages 1 and 3: mean 2, deviation 1. Bonn and Ulm are two inputs; Rome, which nobody trains with, is neither."""
    source = split_table(tmp_path, TRAIN, TEST)
    assert source.classes == ("no", "yes")
    assert source.train.y.tolist() == [1, 0] and source.test.y.tolist() == [1, 0]
    assert source.train.x.tolist() == [[-1, 0, 1], [1, 1, 0]]
    assert source.test.x.tolist() == [[3, 1, 0], [0, 0, 0]]
    assert source.train.x.dtype == np.float32
    assert (source.model, source.mixed_model) == ("mlp", "mlp-mh")
    assert source.tensor(source.test, np.array([0])).tolist() == [
        [3, 1, 0]
    ]  # as it is: no scale, no mean


def test_csv_missing_numbers_are_the_mean_and_missing_texts_a_value_of_their_own(tmp_path):
    train = "age,town,label\n1,Ulm,a\n,,a\n3,NA,b\nNA,Ulm,b\n"
    source = split_table(tmp_path, train, "age,town,label\n,Ulm,a\n5,,b\n")
    assert source.train.x.tolist() == [[-1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert source.test.x.tolist() == [[0, 0, 1], [3, 1, 0]]


def test_csv_a_column_that_never_changes_is_zero_in_spite_of_rounding(tmp_path):
    """The mean of three times 0.1 is not 0.1: divided by that deviation, 0.2 would be 10^16."""
    source = split_table(tmp_path, "a,label\n" + "0.1,x\n" * 3, "a,label\n0.2,x\n")
    assert source.train.x.tolist() == [[0]] * 3 and source.test.x[0, 0] == pytest.approx(0.1)


def test_csv_columns_that_never_change_or_are_never_filled_are_zero(tmp_path):
    source = split_table(tmp_path, "a,b,label\n7,,x\n7,,y\n", "a,b,label\n7,,x\n8,2,y\n")
    assert source.train.x.tolist() == [[0, 0], [0, 0]]
    assert source.test.x.tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_csv_delimiters_line_ends_and_byte_order_marks(tmp_path, mark, end, bom):
    source = split_table(
        tmp_path, *((bom + text).replace(",", mark).replace("\n", end) for text in (TRAIN, TEST))
    )
    assert source.train.x.tolist() == [[-1, 0, 1], [1, 1, 0]] and source.classes == ("no", "yes")


def test_csv_quotes_blank_lines_and_blanks_around_values(tmp_path):
    train = '"a, in cm";label\n\n" 1 ";"the ""first"""\n3;two\n\n'
    source = split_table(tmp_path, train, '"a, in cm";label\n5;two\n')
    assert source.train.x.tolist() == [[-1], [1]] and source.test.x.tolist() == [[3]]
    assert source.classes == ("two", 'the "first"')


def test_csv_gz(tmp_path):
    write(tmp_path / "train.csv.gz", TRAIN, gzip.compress)
    write(tmp_path / "test.csv", TEST)
    assert build(f"csv:{tmp_path}").train.x.tolist() == [[-1, 0, 1], [1, 1, 0]]


def test_csv_a_single_file_holds_out_a_fifth_of_each_class(tmp_path):
    """And the held-out rows have no part in mean and deviation."""
    rows = "".join(f"{number},{number % 2}\n" for number in range(20))
    source = build(f"csv:{write(tmp_path / 'own.csv', 'a,y' + chr(10) + rows)}")
    train, test = hold_out(np.arange(20) % 2)
    numbers = np.arange(20.0)
    wanted = (numbers - numbers[train].mean()) / numbers[train].std()
    np.testing.assert_allclose(source.train.x[:, 0], wanted[train], rtol=1e-6)
    np.testing.assert_allclose(source.test.x[:, 0], wanted[test], rtol=1e-6)
    assert np.bincount(source.test.y).tolist() == [2, 2]


def test_csv_the_test_table_may_have_its_columns_in_another_order(tmp_path):
    source = split_table(tmp_path, "a,b,label\n1,5,x\n3,5,y\n", "label,b,a\nx,5,5\n")
    assert source.test.x.tolist() == [[3, 0]]


@pytest.mark.parametrize(
    ("header", "options", "label"),
    [
        ("a,b,c", {}, "c"),
        ("a,label,c", {}, "label"),
        ("y,class,c", {}, "class"),
        ("a,Target,c", {}, "Target"),
        ("label,b,c", {"label": "b"}, "b"),
        ("a,b,client", {}, "b"),
        ("a,b,c", {"client": "c"}, "b"),
        ("a,b,c", {"ignore": "c"}, "b"),
    ],
)
def test_csv_which_column_is_the_label(tmp_path, header, options, label):
    names = header.split(",")
    row = ",".join("dog" if name == label else "1" for name in names)
    assert split_table(tmp_path, f"{header}\n{row}\n", f"{header}\n{row}\n", **options).classes == (
        "dog",
    )


def test_csv_clients_stay_with_their_rows_and_are_no_input(tmp_path):
    rows = "".join(f"{n},{n % 2},{'ann' if n % 2 else 'bob'}\n" for n in range(20))
    source = build(f"csv:{write(tmp_path / 'own.csv', 'a,label,client' + chr(10) + rows)}")
    assert source.train.x.shape[1] == 1
    for part in (source.train, source.test):
        assert part.writer.tolist() == ["ann" if label else "bob" for label in part.y]


def test_csv_ignored_columns_are_no_input_however_long(tmp_path):
    source = split_table(
        tmp_path, f"a,note,label\n1,{'x' * 2000},u\n3,,v\n", "a,note,label\n5,,u\n", ignore="note"
    )
    assert source.train.x.tolist() == [[-1], [1]]


def test_csv_codes_are_texts_and_keep_their_zeros(tmp_path):
    source = split_table(tmp_path, "a,label\n1_0,007\n1_1,7\n", "a,label\n1_0,7\n")
    assert source.train.x.tolist() == [[1, 0], [0, 1]] and source.classes == ("7", "007")


def test_csv_many_chunks_are_one_column(tmp_path):
    """A text in the last row makes a text of every number before it."""
    rows = "".join(f"7,{number % 2}\n" for number in range(10_001))
    source = split_table(tmp_path, f"a,label\n{rows}x,0\n", "a,label\n7,1\n")
    assert source.train.x.shape == (10_002, 2) and source.test.x.tolist() == [[1, 0]]
    assert source.train.x.sum(0).tolist() == [10_001, 1]


VALUE = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8)
WORDS = VALUE.filter(lambda text: text != "NA")
NUMBERS = st.none() | st.floats(-1e6, 1e6).map(lambda x: round(x, 3))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(NUMBERS, WORDS.map(lambda text: f"_{text}"), st.sampled_from("abc")), min_size=3
    ),
    mark=st.sampled_from(",;\t"),
)
def test_csv_written_and_read_back(tmp_path, rows, mark):
    """Against plain Python, value by value."""
    for name in ("train.csv", "test.csv"):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.writer(file, delimiter=mark)
            writer.writerows(
                [("number", "word", "label"), *(("" if n is None else n, w, c) for n, w, c in rows)]
            )
    source = build(f"csv:{tmp_path}", keep="word")
    known = [number for number, _, _ in rows if number is not None]
    mean = math.fsum(known) / len(known) if known else 0
    std = (
        math.sqrt(math.fsum((number - mean) ** 2 for number in known) / len(known))
        if len(set(known)) > 1
        else 1
    )
    words = sorted({word for _, word, _ in rows})
    for row, (number, word, _) in zip(source.train.x, rows, strict=True):
        assert row[0] == pytest.approx(
            0 if number is None else (number - mean) / std, rel=1e-5, abs=1e-5
        )
        assert row[1:].tolist() == [float(word == each) for each in words]
    assert [source.classes[y] for y in source.train.y] == [label for _, _, label in rows]
    assert source.test.x.tolist() == source.train.x.tolist()


# --- csv: what is refused ---------------------------------------------------------------------------------------------

BAD_TABLES = [
    (b"", {}, "has no header: its first line must name every column in words, but it holds nothing"),
    (b"\na,b\n1,2\n", {}, "has no header"),
    (b"5.1,3.5,setosa\n4.9,3.0,setosa\n", {}, "has no header: its first line must name every column in words, but it "
     "holds '5.1'"),
    (b",a,label\n0,1,x\n", {}, "has no header: its first line must name every column in words, but it holds ''"),
    (b"a,a,label\n1,2,x\n", {}, "names two columns 'a'"),
    (b"a,label\n", {}, "holds no row below its header"),
    (b"label\nx\nx\n", {}, "needs a column of classes and another of inputs, besides any column of clients: it has label"),
    (b"client\nx\nx\n", {}, "needs a column of classes and another of inputs"),
    (b"a,b\nx,y\nx,y\n", {"ignore": "a,b"}, "besides any column of clients: it has none"),
    (b"a,b\nx,y\nx,y\n", {"label": "b", "client": "b"}, "needs a column of classes and another of inputs"),
    (b"a,label\n1,x\n\n2,x,9\n", {}, "own.csv, line 4 has 3 values, but the header names 2 columns"),
    (b"a,label\n1,x\n2\n", {}, "own.csv, line 3 has 1 values, but the header names 2 columns"),
    (b"a,label\n1,x\n2,\n", {}, "own.csv, line 3 has no label"),
    (b"a,client,label\n1,p,x\n2,,x\n", {}, "own.csv, line 3 has no client: fill in column 'client', or name it in"),
    (b"a,who,label\n1,p,x\n2,NA,x\n", {"client": "who"}, "own.csv, line 3 has no client: fill in column 'who'"),
    (b"a,label\n1,x\n2,x\n3,y\n", {}, "class 'y' has one row, but two are needed: one for training and one for testing"),
    (b"a,label\n1,x\n2,x\nnan,x\n", {}, "line 4: column 'a' holds 'nan', which is not a finite number; leave missing"),
    (b"a,label\n1,x\n-inf,x\n2,x\n", {}, "line 3: column 'a' holds '-inf', which is not a finite number"),
    (b"a,label\n1e300,x\n-1e300,x\n1,x\n0,x\n", {}, "column 'a' holds numbers too large to be squared"),
    (b"a,label\n1,x\n2,x\n", {"label": "lable"}, "unknown column of"),
    (b"a,label\n1,x\n2,x\n", {"client": "b"}, "unknown column of"),
    (b"a,label\n1,x\n2,x\n", {"ignore": "a,b"}, "unknown column of"),
    (b"a,label\n\xff\xfe,x\n2,x\n", {}, "own.csv is not in UTF-8"),
    (b'a,label\n"1,x\n2,x\n', {}, "own.csv is damaged: unexpected end of data"),
    (b"a,label\n" + b"z" * 1001 + b",x\n1,x\n", {}, "column 'a' holds a value of 1,001 characters, more than 1,000"),
    (b"a,label\n" + b"".join(b"n%d,x\n" % n for n in range(1500)), {}, "different texts, more than 1,000: name it in"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "options", "words"), BAD_TABLES)
def test_unusable_tables_are_refused(tmp_path, raw, options, words):
    assert words in refusal(f"csv:{write(tmp_path / 'own.csv', raw)}", **options)


def patients(ids):
    """A table whose first column holds these texts; numbers and two classes beside it."""
    lines = [
        f"{each},{number % 7},{'ill' if number % 2 else 'well'}" for number, each in enumerate(ids)
    ]
    return "patient,age,label\n" + "\n".join(lines) + "\n"


IDENTIFYING = {
    "ids": [f"SMITH-{number}" for number in range(100)],
    "dates": [f"1970-{1 + number // 28:02}-{1 + number % 28:02}" for number in range(200)],
    "two visits each": [f"SMITH-{number // 2}" for number in range(100)],
    "a small table": [f"SMITH-{number}" for number in range(20)],
    "remarks, mostly none": ["none"] * 60 + [f"SMITH {number} fell" for number in range(40)],
    "remarks, mostly missing": [""] * 60 + [f"SMITH {number} fell" for number in range(40)],
}


@pytest.mark.parametrize("texts", IDENTIFYING.values(), ids=list(IDENTIFYING))
def test_a_column_that_tells_rows_apart_is_refused_by_name_and_without_its_values(tmp_path, texts):
    table = write(tmp_path / "own.csv", patients(texts))
    message = refusal(f"csv:{table}")
    assert (
        "own.csv: column 'patient' holds" in message
        and "`ignore`" in message
        and "`keep`" in message
    )
    assert "SMITH" not in message and "1970" not in message and "fell" not in message
    assert build(f"csv:{table}", ignore="patient").train.x.shape[1] == 1
    known = len(set(build(f"csv:{table}", keep="patient").encoding.columns[0].values))
    assert build(f"csv:{table}", keep="patient").train.x.shape[1] == known + 1


@pytest.mark.parametrize(
    "texts",
    [
        [f"town {number % 50}" for number in range(200)],  # four rows each
        [f"breed {number % 9}" for number in range(12)],  # few, in a small table
        [
            f"{number}" for number in range(100)
        ],  # numbers are one input, and only their mean is kept
        ["Ulm"] * 95 + [f"town {number}" for number in range(5)],
        ["", "x"] * 30,
    ],
)
def test_categories_of_few_rows_are_still_categories(tmp_path, texts):
    assert build(f"csv:{write(tmp_path / 'own.csv', patients(texts))}").train.x.shape[1] >= 2


def test_a_column_to_keep_that_is_not_there_is_refused(tmp_path):
    table = write(tmp_path / "own.csv", patients(IDENTIFYING["ids"]))
    assert "unknown column of" in refusal(f"csv:{table}", keep="patients")


def test_the_command_line_refuses_ids_and_takes_both_ways_out(tmp_path):
    table = write(tmp_path / "own.csv", patients(IDENTIFYING["ids"]))
    usual = (
        "--partition",
        "iid",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "run"),
    )
    refused = fedproto("run", "--dataset", f"csv:{table}", *usual)
    assert (
        refused.code == 2
        and "column 'patient'" in only_line(refused.err)
        and "SMITH" not in refused.err
    )
    assert not (tmp_path / "run").exists()
    assert fedproto("run", "--dataset", f"csv:{table}", "--set", "ignore=patient", *usual).code == 0
    assert "SMITH" not in (tmp_path / "run" / "encoding.json").read_text()
    kept = (*usual[:-1], str(tmp_path / "kept"))
    assert fedproto("run", "--dataset", f"csv:{table}(keep=patient)", *kept).code == 0


def test_a_table_of_numbers_with_a_text_among_the_test_rows_is_refused(tmp_path):
    write(tmp_path / "train.csv", "a,label\n1,x\n2,x\n")
    write(tmp_path / "test.csv", "a,label\n1,x\nold,x\n")
    message = refusal(f"csv:{tmp_path}")
    assert "test.csv, line 3: column 'a' holds 'old', but the training rows hold numbers" in message


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("a,label\n1,z\n", "test.csv, line 2 has the label 'z', which no training row has"),
        ("b,label\n1,x\n", "test.csv has no column 'a', which"),
        ("a,label\n", "test.csv holds no row below its header"),
        (None, "is a folder that does not hold train.csv and test.csv"),
    ],
)
def test_unusable_test_tables_are_refused(tmp_path, test, words):
    write(tmp_path / "train.csv", "a,label\n1,x\n2,x\n")
    if test is not None:
        write(tmp_path / "test.csv", test)
    assert words in refusal(f"csv:{tmp_path}")


def test_damaged_gz_tables_are_refused(tmp_path):
    whole = gzip.compress(TRAIN.encode())
    for raw, words in (
        (TRAIN.encode(), "is damaged"),
        (whole[:-12], "is damaged"),
        (gzip.compress(b"\xff"), "UTF-8"),
    ):
        assert words in refusal(f"csv:{write(tmp_path / 'own.csv.gz', raw)}")


@pytest.mark.parametrize("kind", ["csv", "text"])
def test_files_that_are_not_there_are_named(tmp_path, kind):
    assert "absent.csv does not exist" in refusal(f"{kind}:{tmp_path}/absent.csv")
    assert f"dataset '{kind}' needs a path: '{kind}:PATH'" in refusal(kind)


def test_the_command_line_refuses_in_one_line(tmp_path):
    bad = write(tmp_path / "bad.csv", "a,label\n1,x\n2\n")
    for arguments, words in [
        (
            ("--dataset", f"csv:{bad}"),
            "bad.csv, line 3 has 1 values, but the header names 2 columns",
        ),
        (("--dataset", f"csv:{tmp_path}/none.csv"), "none.csv does not exist"),
        (("--dataset", f"text:{bad}"), "bad.csv has no column 'text': it has a, label"),
        (
            ("--dataset", "digits", "--model", "textcnn"),
            "model textcnn takes texts of at least 5 word ids a row",
        ),
    ]:
        answer = fedproto("run", *arguments, "--out", tmp_path / "run")
        assert answer.code == 2 and words in only_line(answer.err)
        assert not (tmp_path / "run").exists()


# --- text: what is read -----------------------------------------------------------------------------------------------

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
    source = build(
        f"text:{write(tmp_path / 'own.jsonl', ''.join(json.dumps(line) + chr(10) for line in lines))}"
    )
    assert source.classes == ("0", "1")
    assert source.train.writer.tolist() == [f"1{label}" for label in source.train.y]


BAD_TEXTS = [
    ("own.jsonl", '{"text": "a", "label": "x"}\n{"text": ', "own.jsonl, line 2 is not valid JSON"),
    ("own.jsonl", "[1, 2]\n", "own.jsonl, line 1 is not a JSON object like"),
    ("own.jsonl", '{"text": "a"}\n', "own.jsonl has no column 'label', 'class', 'target' or 'y': it has text"),
    ("own.jsonl", '{"label": "a", "text": 3.5}\n', "own.jsonl has no column 'text': it has label"),
    ("own.jsonl", '{"text": "a", "label": "x"}\n{"text": "b"}\n', "line 2 has no 'label' that is a text or a whole"),
    ("own.jsonl", '{"text": "a", "label": ""}\n', "own.jsonl, line 1 has no label"),
    ("own.jsonl", '{"text": "a", "label": "x"}\n{"text": "a", "label": "\\ud83d"}\n', "own.jsonl, line 2 has the label "
     r"'\ud83d', which holds half a character and cannot be written in UTF-8"),
    ("own.jsonl", '{"text": "a", "label": "x", "client": " "}\n', "own.jsonl, line 1 has no client: fill in 'client'"),
    ("own.csv", "text,label,client\na,x,p\nb,x,\n", "own.csv, line 3 has no client: fill in 'client', or leave it out"),
    ("own.jsonl", '{"text": "a", "label": "x"}\n', "class 'x' has one row, but two are needed"),
    ("own.jsonl", '{"text": "!", "label": "x"}\n{"text": "?", "label": "x"}\n', "no word in its training texts"),
    ("own.jsonl", "", "own.jsonl holds no text"),
    ("own.csv", "a,label\nx,y\n", "own.csv has no column 'text': it has a, label"),
    ("own.csv", "text,label\nx,y,z\n", "own.csv, line 2 has 3 values, but the header names 2 columns"),
    ("cat/1.txt", b"\xff\xfe", "1.txt is not in UTF-8"),
    ("cat/1.md", "x", "holds no text: a folder must hold one folder of .txt files per class"),
    ("train/cat/1.txt", "x", "is a folder that does not hold train and test"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "raw", "words"), BAD_TEXTS)
def test_unusable_texts_are_refused(tmp_path, name, raw, words):
    path = write(tmp_path / "data" / name, raw)
    assert words in refusal(f"text:{path if name.startswith('own') else tmp_path / 'data'}")


def test_a_label_column_that_is_not_there_is_refused(tmp_path):
    message = refusal(f"text:{write(tmp_path / 'own.csv', as_csv(LINES))}", label="labels")
    assert "unknown column of" in message and "did you mean 'label'?" in message


# --- textcnn ----------------------------------------------------------------------------------------------------------


def textcnn(length=9, classes=3, dim=None, **options):
    torch.manual_seed(0)
    small = {"words": 10, "embedding": 4, "filters": 3, "width": 5} | options
    return (
        plugins.build("model", Part("textcnn", small), Fit((length,), classes, dim)).double().eval()
    )


def kims(p, ids):
    """Kim 2014, section 2, window by window: c_i = w · x[i : i+h] + b, the largest c, one feature a filter."""
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
    with pytest.raises(ConfigError, match="takes texts of at least 5 word ids a row"):
        plugins.build("model", Part("textcnn"), Fit(shape, 3))


# --- federations ------------------------------------------------------------------------------------------------------


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
    assert first.clients == second.clients


def test_texts_come_out_the_same_by_the_layers_of_a_gpu(folder, monkeypatch):
    options = {
        "dataset": f"text:{folder}/animals.jsonl(length=15)",
        "model": SMALL_TEXT,
        "shots": 3,
    }
    first = experiment("reference", **options).execute()
    monkeypatch.setattr(stacked, "on_gpu", lambda x: True)
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
