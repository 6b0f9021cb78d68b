"""Tables as people have them: as pandas writes them, in any encoding, in Parquet and Excel."""

import gzip
import json
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import fedproto, only_line
from helpers.data_files import write
from helpers.frames import as_texts, mixed_frame, same_source
from helpers.sources import build, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedproto.config.choices import complete, parse_choice
from fedproto.data.shared.feature_encoding import Columns, Notation, from_json, to_json
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError
from fedproto.inference.input_files import read_inputs

TABLE = "age,town,label\n" + "1,Ulm,yes\n3,Köln,no\n2,Ulm,no\n4,Köln,yes\n" * 3


# --- the index that pandas writes


@pytest.mark.parametrize("header", ["", "Unnamed: 0", "Unnamed: 0.1"])
def test_the_index_that_pandas_writes_is_left_out_with_a_notice(tmp_path, header):
    lines = TABLE.splitlines()
    indexed = [f"{number - 1 if number else header},{line}" for number, line in enumerate(lines)]
    plain = build(f"csv:{write(tmp_path / 'plain.csv', TABLE)}")
    path = write(tmp_path / "own.csv", "\n".join(indexed) + "\n")
    source = build(f"csv:{path}")
    assert same_source(source, plain)
    assert len(source.notices) == len(plain.notices) + 1
    assert source.notices[0] == (
        f"{path}: the first column has no name and is left out, as the index that pandas writes"
    )
    assert same_source(build(f"csv:{path}", ignore="Unnamed: 0"), plain)


def test_a_second_column_without_a_name_is_refused(tmp_path):
    path = write(tmp_path / "own.csv", ",a,,label\n0,1,2,x\n1,1,2,x\n")
    assert "must name every column in words, but it holds ''" in refusal(f"csv:{path}")


