"""Sentences about data: what is refused, and what its owner is told."""

import tracemalloc
import warnings

import numpy as np
import pytest
from helpers.data_files import write
from helpers.sources import build, refusal

import fedproto
from fedproto.config.settings import configure
from fedproto.core.class_names import list_names
from fedproto.data import Split
from fedproto.data.shared.data_notices import describe_duplicates
from fedproto.runs.experiment import Experiment


def table(path, **columns):
    """Write a table of columns to a file; the last one is the label."""
    lines = [",".join(columns)]
    lines += [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    return f"csv:{write(path / 'own.csv', chr(10).join(lines) + chr(10))}"


ROWS = range(60)
KINDS = [("ill", "well")[row % 2] for row in ROWS]
SIZES = [row % 7 for row in ROWS]


# --- measurements as labels


@pytest.mark.parametrize(
    "labels",
    [
        [f"{row * 0.37:.2f}" for row in ROWS],
        [row * row for row in ROWS],  # whole numbers, but one row each
        [f"{(row // 2) * 1.5}" for row in ROWS],
    ],
)
def test_measurements_are_no_classes(tmp_path, labels):
    said = refusal(table(tmp_path, size=SIZES, price=labels))
    assert "the column of classes holds" in said and "looks like a measurement, not classes" in said
    assert "name another with label=COLUMN" in said
    assert build(table(tmp_path, size=SIZES, price=labels, label=KINDS)).classes == ("ill", "well")


@pytest.mark.parametrize(
    "labels",
    [
        [row // 2 for row in ROWS],  # thirty classes, numbered
        [1000 + row // 2 for row in ROWS],
        [f"kind {row // 2}" for row in ROWS],
        [(row % 10) * 0.5 for row in ROWS],  # few different numbers: grades
    ],
)
def test_numbers_of_classes_are_classes(tmp_path, labels):
    source = build(table(tmp_path, size=SIZES, label=labels))
    assert len(source.classes) == len(set(labels))


def test_many_rows_of_each_whole_number_are_classes(tmp_path):
    labels = [3 * (row % 25) for row in range(125)]
    assert len(build(table(tmp_path, size=range(0, 625, 5), label=labels)).classes) == 25


# --- dates and ids


DAYS = [f"{1 + row % 28:02}" for row in ROWS]


@pytest.mark.parametrize(
    "dates",
    [
        [f"2024-01-{day}" for day in DAYS],
        [f"2024/1/{day}" for day in DAYS],
        [f"{day}.01.2024" for day in DAYS],
        [f"1/{day}/24" for day in DAYS],
        [f"2024-01-{day} 12:30" for day in DAYS],
        [f"2024-01-{day}T12:30:00.5+01:00" for day in DAYS],
        [f"202401{day}" for day in DAYS],
        ["" if row % 3 else f"2024-01-{DAYS[row]}" for row in ROWS],
    ],
)
def test_dates_are_refused(tmp_path, dates):
    name = table(tmp_path, size=SIZES, seen=dates, label=KINDS)
    different = len(set(dates) - {""})
    said = refusal(name)
    # Of the few rows that are held out, some dates may be no others'.
    assert "column 'seen' holds" in said and "different dates: name it in `ignore`" in said
    assert different > 10 and "2024" not in said
    assert build(name, ignore="seen").train.x.shape[1] == 1
    assert build(name, keep="seen").train.x.shape[1] >= 2


def test_a_few_dates_are_categories(tmp_path):
    dates = [f"2024-0{1 + row % 4}-01" for row in ROWS]
    assert build(table(tmp_path, size=SIZES, wave=dates, label=KINDS)).train.x.shape[1] == 5


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("patient", [100001 + (row * 7) % 60 for row in ROWS]),
        ("row", list(ROWS)),
        ("id", [842302 + row * row for row in ROWS]),
        ("patient_id", [842302 + 13 * (row // 2) for row in ROWS]),
        ("caseID", [f"{842302 + row * 3}.0" for row in ROWS]),
        ("Record Id", [row * 5 for row in ROWS]),
    ],
)
def test_numbers_that_are_ids_are_refused(tmp_path, name, ids):
    source = table(tmp_path, **{"size": SIZES, name: ids, "label": KINDS})
    said = refusal(source)
    assert f"column {name!r} holds {len(set(ids))} different whole numbers in 60 rows" in said
    assert "as ids do: name it in `ignore`, or in `keep` if it is to be an input" in said
    assert build(source, ignore=name).train.x.shape[1] == 1
    assert build(source, keep=name).train.x.shape[1] == 2


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("income", [20000 + 137 * row for row in ROWS]),  # all different, but not consecutive
        ("liquid", [row * 2 for row in ROWS]),  # ends in "id", but not in the word
        ("ward id", [row % 5 for row in ROWS]),  # few
        ("id", [row / 7 for row in ROWS]),  # not whole
        ("age", [row % 30 for row in ROWS]),  # consecutive, but two rows each
    ],
)
def test_numbers_that_are_no_ids_are_inputs(tmp_path, name, numbers):
    source = table(tmp_path, **{"size": SIZES, name: numbers, "label": KINDS})
    assert build(source).train.x.shape[1] == 2


# --- duplicates and single rows


def notices_of(dataset, data=None, **settings):
    """Return what a run says before it trains."""
    settings = {"dataset": dataset, "device": "cpu", "engine": "reference", **settings}
    return Experiment.prepare(configure(settings)[0], data=data).notices


def test_test_rows_that_are_training_rows_are_counted(tmp_path):
    write(tmp_path / "train.csv", "a,b,label\n1,2,x\n1,3,x\n2,2,y\n3,3,y\n")
    write(tmp_path / "test.csv", "a,b,label\n1,2,x\n1,2,y\n2,2,y\n9,9,x\n")
    (notice,) = build(f"csv:{tmp_path}").notices
    assert notice == (
        f"csv:{tmp_path}: 2 of 4 test rows equal a training row, label included, so the accuracy "
        "is partly that of rows seen in training"
    )


def test_classes_of_a_single_training_row_are_named(tmp_path):
    write(tmp_path / "train.csv", "a,label\n1,x\n2,x\n3,y\n4,z\n")
    write(tmp_path / "test.csv", "a,label\n7,x\n8,y\n9,z\n")
    assert notices_of(f"csv:{tmp_path}", clients=1) == [
        "2 classes have a single training row each: 'y', 'z'"
    ]
    write(tmp_path / "train.csv", "a,label\n1,x\n2,x\n3,y\n")
    write(tmp_path / "test.csv", "a,label\n7,x\n8,y\n")
    assert notices_of(f"csv:{tmp_path}", clients=1) == ["class 'y' has a single training row"]


def test_single_training_rows_of_many_clients_are_one_sentence():
    """A class of which each of two clients has one row has two."""
    clients = []
    for labels in (["a", "a", "b", "c"], ["a", "a", "b", "d"], ["a", "e", "b", "b"]):
        x = np.random.default_rng(len(clients)).normal(size=(8, 3))
        clients.append((x[:4], np.array(labels), x[4:], np.array(labels)))
    single = [notice for notice in notices_of("python", clients) if "single" in notice]
    assert single == ["3 classes have a single training row each: 'c', 'd', 'e'"]


def test_data_sets_of_ours_are_not_spoken_of():
    """One shot and classes of one client alone are the protocol there."""
    few = {"ways": 1, "shots": 1, "stdev": 0, "clients": 3}
    assert notices_of("digits", **few) == []


def test_duplicates_are_counted_as_by_pairs_of_rows():
    generator = np.random.default_rng(0)
    train, test = (
        Split(
            generator.integers(0, 3, (count, 3)).astype(np.float32), generator.integers(0, 2, count)
        )
        for count in (20, 15)
    )
    pairs = 0
    for x, y in zip(test.x, test.y, strict=True):
        pairs += any(
            (x == other).all() and y == label for other, label in zip(train.x, train.y, strict=True)
        )
    assert 0 < pairs < 15
    (notice,) = describe_duplicates("here", train, test)
    assert notice.startswith(f"here: {pairs} of 15 test rows equal a training row")


def test_rows_are_compared_without_a_copy_of_them():
    x = np.random.default_rng(0).normal(size=(200, 5000))
    train = Split(x[::2], np.zeros(100, np.int64))
    test = Split(x[::4], np.zeros(50, np.int64))
    tracemalloc.start()
    (notice,) = describe_duplicates("here", train, test)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert notice.startswith("here: 50 of 50 test rows")
    assert peak < train.x.nbytes / 10


# --- classes of one client alone


def lonely(clients, **options):
    """Return the warnings of a run with these labels per client."""
    data = {}
    for number, (name, labels) in enumerate(clients.items()):
        x = np.random.default_rng(number).normal(size=(4 * len(labels), 3))
        data[name] = (x, np.repeat(labels, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fedproto.run(dataset=data, rounds=1, device="cpu", engine="reference", **options)
    return [str(each.message) for each in caught if "alone" in str(each.message)]


def test_a_class_that_one_client_alone_has_is_said():
    assert lonely({"Ulm": ["flu", "cold"], "Bonn": ["flu", "cold"]}) == []
    assert lonely({"Ulm": ["flu", "cold"]}) == [], "one client alone has everything alone"
    assert lonely({"Ulm": ["flu"], "Bonn": ["flu", "cold"]}) == [
        "class 'cold' has training rows with client Bonn alone, so its prototype is that client's "
        "alone"
    ]
    assert lonely({"Ulm": ["flu"], "Bonn": ["cold"]}) == [
        "2 classes have training rows with one client alone ('flu', 'cold'): the prototype of each "
        "is that client's alone"
    ]
    assert lonely({"Ulm": ["flu"], "Bonn": ["flu", "cold"]}, algorithm="local") == []


def test_long_lists_are_cut():
    assert list_names(["a", "b", "c"], 3) == "a, b, c"
    assert list_names(list("abcdef"), 3) == "a, b, c and 3 more"
    (notice,) = lonely({"Ulm": list("abc"), "Bonn": list("def")})
    assert "6 classes have training rows with one client alone ('a', 'b', 'c' and 3 more)" in notice
