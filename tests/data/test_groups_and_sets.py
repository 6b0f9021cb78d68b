"""Groups that stay together and sets that files or columns name, from files to clients."""

import json

import numpy as np
import pytest
from helpers.sources import build, refusal
from hypothesis import given
from hypothesis import strategies as st

from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.data import Source, Split
from fedproto.errors import ConfigError, DataError
from fedproto.runs.assemble import divide
from fedproto.runs.experiment import Experiment
from fedproto.runs.validation_rows import refuse_leaking_groups, set_validation_apart


def table(rows=60, seed=0):
    """Lines of a table: patients of one to four rows, of two classes, in three sites."""
    generator = np.random.default_rng(seed)
    lines = []
    patient = 0
    while len(lines) < rows:
        patient += 1
        kind = int(generator.integers(2))
        site = ("Ulm", "Köln", "Bern")[int(generator.integers(3))]
        sizes = generator.normal(kind, size=int(generator.integers(1, 5)))
        lines += [f"{size:.3f},p{patient},{site},{'ab'[kind]}" for size in sizes]
    return lines


def write_table(path, lines, header="size,patient,site,label"):
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.fixture
def patients(tmp_path):
    return write_table(tmp_path / "patients.csv", table())


def groups_of(source):
    parts = [source.train, source.test, source.validation]
    return [set(part.group.tolist()) for part in parts if part is not None]


# --- tables


def test_patients_stay_on_one_side(patients):
    source = build(f"csv:{patients}", group="patient", client="site")
    train, test = groups_of(source)
    assert not train & test and test
    assert len(train | test) == len({line.split(",")[1] for line in table()})
    assert source.train.x.shape[1] == 1  # a patient's name is no input
    share = len(source.test.y) / (len(source.train.y) + len(source.test.y))
    assert 0.1 < share < 0.35


def test_a_column_says_what_rows_are_for(tmp_path):
    words = ["train", "Train", "TRAINING", "val", "valid", "dev", "test", "train"]
    lines = [f"{row},{word},{'ab'[row % 2]}" for row, word in enumerate(words)]
    path = write_table(tmp_path / "t.csv", lines, "size,part,label")
    source = build(f"csv:{path}", split="part")
    assert [len(part.y) for part in (source.train, source.test, source.validation)] == [4, 1, 3]
    assert source.train.x.shape[1] == 1
    without_test = [line for line in lines if ",test," not in line]
    path = write_table(tmp_path / "u.csv", without_test, "size,part,label")
    source = build(f"csv:{path}", split="part")
    assert source.validation is None and len(source.test.y) == 3


def test_files_say_what_rows_are_for(tmp_path):
    for name, count in (("train", 8), ("val", 4), ("test", 2)):
        lines = [f"{row},{'ab'[row % 2]}" for row in range(count)]
        write_table(tmp_path / f"{name}.csv", lines, "size,label")
    source = build(f"csv:{tmp_path}")
    assert [len(part.y) for part in (source.train, source.test, source.validation)] == [8, 2, 4]
    (tmp_path / "val.csv").rename(tmp_path / "validation.csv")
    assert len(build(f"csv:{tmp_path}").validation.y) == 4
    (tmp_path / "validation.csv").unlink()
    assert build(f"csv:{tmp_path}").validation is None