def test_the_command_line_says_that_the_index_was_left_out(tmp_path):
    frame = pd.DataFrame({"a": np.arange(40) % 7, "label": np.arange(40) % 2})
    frame.to_csv(tmp_path / "own.csv")
    done = fedproto(
        "run", "--dataset", f"csv:{tmp_path / 'own.csv'}", "--clients", "2", "--rounds", "1",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0
    assert "the first column has no name and is left out" in done.err + done.out


# --- encodings of text


@pytest.mark.parametrize(
    ("codec", "option"),
    [
        ("utf-8", None),
        ("utf-8-sig", None),
        ("utf-16", None),
        ("utf-32", None),
        ("latin-1", "latin-1"),
        ("cp1252", "cp1252"),
        ("utf-16-le", "utf-16-le"),
        ("utf-8-sig", "latin-1"),  # the byte order mark knows better
        ("utf-16", "latin-1"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_text_encodings(tmp_path, codec, option, packed):
    raw = TABLE.encode(codec)
    name = "own.csv.gz" if packed else "own.csv"
    path = write(tmp_path / name, gzip.compress(raw) if packed else raw)
    options = {} if option is None else {"text_encoding": option}
    source = build(f"csv:{path}", **options)
    assert source.encoding.columns[1].values == ("Köln", "Ulm")


@pytest.mark.parametrize("kind", ["csv", "text"])
def test_a_file_in_another_encoding_says_how_to_name_it(tmp_path, kind):
    path = write(tmp_path / "own.csv", "text,label\nKöln,x\n".encode("latin-1"))
    said = refusal(f"{kind}:{path}")
    assert "is not in UTF-8" in said and "name its encoding, as in text_encoding=latin-1" in said


@pytest.mark.parametrize("name", ["latin-99", "base64", "", "rot13", "utf-8\0"])
def test_unknown_text_encodings_are_refused(tmp_path, name):
    path = write(tmp_path / "own.csv", TABLE)
    for kind in ("csv", "text"):
        said = refusal(f"{kind}:{path}", text_encoding=name)
        assert said.startswith(f"text_encoding {name!r} is not known: name one such as utf-8")


def test_utf_16_without_a_mark_is_not_taken_for_utf_8(tmp_path):
    path = write(tmp_path / "own.csv", "age,label\n1,x\n2,x\n".encode("utf-16-le"))
    assert "holds NUL characters; name its encoding" in refusal(f"csv:{path}")


# --- missing values and decimal commas


def test_missing_marks_are_the_mean_or_an_empty_text(tmp_path):
    table = "age,town,label\n1,Ulm,a\n-9,n/a,a\n3,Bonn,b\n-9.0,Ulm,b\n"
    plain = "age,town,label\n1,Ulm,a\n,,a\n3,Bonn,b\n,Ulm,b\n"
    marked = build(f"csv:{write(tmp_path / 'own.csv', table)}", missing="-9,n/a")
    source = build(f"csv:{write(tmp_path / 'plain.csv', plain)}")
    assert marked.train.x.tobytes() == source.train.x.tobytes()
    assert marked.encoding.columns == source.encoding.columns
    assert marked.encoding.notation == Notation(("-9", "n/a"))


def test_a_label_that_is_a_missing_mark_is_no_label(tmp_path):
    path = write(tmp_path / "own.csv", "a,label\n1,x\n2,n/a\n3,x\n")
    assert "own.csv, line 3 has no label" in refusal(f"csv:{path}", missing="n/a")


def test_decimal_commas(tmp_path):
    table = "size;town;label\n1,5;Ulm, West;x\n-2,;Bonn;x\n,5;Bonn;y\n1,0e2;Ulm, West;y\n7;Bonn;y\n"
    plain = table.replace("1,5", "1.5").replace("-2,", "-2.").replace("\n,5", "\n.5")
    plain = plain.replace("1,0e2", "1.0e2")
    source = build(f"csv:{write(tmp_path / 'own.csv', table)}", decimal=",")
    other = build(f"csv:{write(tmp_path / 'plain.csv', plain)}")
    assert source.train.x.tobytes() == other.train.x.tobytes()
    assert source.encoding.columns == other.encoding.columns
    assert source.encoding.columns[1].values == ("Bonn", "Ulm, West")


@pytest.mark.parametrize("number", ["1.234", "1.234,5", "0.5", "1.234.567"])
def test_a_point_beside_decimal_commas_is_refused(tmp_path, number):
    path = write(tmp_path / "own.csv", f"size;label\n1,5;x\n{number};x\n")
    said = refusal(f"csv:{path}", decimal=",")
    assert f"holds {number!r}, but with decimal=',' a number may hold no point" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decimal": ";"}, "unknown value of dataset csv's decimal ';'"),
        ({"missing": 7}, "missing must be text, not 7"),
        ({"sheet": "a"}, "unknown option of dataset csv 'sheet'"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, words):
    part = parse_choice("dataset", f"csv:{write(tmp_path / 'own.csv', TABLE)}")
    with pytest.raises(ConfigError) as caught:
        complete("dataset", replace(part, options=options), {}, {})
    assert words in str(caught.value)


def test_the_notation_of_a_table_goes_with_its_encoding(tmp_path):
    """A classifier reads new files as the training files were read."""
    path = write(tmp_path / "own.csv", "size;town;label\n1,5;Köln;x\n2,5;n/a;y\n".encode("latin-1"))
    test = write(tmp_path / "new.csv", "size;town\n1,5;Köln\n-9;n/a\n".encode("latin-1"))
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("train.csv", "test.csv"):
        (folder / name).write_bytes(path.read_bytes())
    options = {"decimal": ",", "missing": "n/a,-9", "text_encoding": "latin-1"}
    source = build(f"csv:{folder}", **options)
    again = from_json(json.loads(json.dumps(to_json(source.encoding))), "here")
    assert again == source.encoding
    rows = [each.x.tolist() for each in read_inputs(test, Preprocessing((3,), encoding=again))]
    assert rows == [[-1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    "notation",
    [None, [], {"decimal": "x"}, {"missing": "NA"}, {"text_encoding": "base64"}, {"other": 1}],
)
def test_a_wrong_notation_in_a_file_is_refused(notation):
    stored = to_json(Columns(())) | {"columns": [{"name": "a", "mean": 0.0, "std": 1.0}]}
    assert "notation" not in stored
    from_json(stored, "here")
    with pytest.raises(DataError, match="here is not a valid encoding"):
        from_json(stored | {"notation": notation}, "here")


# --- Parquet and Excel


WRITERS = {
    "csv": lambda frame, path, **options: frame.to_csv(path, **options),
    "parquet": lambda frame, path, **options: frame.to_parquet(path, **options),
    "excel": lambda frame, path, **options: frame.to_excel(path, **options),
}
ENDINGS = {"csv": "csv", "parquet": "parquet", "excel": "xlsx"}


def written(frame, folder, kind, **options):
    path = folder / f"own.{ENDINGS[kind]}"
    WRITERS[kind](frame, path, **options)
    return f"{kind}:{path}"


@pytest.mark.parametrize("kind", ["parquet", "excel"])
@pytest.mark.parametrize("index", [False, True])
def test_parquet_and_excel_are_the_csv_that_pandas_writes(tmp_path, kind, index):
    frame = mixed_frame()
    options = {"label": "kind", "client": "site"}
    frame = frame.drop(columns="small") if kind == "excel" else frame  # written as double there
    as_csv = build(written(frame, tmp_path, "csv", index=index), **options)
    other = build(written(frame, tmp_path, kind, index=index), **options)
    assert same_source(other, as_csv)
    assert other.name.startswith(f"{kind}:") and other.model == "mlp"
    kinds = [type(column).__name__ for column in as_csv.encoding.columns]
    assert kinds.count("Category") == 2, "booleans and texts are categories, numbers are numbers"


#: openpyxl writes numbers with 16 digits, and knows no negative zero.
eighths = st.integers(-(2**30), 2**30).map(lambda number: number / 8)
texts = st.text("abcdeü ,;\"'", min_size=1, max_size=6).map(str.strip).filter(bool)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(
        st.tuples(
            eighths | st.none(),
            st.integers(-(2**53), 2**53),
            st.booleans(),
            texts | st.none(),
            st.sampled_from(["x", "y"]),
        ),
        min_size=4,
        max_size=12,
    )
)
def test_frames_written_and_read_back_are_one_source(tmp_path, rows):
    rows = [*rows, *((*row[:4], label) for row in rows[:2] for label in "xy")]
    frame = pd.DataFrame(rows, columns=["size", "count", "flag", "town", "label"])
    first, *others = [
        build(written(frame, tmp_path, kind, index=False), keep="town") for kind in WRITERS
    ]
    for other in others:
        assert same_source(first, other)


def test_a_column_that_is_empty_in_all_training_rows_may_hold_texts_in_others(tmp_path):
    lines = ["town,size,label,set"]
    lines += [f",{row / 2},{'xy'[row % 2]},train" for row in range(6)]
    lines += [f"Ulm,{row / 2},{'xy'[row % 2]},test" for row in range(4)]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    source = build(f"csv:{tmp_path / 'own.csv'}", split="set")
    assert source.train.x[:, 0].tolist() == [1] * 6
    assert source.test.x[:, 0].tolist() == [0] * 4, "a text that no training row holds"


def test_a_named_index_is_a_column(tmp_path):
    frame = mixed_frame().drop(columns="visits").set_index("site")
    as_csv = build(written(frame, tmp_path, "csv"), label="kind", client="site")
    as_parquet = build(written(frame, tmp_path, "parquet"), label="kind", client="site")
    assert same_source(as_csv, as_parquet)
    assert set(as_csv.train.writer) == {"Ulm", "Köln", "Bonn"}


@pytest.mark.parametrize("kind", ["parquet", "excel"])
def test_a_folder_of_training_and_test_tables(tmp_path, kind):
    frame = mixed_frame().drop(columns="small")
    for name in ("train", "test"):
        part = frame if name == "train" else frame[:6]
        part.to_csv(tmp_path / f"{name}.csv", index=False)
        WRITERS[kind](part, tmp_path / f"{name}.{ENDINGS[kind]}", index=False)
    source = build(f"{kind}:{tmp_path}", label="kind")
    assert same_source(source, build(f"csv:{tmp_path}", label="kind"))
    assert len(source.test.y) == 6
    assert any("6 of 6 test rows equal a training row" in notice for notice in source.notices)


def test_sheets_are_named_or_the_first_one_with_a_notice(tmp_path):
    frame = mixed_frame()[["count", "kind"]]
    path = tmp_path / "own.xlsx"
    with pd.ExcelWriter(path) as book:
        frame.to_excel(book, sheet_name="January", index=False)
        frame[::-1].to_excel(book, sheet_name="February", index=False)
    first = build(f"excel:{path}")
    assert first.notices[0] == (
        f"{path}: only the first sheet, 'January', is read, not February: name another with "
        "sheet=NAME"
    )
    assert same_source(first, build(f"excel:{path}", sheet="January"))
    other = build(f"excel:{path}", sheet="February")
    assert not any("sheet," in notice for notice in other.notices)
    said = refusal(f"excel:{path}", sheet="Febuary")
    assert said.startswith(f"unknown sheet of {path} 'Febuary': did you mean 'February'?")


def test_rows_of_a_sheet_are_counted_as_excel_does(tmp_path):
    frame = pd.DataFrame({"a": [1, 2, 3, 4], "label": ["x", "x", None, "x"]})
    assert "own.xlsx, row 4 has no label" in refusal(written(frame, tmp_path, "excel", index=False))
    assert "own.parquet, row 2 has no label" in refusal(written(frame, tmp_path, "parquet"))


@pytest.mark.parametrize(("kind", "ending"), [("parquet", "parquet"), ("excel", "xlsx")])
def test_one_way_to_name_each_format(tmp_path, kind, ending):
    path = tmp_path / f"own.{ending}"
    path.write_bytes(b"PAR1 or PK")
    assert refusal(f"csv:{path}") == f"{path} is not a text file: name it with {kind}:{path}"
    assert f"dataset {kind} reads files that end in" in refusal(f"{kind}:{tmp_path / 'own.csv'}")
    assert f"{path} is not a valid" in refusal(f"{kind}:{path}")
    gone = tmp_path / f"gone.{ending}"
    assert refusal(f"{kind}:{gone}") == f"{gone} does not exist"


@pytest.mark.parametrize(
    ("kind", "package"), [("parquet", "pyarrow"), ("parquet", "pandas"), ("excel", "openpyxl")]
)
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, kind, package):
    name = written(mixed_frame(), tmp_path, kind)
    monkeypatch.setitem(sys.modules, package, None)
    said = refusal(name)
    assert f"needs the package {package!r}: pip install '.[tables]'" in said


def test_nested_values_are_refused(tmp_path):
    frame = pd.DataFrame({"a": [[1], [2, 3], [4], []], "label": list("xxyy")})
    said = refusal(written(frame, tmp_path, "parquet"))
    assert "column 'a' holds values of type ndarray: name it in `ignore`" in said


@pytest.mark.parametrize("kind", ["csv", "parquet", "excel"])
def test_dates_are_refused_in_every_format(tmp_path, kind):
    frame = mixed_frame(30)[["count", "kind"]]
    frame["born"] = pd.date_range("1970-01-01", periods=30)
    said = refusal(written(frame, tmp_path, kind, index=False), label="kind")
    assert "column 'born' holds" in said and "dates" in said


# --- classifying


@pytest.mark.parametrize("kind", ["csv", "parquet", "excel"])
@pytest.mark.parametrize("trained_on", ["csv", "parquet", "excel"])
def test_new_rows_in_any_format_become_the_same_inputs(tmp_path, kind, trained_on):
    frame = mixed_frame().drop(columns=["small", "site"])
    source = build(written(frame, tmp_path, trained_on), label="kind")
    name = written(frame.drop(columns="kind"), tmp_path, kind)
    path = tmp_path / f"own.{ENDINGS[kind]}"
    assert name.endswith(str(path))
    inputs = list(read_inputs(path, source.preprocessing))
    x = np.stack([each.x for each in inputs])
    csv_source = build(written(frame, tmp_path, "csv"), label="kind")
    wanted = csv_source.encoding(as_texts(frame), str)
    assert x.tobytes() == wanted.tobytes()


def test_a_model_of_a_table_classifies_parquet_from_the_command_line(tmp_path):
    frame = mixed_frame(60).drop(columns="small")
    frame.to_csv(tmp_path / "own.csv")
    frame.to_parquet(tmp_path / "new.parquet")
    frame.to_excel(tmp_path / "new.xlsx")
    run = tmp_path / "run"
    options = ("--set", "label=kind", "--set", "client=site", "--partition", "natural")
    done = fedproto(
        "run", "--dataset", f"csv:{tmp_path / 'own.csv'}", *options, "--clients", "3",
        "--rounds", "1", "--out", run,
    )  # fmt: skip
    assert done.code == 0, done.err
    answers = []
    for name in ("own.csv", "new.parquet", "new.xlsx"):
        done = fedproto("predict", run, tmp_path / name, "--json")
        assert done.code == 0, done.err
        answers.append(done.out.count('"label"') or done.out.count("well"))
    assert answers[0] and len(set(answers)) == 1
    refused = fedproto("predict", run, write(tmp_path / "new.xls", b"old"))
    assert ".parquet" in only_line(refused.err)
