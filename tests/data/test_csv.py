"""Tables from files written byte by byte: what is read and what is refused."""

import csv
import gzip
import math

import numpy as np
import pytest
from helpers.command_line import fedproto, only_line
from helpers.data_files import write
from helpers.sources import build, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.data import hold_out


def split_table(folder, train, test, **options):
    """Return a source of two tables, train.csv and test.csv, so that nothing is drawn."""
    write(folder / "train.csv", train)
    write(folder / "test.csv", test)
    return build(f"csv:{folder}", **options)


# --- csv: what is read


TRAIN = "age,town,label\n1,Ulm,yes\n3,Bonn,no\n"


TEST = "age,town,label\n5,Bonn,yes\n2,Rome,no\n"


def test_csv_by_hand(tmp_path):
    """Ages 1 and 3: mean 2, deviation 1. Bonn and Ulm are two inputs; Rome is not."""
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


@settings(max_examples=60)
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


# --- csv: what is refused


BAD_TABLES = [
    (b"", {}, "first line must name every column in words, but it holds nothing"),
    (b"\na,b\n1,2\n", {}, "has no header"),
    (
        b"5.1,3.5,setosa\n4.9,3.0,setosa\n",
        {},
        "first line must name every column in words, but it holds '5.1'",
    ),
    (b"a,,label\n0,1,x\n", {}, "first line must name every column in words, but it holds ''"),
    (b"a,a,label\n1,2,x\n", {}, "names two columns 'a'"),
    (b"a,label\n", {}, "holds no row below its header"),
    (b"label\nx\nx\n", {}, "another of inputs, besides any column of clients: it has label"),
    (b"client\nx\nx\n", {}, "needs a column of classes and another of inputs"),
    (b"a,b\nx,y\nx,y\n", {"ignore": "a,b"}, "besides any column of clients: it has none"),
    (
        b"a,b\nx,y\nx,y\n",
        {"label": "b", "client": "b"},
        "needs a column of classes and another of inputs",
    ),
    (
        b"a,label\n1,x\n\n2,x,9\n",
        {},
        "own.csv, line 4 has 3 values, but the header names 2 columns",
    ),
    (b"a,label\n1,x\n2\n", {}, "own.csv, line 3 has 1 values, but the header names 2 columns"),
    (b"a,label\n1,x\n2,\n", {}, "own.csv, line 3 has no label"),
    (
        b"a,client,label\n1,p,x\n2,,x\n",
        {},
        "own.csv, line 3 has no client: fill in column 'client', or name it in",
    ),
    (
        b"a,who,label\n1,p,x\n2,NA,x\n",
        {"client": "who"},
        "own.csv, line 3 has no client: fill in column 'who'",
    ),
    (
        b"a,label\n1,x\n2,x\n3,y\n",
        {},
        "class 'y' has one row, but two are needed: one for training and one for testing",
    ),
    (
        b"a,label\n1,x\n2,x\nnan,x\n",
        {},
        "line 4: column 'a' holds 'nan', which is not a finite number; leave missing",
    ),
    (
        b"a,label\n1,x\n-inf,x\n2,x\n",
        {},
        "line 3: column 'a' holds '-inf', which is not a finite number",
    ),
    (
        b"a,label\n1e300,x\n-1e300,x\n1,x\n0,x\n",
        {},
        "column 'a' holds numbers too large to be squared",
    ),
    (b"a,label\n1,x\n2,x\n", {"label": "lable"}, "unknown column of"),
    (b"a,label\n1,x\n2,x\n", {"client": "b"}, "unknown column of"),
    (b"a,label\n1,x\n2,x\n", {"ignore": "a,b"}, "unknown column of"),
    (b"a,label\n\xff\xfe,x\n2,x\n", {}, "own.csv is not in UTF-8"),
    (b'a,label\n"1,x\n2,x\n', {}, "own.csv is damaged: unexpected end of data"),
    (
        b"a,label\n" + b"z" * 1001 + b",x\n1,x\n",
        {},
        "column 'a' holds a value of 1,001 characters, more than 1,000",
    ),
    (
        b"a,label\n" + b"".join(b"n%d,x\n" % n for n in range(1500)),
        {},
        "different texts, more than 1,000: name it in",
    ),
]


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
        [f"{number * 3}" for number in range(100)],  # one input, of which only the mean is kept
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
            "model textcnn takes texts of at least 5 word ids per row",
        ),
    ]:
        answer = fedproto("run", *arguments, "--out", tmp_path / "run")
        assert answer.code == 2 and words in only_line(answer.err)
        assert not (tmp_path / "run").exists()