def test_texts_have_groups_and_sets(tmp_path):
    lines = []
    for row in range(40):
        author = f"author {row // 4}"
        part = ("train", "val", "test", "train", "train")[row // 4 % 5]
        content = {"text": f"word{row % 2} and", "label": "ab"[row % 2]}
        lines.append(json.dumps(content | {"author": author, "part": part}))
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")
    source = build(f"text:{path}", group="author", split="part")
    assert [len(part.y) for part in (source.train, source.test, source.validation)] == [24, 8, 8]
    held_out = build(f"text:{path}", group="author")
    train, test = groups_of(held_out)
    assert not train & test and len(held_out.test.y) == 8


def test_folders_of_texts_have_a_validation_set(tmp_path):
    for part in ("train", "test", "val"):
        for label in "ab":
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            (folder / "1.txt").write_text(f"word {label}")
    source = build(f"text:{tmp_path}")
    assert len(source.validation.y) == 2


def test_arrays_have_groups_and_sets(tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    y = np.arange(20) % 2
    arrays = {"x": x, "y": y, "patient": np.arange(20) // 4}
    np.savez(tmp_path / "a.npz", **arrays)
    train, test = groups_of(build(f"npz:{tmp_path / 'a.npz'}", group="patient"))
    assert not train & test and test
    others = {"x_test": x[:4], "y_test": y[:4], "x_val": x[:2], "y_val": y[:2]}
    np.savez(tmp_path / "b.npz", **arrays, **others)
    source = build(f"npz:{tmp_path / 'b.npz'}")
    assert len(source.validation.y) == 2 and len(source.test.y) == 4
    assert "must hold patient_test" in refusal(f"npz:{tmp_path / 'b.npz'}", group="patient")
    folder = tmp_path / "npy"
    folder.mkdir()
    for name, values in (arrays | others).items():
        np.save(folder / f"{name}.npy", values)
    assert len(build(f"npy:{folder}").validation.y) == 2


# --- refusals


def test_sets_that_share_a_group_are_refused(tmp_path):
    lines = ["1,train,p1,a", "2,train,p2,b", "3,test,p3,a", "4,test,p2,b"]
    path = write_table(tmp_path / "t.csv", lines, "size,part,patient,label")
    sentence = refusal(f"csv:{path}", split="part", group="patient")
    assert "leaking groups" in sentence
    assert "'p2'" in sentence


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        (["1,p1,x,a", "2,p2,x,b"], {"group": "patients"}, "patient"),
        (["1,p1,x,a", "2,,x,b"], {"group": "patient"}, "line 3 has no group"),
        (["1,p1,x,a", "2,p2,x,b"], {"split": "sites"}, "site"),
        (["1,p1,x,a", "2,p2,x,b"], {"split": "site"}, "must say train, val or test"),
        (["1,p1,train,a", "2,p2,train,b"], {"split": "site"}, "names no row for test"),
        (["1,p1,test,a", "2,p2,test,b"], {"split": "site"}, "names no row for train"),
        (["1,p1,x,a", "2,p1,x,a", "3,p2,x,b", "4,p3,x,b"], {"group": "patient"}, "group 'p1'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path, lines, options, words):
    path = write_table(tmp_path / "t.csv", lines)
    options = {"ignore": ("patient", "site"), **options}
    options["ignore"] = tuple(set(options["ignore"]) - set(options.values()) - {"ignore"})
    assert words in refusal(f"csv:{path}", **options)


def test_a_column_of_sets_beside_files_is_refused(tmp_path):
    for name in ("train", "test"):
        write_table(tmp_path / f"{name}.csv", ["1,train,a", "2,test,b"], "size,part,label")
    assert "leave it out" in refusal(f"csv:{tmp_path}", split="part")


def test_clients_that_share_a_group_are_refused(tmp_path):
    lines = [
        f"{row / 7:.3f},p{row // 2},{'Ulm' if row % 2 else 'Bern'},{'ab'[row % 2]}"
        for row in range(24)
    ]
    path = write_table(tmp_path / "t.csv", lines)
    dataset = f"csv:{path}(group=patient, client=site)"
    settings = {"dataset": dataset, "partition": "natural", "clients": 2}
    with pytest.raises(
        DataError, match="client Bern and client Ulm both have rows of the group 'p"
    ):
        Experiment.prepare(configure(settings)[0])


def test_nway_refuses_groups(patients):
    settings = {"dataset": f"csv:{patients}(group=patient)", "partition": "nway", "clients": 2}
    with pytest.raises(
        ConfigError, match="nway deals single rows of a class and would separate groups"
    ):
        Experiment.prepare(configure(settings | {"dataset.ignore": "site"})[0])


# --- from data to clients


def grouped_source(groups, seed, classes=3):
    """A source of groups of one to five rows; every class has rows on both sides."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 6, groups)
    group = np.repeat([f"g{number}" for number in range(groups)], sizes)
    y = generator.integers(0, classes, len(group))
    y[: 2 * classes] = np.tile(np.arange(classes), 2)[: len(y)]
    x = np.arange(len(y), dtype=np.float32)[:, None]
    test = Split(x[:6], np.tile(np.arange(classes), 2), group=np.array(["t"] * 6))
    names = tuple("abc"[:classes])
    return Source("made", names, Split(x, y, group=group), test, scale=1.0, model="mlp")


@given(
    st.sampled_from(["iid", "dirichlet(alpha=0.5,smallest=1)", "classes"]),
    st.integers(20, 40),
    st.integers(1, 4),
    st.integers(0, 2**16),
)
def test_no_group_is_with_two_clients_or_on_two_sides(partition, groups, clients, seed):
    source = grouped_source(groups, seed)
    choice = configure({"dataset": "digits", "partition": partition})[0].partition
    try:
        rows = divide([source] * clients, choice, seed)
    except ConfigError as error:  # dirichlet gave somebody nothing
        assert "groups" in str(error) or "found no split" in str(error)
        return
    validated = set_validation_apart([source] * clients, rows, 0.25, seed)
    refuse_leaking_groups([source] * clients, validated)
    again = set_validation_apart(
        [source] * clients, divide([source] * clients, choice, seed), 0.25, seed
    )
    dealt = []
    for client, before, repeated in zip(validated, rows, again, strict=True):
        assert np.array_equal(client.train, repeated.train)
        assert np.array_equal(client.validation, repeated.validation)
        whole = np.sort(np.concatenate([client.train, client.validation]))
        assert np.array_equal(whole, before.train)
        labels = source.train.y
        assert set(labels[client.train]) == set(labels[before.train])
        dealt.append(before.train)
    everything = np.sort(np.concatenate(dealt))
    assert np.array_equal(everything, np.arange(len(source.train.y)))


@given(st.integers(0, 2**16))
def test_a_clients_validation_rows_do_not_depend_on_the_others(seed):
    source = grouped_source(30, seed)
    rows = divide([source] * 3, Part("iid", {"test_shots": None}), seed)
    together = set_validation_apart([source] * 3, rows, 0.25, seed)
    alone = set_validation_apart([source], rows[:1], 0.25, seed)
    assert np.array_equal(alone[0].validation, together[0].validation)


def test_iid_deals_groups_evenly():
    source = grouped_source(60, 0)
    rows = divide([source] * 4, iid(), 0)
    sizes = [len(client.train) for client in rows]
    assert max(sizes) - min(sizes) <= 5


def iid():
    """The choice of the partition iid."""
    return Part("iid", {"test_shots": None})


def test_more_clients_than_groups_are_refused():
    source = grouped_source(3, 1)
    with pytest.raises(ConfigError, match="cannot share 3 groups"):
        divide([source] * 5, iid(), 0)


# --- validation sets of their own


def own_set(writers=None):
    x = np.arange(12.0, dtype=np.float32)[:, None]
    y = np.arange(12) % 3
    train = Split(x, y, np.arange(12) // 6)
    validation = Split(x[:6], y[:6], writers)
    return Source("own", ("a", "b", "c"), train, Split(x, y), scale=1.0, validation=validation)


def test_clients_get_the_validation_rows_of_their_classes():
    source = own_set()
    rows = divide([source] * 2, Part("natural", {"test_shots": None}), 0)
    rows = set_validation_apart([source] * 2, rows, None, 0)
    assert [client.validation.tolist() for client in rows] == [[0, 1, 2, 3, 4, 5]] * 2
    assert [len(client.train) for client in rows] == [6, 6]


def test_writers_get_their_own_validation_rows():
    source = own_set(np.array([0, 0, 0, 1, 1, 1]))
    rows = divide([source] * 2, Part("natural", {"test_shots": None}), 0)
    rows = set_validation_apart([source] * 2, rows, None, 0)
    assert [client.validation.tolist() for client in rows] == [[0, 1, 2], [3, 4, 5]]


def test_a_fraction_beside_an_own_set_is_refused():
    source = own_set()
    rows = divide([source], iid(), 0)
    with pytest.raises(ConfigError, match="has a validation set of its own"):
        set_validation_apart([source], rows, 0.2, 0)
    assert set_validation_apart([source], rows, 0, 0)[0].validation is None


def test_a_source_without_a_set_beside_one_with_it_needs_a_fraction():
    mixed = [own_set(), grouped_source(20, 0)]
    rows = divide(mixed, iid(), 0)
    with pytest.raises(ConfigError, match="made has no validation set"):
        set_validation_apart(mixed, rows, None, 0)
    validated = set_validation_apart(mixed, rows, 0.2, 0)
    assert len(validated[0].train) == 12 and len(validated[1].validation) > 0
