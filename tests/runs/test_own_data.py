"""What a user's own data decides: which rows are used, by how many clients, and how divided."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import command_line

import fedproto
from fedproto.config.config_file import read_run_toml
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.data import Source, from_arrays
from fedproto.data import Split as DataSplit
from fedproto.errors import ConfigError, FedProtoError
from fedproto.runs.own_data import count_clients

SITES = ("Aachen", "Ulm", "Köln")
QUICK = {"rounds": 1, "checkpoint_every": 0, "engine": "reference"}


def write_table(path: Path, rows: int = 120, *, sites: bool = False) -> str:
    """Write a table of two classes, and return its choice as a data set."""
    numbers = np.random.default_rng(3)
    header = "height,width,site,label" if sites else "height,width,label"
    lines = [header]
    for row in range(rows):
        label = row % 2
        height, width = numbers.normal(2 * label, 1, 2).round(3)
        cells = [str(height), str(width)]
        if sites:
            cells.append(SITES[row % 3])
        lines.append(",".join([*cells, f"class{label}"]))
    path.write_text("\n".join(lines) + "\n")
    return f"csv:{path}(client=site)" if sites else f"csv:{path}"


def rows_used(result: fedproto.Result) -> int:
    return sum(client["train"] for client in result.clients)


def stored(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text())


def test_all_rows_of_a_table_are_used(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = fedproto.run(dataset=write_table(tmp_path / "t.csv"), out=out, **QUICK)
    assert rows_used(result) == 96  # of 120, a fifth is held out
    assert [client["test"] for client in result.clients] == [24, 24]
    assert stored(out)["partition"]["name"] == "iid"
    assert stored(out)["clients"] == 2


def test_clients_that_the_data_names_are_all_used(tmp_path: Path) -> None:
    out = tmp_path / "run"
    dataset = write_table(tmp_path / "t.csv", sites=True)
    result = fedproto.run(dataset=dataset, out=out, **QUICK)
    assert len(result.clients) == 3
    assert rows_used(result) == 96
    assert stored(out)["partition"]["name"] == "natural"
    assert stored(out)["clients"] == 3


@pytest.mark.parametrize(
    ("given", "partition", "clients"),
    [
        ({"clients": 5}, "iid", 5),
        ({"partition": "dirichlet"}, "dirichlet", 2),
        ({"partition": "auto", "clients": 3}, "iid", 3),
        ({"test_shots": 2}, "iid", 2),
        ({"ways": 2}, "nway", 20),
        ({"shots": 1, "clients": 4}, "nway", 4),
        ({"partition.stdev": 0}, "nway", 20),
        ({"partition": "auto(noise=normal)"}, "nway", 20),
    ],
)
def test_settings_decide_before_the_data_does(
    given: dict[str, Any], partition: str, clients: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    fedproto.run(dataset=write_table(tmp_path / "t.csv"), out=out, **given, **QUICK)
    assert stored(out)["partition"]["name"] == partition
    assert stored(out)["clients"] == clients


def test_the_data_sets_of_the_package_keep_the_paper_s_setting() -> None:
    config = configure({"dataset": "digits"})[0]
    assert (config.partition.name, config.clients) == ("nway", 20)
    assert configure({"dataset": "digits", "partition": "auto"})[0] == config
    assert configure({"dataset": "femnist", "partition": "natural"})[0].clients == 20


def test_several_tables_each_keep_their_own_number_of_clients(tmp_path: Path) -> None:
    first = write_table(tmp_path / "a.csv", sites=True)
    second = write_table(tmp_path / "b.csv", 1000)
    out = tmp_path / "run"
    result = fedproto.run(dataset=f"{first},{second}", out=out, **QUICK)
    rows = [client["train"] for client in result.clients]
    assert (sum(rows[:3]), rows[3:]) == (96, [200, 200, 200, 200])
    settings = stored(out)
    assert settings["clients"] == 7
    assert settings["partition"]["name"] == "auto"  # natural for one of them, iid for the other
    config = configure(read_run_toml(out / "config.toml"))[0]
    assert [part.count for part in config.dataset] == [3, 4]


def test_counts_of_data_sets_are_the_number_of_clients(tmp_path: Path) -> None:
    first = write_table(tmp_path / "a.csv")
    second = write_table(tmp_path / "b.csv")
    result = fedproto.run(dataset=f"{first}*3,{second}*1", **QUICK)
    assert [client["train"] for client in result.clients] == [32, 32, 32, 96]


def test_a_stored_partition_says_how_many_clients_there_are(tmp_path: Path) -> None:
    dataset = write_table(tmp_path / "t.csv")
    first = fedproto.run(dataset=dataset, clients=5, out=tmp_path / "run", **QUICK)
    partition = f"file:{tmp_path / 'run' / 'partition.json'}"
    second = fedproto.run(dataset=dataset, partition=partition, **QUICK)
    assert second.data["partition"] == first.data["partition"]


def test_natural_without_named_clients_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="natural needs a data set that says"):
        fedproto.run(dataset=write_table(tmp_path / "t.csv"), partition="natural", **QUICK)


def test_a_sweep_over_own_data_is_continued(tmp_path: Path) -> None:
    dataset = write_table(tmp_path / "t.csv", sites=True)
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(
        f"dataset = '{dataset}'\nrounds = 1\n[sweep]\nlr = [0.01, 0.1]\n", encoding="utf-8"
    )
    for _ in range(2):
        done = command_line.fedproto("sweep", sweep, "--out", tmp_path / "out")
        assert done.code == 0, done
    sweep.write_text(
        f"dataset = '{dataset}'\nclients = 2\nrounds = 1\n[sweep]\nlr = [0.01, 0.1]\n",
        encoding="utf-8",
    )
    refused = command_line.fedproto("sweep", sweep, "--out", tmp_path / "out")
    assert "holds a run with clients 3, not 2" in refused.err


# --- the number of clients


def source_of(rows_by_class: list[int], writers: np.ndarray | None = None) -> Source:
    """A source with this many training rows of each class, and one test row of each."""
    labels = np.repeat(np.arange(len(rows_by_class)), rows_by_class)
    x = np.zeros((len(labels), 2), np.float32)
    train = DataSplit(x, labels, writers)
    classes = tuple(f"c{label}" for label in range(len(rows_by_class)))
    test_labels = np.arange(len(rows_by_class))
    test = DataSplit(np.zeros((len(test_labels), 2), np.float32), test_labels)
    return from_arrays("own", classes, [train, test])


@pytest.mark.parametrize(
    ("rows_by_class", "clients"),
    [
        ([5000, 5000], 20),
        ([2500, 500], 5),
        ([599, 1000], 5),
        ([357, 12], 2),
        ([1, 1], 2),
        ([1], 1),
        ([1999, 3000], 19),
        ([2000, 3000], 20),
    ],
)
def test_small_tables_are_not_shredded(rows_by_class: list[int], clients: int) -> None:
    assert count_clients(source_of(rows_by_class), Part("auto")) == clients
    assert count_clients(source_of(rows_by_class), Part("iid")) == clients


def test_named_clients_count_where_they_are_used() -> None:
    writers = np.array(["a", "b", "c", "a"])
    source = source_of([2, 2], writers)
    assert count_clients(source, Part("auto")) == 3
    assert count_clients(source, Part("natural")) == 3
    assert count_clients(source, Part("iid")) == 2


def test_a_wrong_option_of_the_partition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedProtoError, match="unknown key 'alpha'"):
        fedproto.run(dataset=write_table(tmp_path / "t.csv"), alpha=0.1, **QUICK)
