"""The line that says how many rows are used, by hand-computed counts."""

from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import fedproto as command
from helpers.tiny import experiment

import fedproto
from fedproto.data import Source, from_arrays
from fedproto.data import Split as DataSplit
from fedproto.partitions import ClientRows
from fedproto.runs.row_counts import count_rows, describe_rows


def source_of(train: int, test: int, validation: int | None = None) -> Source:
    own_validation = None if validation is None else split_of(validation)
    splits = [split_of(train), split_of(test)]
    return from_arrays("own", ("a", "b"), splits, validation=own_validation)


def split_of(rows: int) -> DataSplit:
    return DataSplit(np.zeros((rows, 2), np.float32), np.arange(rows) % 2)


def rows_of(train: list[int], test: list[int], validation: list[int] | None = None) -> ClientRows:
    set_apart = None if validation is None else np.array(validation, int)
    return ClientRows(np.array(train, int), np.array(test, int), set_apart)


def test_test_rows_that_clients_share_count_once() -> None:
    source = source_of(10, 5)
    counted = count_rows([source, source], [rows_of([0, 1], [0, 4]), rows_of([7], [4])])
    assert counted == {"train": {"used": 3, "there": 10}, "test": {"used": 2, "there": 5}}


def test_the_rows_of_several_data_sets_add_up() -> None:
    clients = [rows_of([0, 1], [0]), rows_of([0, 1], [0])]
    counted = count_rows([source_of(10, 5), source_of(4, 2)], clients)
    assert counted == {"train": {"used": 4, "there": 14}, "test": {"used": 2, "there": 7}}


def test_validation_rows_set_apart_are_no_training_rows() -> None:
    counted = count_rows([source_of(10, 5)], [rows_of([0, 1, 2, 3], [0], [8, 9])])
    assert counted["train"] == {"used": 4, "there": 8}
    assert counted["validation"] == {"used": 2, "there": 2}


def test_a_validation_set_of_its_own_is_counted_as_it_is() -> None:
    counted = count_rows([source_of(10, 5, 6)], [rows_of([0], [0], [1, 5])])
    assert counted["train"] == {"used": 1, "there": 10}
    assert counted["validation"] == {"used": 2, "there": 6}
    assert list(counted) == ["train", "validation", "test"]


def test_the_line_states_rows_classes_and_clients() -> None:
    settings = {"dataset": "digits", "clients": 2, "ways": 3, "stdev": 0, "shots": 5}
    made = experiment("fedproto", **settings).federation
    used = made.rows["test"]["used"]
    classes = {label for member in made.members for label in member.classes}
    line = f"rows used: 30 of 1,438 training, {used} of 359 test; {len(classes)} classes, 2 clients"
    assert describe_rows(made) == line


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = ["size,label", *(f"{row % 7},{'ab'[row % 2]}" for row in range(50))]
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


LINE = "rows used: 40 of 40 training, 10 of 10 test; 2 classes, 2 clients"


def test_every_run_prints_the_line_and_keeps_the_counts(table: Path) -> None:
    out = table.parent / "run"
    answer = command("run", "--dataset", f"csv:{table}", "--rounds", "1", "--out", out)
    assert answer.out.splitlines().count(LINE) == 1
    result = fedproto.run(dataset=f"csv:{table}", rounds=1, validation=0.5)
    assert result.data["rows"] == {
        "train": {"used": 20, "there": 20},
        "validation": {"used": 20, "there": 20},
        "test": {"used": 10, "there": 10},
    }


def test_algorithms_that_are_compared_share_one_line(table: Path) -> None:
    words = ("--algorithm", "local,fedproto", "--rounds", "1", "--out", table.parent / "run")
    answer = command("run", "--dataset", f"csv:{table}", *words)
    assert answer.out.splitlines().count(LINE) == 1
