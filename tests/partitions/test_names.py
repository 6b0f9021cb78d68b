"""Clients keep the names that the data gives them, in partition files too."""

import json
import unicodedata

import numpy as np
import pytest

import fedproto
from fedproto.config.options import Part
from fedproto.data import Source, Split
from fedproto.errors import DataError
from fedproto.partitions.file import hash_partition
from fedproto.runs.assemble import divide


def a_source(clients, name="mine"):
    """A source with two rows of each of two classes per client."""
    writer = np.repeat(clients, 4)
    labels = np.tile([0, 1], 2 * len(clients))
    inputs = np.random.default_rng(0).random((len(labels), 3), np.float32)
    split = Split(inputs, labels, writer)
    return Source(name, ("a", "b"), split, split, scale=1.0)


def names_of(source, clients):
    return [rows.name for rows in divide([source] * clients, Part("natural"), 0)]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["Ulm", "Köln", "Gdańsk"], ["Gdańsk", "Köln", "Ulm"]),
        ([101, 9], ["9", "101"]),
        ([2.0, 3.5], ["2", "3.5"]),
        ([b"Ulm", b"\xff"], ["Ulm", "\ufffd"]),
    ],
)
def test_natural_takes_names_from_the_data(values, names):
    assert names_of(a_source(np.array(values)), len(values)) == names


def test_two_spellings_of_a_name_are_one_client():
    source = a_source(np.array(["Köln", unicodedata.normalize("NFD", "Köln"), "Köln ", "Ulm"]))
    rows = divide([source] * 2, Part("natural"), 0)
    assert [(each.name, len(each.train), len(each.test)) for each in rows] == [
        ("Köln", 12, 12),
        ("Ulm", 4, 4),
    ]


@pytest.mark.parametrize("value", ["Ulm\x1b[31m", "\u202eUlm", " ", "a\nb"])
def test_a_name_that_cannot_be_shown_is_refused(value):
    with pytest.raises(DataError, match="the data has a client"):
        names_of(a_source(np.array(["Ulm", value])), 2)


def test_other_partitions_name_nobody():
    rows = divide([a_source(np.array(["Ulm", "Köln"]))] * 2, Part("iid"), 0)
    assert [each.name for each in rows] == [None, None]


def write_csv(folder, sites, name="sites.csv"):
    path = folder / name
    rng = np.random.default_rng(0)
    lines = ["height,width,label,client"]
    for site in sites:
        for row in range(20):
            x, y = rng.normal(row % 2 * 3, 1, 2).round(3)
            lines.append(f"{x},{y},{'ab'[row % 2]},{site}")
    path.write_text("\n".join(lines) + "\n")
    return path


def run(path, out=None, **options):
    settings = {"rounds": 1, "clients": 3, "engine": "reference", "partition": "natural"} | options
    return fedproto.run(dataset=f"csv:{path}", out=out, **settings)


def test_a_partition_file_keeps_names_and_numbers(tmp_path):
    path = write_csv(tmp_path, ["Ulm", "Köln", "Gdańsk"])
    first = run(path, tmp_path / "first")
    content = json.loads((tmp_path / "first" / "partition.json").read_text())
    assert [client["name"] for client in content["clients"]] == ["Gdańsk", "Köln", "Ulm"]
    again = run(path, partition=f"file:{tmp_path / 'first' / 'partition.json'}")
    assert [client["name"] for client in again.clients] == ["Gdańsk", "Köln", "Ulm"]
    assert [client["id"] for client in again.clients] == [0, 1, 2]
    assert again.data["partition"] == first.data["partition"]


def test_a_partition_without_names_holds_none(tmp_path):
    path = write_csv(tmp_path, ["Ulm", "Köln", "Gdańsk"])
    result = run(path, tmp_path / "iid", partition="iid")
    content = json.loads((tmp_path / "iid" / "partition.json").read_text())
    assert all("name" not in client for client in content["clients"])
    assert [client["name"] for client in result.clients] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["Ulm", "Ulm", "Köln"], "clients 0 and 1 are both called 'Ulm'"),
        (["Ulm", " Ulm", "Köln"], "clients 0 and 1 are both called 'Ulm'"),
        (["2", None, None], "clients 0 and 2 are both called '2'"),
        ([3, None, None], "client 0 must have text as 'name', not 3"),
        (["a\nb", None, None], "client 0 has the name 'a\\\\nb', which holds a line break"),
    ],
)
def test_bad_names_in_a_partition_file_are_refused(tmp_path, names, complaint):
    path = write_csv(tmp_path, ["Ulm", "Köln", "Gdańsk"])
    run(path, tmp_path / "iid", partition="iid")
    file = tmp_path / "iid" / "partition.json"
    content = json.loads(file.read_text())
    for client, name in zip(content["clients"], names, strict=True):
        if name is not None:
            client["name"] = name
    content["sha256"] = hash_partition(content)
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=complaint):
        run(path, partition=f"file:{file}")


def test_equal_names_of_two_data_sets_are_told_apart(tmp_path):
    first = write_csv(tmp_path, ["Ulm", "Köln"])
    second = write_csv(tmp_path, ["Ulm", "Bonn"], "more.csv")
    result = fedproto.run(
        dataset=f"csv:{first}*2,csv:{second}*2",
        partition="natural",
        clients=4,
        rounds=1,
        engine="reference",
    )
    assert [client["name"] for client in result.clients] == ["Köln", "Ulm", "Bonn", "Ulm (2)"]
