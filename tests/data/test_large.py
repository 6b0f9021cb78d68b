"""Data larger than memory stays on disk; partitions of a million labels are quick and small."""

import tracemalloc

import numpy as np
import pytest
from helpers.sources import build
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedproto import data
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core import rng
from fedproto.data import Source, Split, check_split
from fedproto.data.shared.lazy_array import LazyArray
from fedproto.errors import DataError, FedProtoError
from fedproto.partitions import PartitionRequest, add_test_rows, group_positions
from fedproto.partitions.nway import deal_rows
from fedproto.runs import assemble
from fedproto.runs.experiment import Experiment

MILLION, CLASSES = 1_000_000, 62
MEGABYTE = 1 << 20
quickly = settings(max_examples=30, deadline=None)


def peak_of(work):
    """What `work` returns, and the most bytes it held at one time."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- a million images


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """Write a million images of 28x28 as a sparse file: 784 MB to read, a few KB on disk."""
    folder = tmp_path_factory.mktemp("million")
    for part, count in (("", MILLION), ("_test", 10_000)):
        x = np.lib.format.open_memmap(folder / f"x{part}.npy", "w+", np.uint8, (count, 28, 28))
        x[-1] = 7
        np.save(folder / f"y{part}.npy", np.random.default_rng(0).integers(0, CLASSES, count))
    np.save(folder / "client.npy", np.arange(MILLION) % 1000)
    return folder


def test_a_million_images_are_not_read_before_they_are_used(million):
    source, peak = peak_of(lambda: build(f"npy:{million}"))
    assert source.train.x.shape == (MILLION, 28, 28) and source.model == "cnn"
    assert peak < 100 * MEGABYTE  # labels alone are 8
    assert source.train.x[-1].min() == 7


@pytest.mark.parametrize(
    "partition", ["nway(shots=5)", "natural(test_shots=5)", "iid(test_shots=5)"]
)
def test_a_million_images_are_divided_in_little_memory(million, partition):
    source = build(f"npy:{million}")
    part = configure({"partition": partition, "clients": 1000})[0].partition
    found, peak = peak_of(lambda: assemble.divide([source] * 1000, part, 0))
    assert len(found) == 1000
    assert peak < 200 * MEGABYTE


def test_a_member_reads_its_own_rows_of_a_million(million):
    settings = {
        "dataset": f"npy:{million}",
        "clients": 5,
        "shots": 5,
        "test_shots": 5,
        "device": "cpu",
    }
    found, peak = peak_of(lambda: Experiment.prepare(configure(settings)[0]).federation)
    assert len(found.members) == 5
    assert peak < 200 * MEGABYTE


def test_without_a_test_set_the_held_out_rows_stay_on_disk(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (50, 4, 4), np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(50) % 5)
    source = build(f"npy:{tmp_path}")
    assert isinstance(source.train.x, LazyArray) and isinstance(source.test.x, LazyArray)
    assert sorted([*source.train.x[:].tolist(), *source.test.x[:].tolist()]) == sorted(x.tolist())
    assert source.tensor(source.train, np.array([0])).shape == (1, 1, 4, 4)


def test_npy_is_npz_in_a_folder(tmp_path):
    arrays = {
        "x": np.random.default_rng(0).random((30, 4)),
        "y": np.arange(30) % 3,
        "client": np.arange(30) % 2,
        "classes": np.array(["cat", "dog", "owl"]),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "own.npz", **arrays)
    mapped, loaded = build(f"npy:{tmp_path}"), build(f"npz:{tmp_path}/own.npz")
    assert mapped.classes == loaded.classes and (mapped.scale, mapped.model) == (
        loaded.scale,
        loaded.model,
    )
    for one, other in ((mapped.train, loaded.train), (mapped.test, loaded.test)):
        rows = np.arange(len(one.y))
        assert one.y.tolist() == other.y.tolist() and one.writer.tolist() == other.writer.tolist()
        assert mapped.tensor(one, rows).equal(loaded.tensor(other, rows))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"y": np.zeros(3, int)}, r"must be a folder with x.npy and y.npy, but holds y.npy"),
        ({}, "but holds neither"),
        (
            {"x": np.zeros((3, 2)), "y": np.zeros(3, int), "x_test": np.zeros((3, 2))},
            "both x_test.npy and y_test.npy",
        ),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, "y must be a list of whole numbers"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, "has 3 inputs but 2 labels"),
        (
            {"x": np.array([None]), "y": np.zeros(1, int)},
            "x.npy is not a valid npy file",
        ),
        ({"x": np.full((3, 2), np.nan), "y": np.zeros(3, int)}, r"\(NaN or infinite\) in row 0"),
    ],
)
def test_unusable_npy_folders_are_refused(tmp_path, files, words):
    for name, array in files.items():
        np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(FedProtoError, match=words):
        build(f"npy:{tmp_path}")


@given(row=st.integers(0, 29), chunk=st.integers(1, 130))
@quickly
def test_a_value_that_is_not_finite_is_found_in_whatever_piece(row, chunk):
    x = np.zeros((30, 4))
    x[row, 2] = np.inf
    x[29, 3] = np.nan
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match=rf"in row {row}$"):
        patch.setattr(data, "MAX_VALUES_PER_CHECK", chunk)
        check_split("here", Split(x, np.zeros(30, int)), 1)


def test_large_floats_are_looked_at_in_pieces(tmp_path):
    x = np.lib.format.open_memmap(
        tmp_path / "x.npy", "w+", np.float32, (200_000, 28, 28)
    )  # 627 MB, all hole
    _, peak = peak_of(lambda: check_split("here", Split(x, np.zeros(len(x), int)), 1))
    assert peak < 200 * MEGABYTE


def test_normalising_leaves_the_data_as_it_was():
    x = np.ones((3, 2, 2), np.float32)
    split = Split(x, np.zeros(3, int))
    source = Source("s", ("a",), split, split, mean=(0.5,), std=(2.0,), scale=1.0)
    for _ in range(2):
        assert source.tensor(split, np.arange(3)).unique().tolist() == [0.25]
    assert (x == 1).all()


def test_images_of_a_folder_are_read_once_used_and_no_sooner(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.fromarray(np.full((3, 3), number, np.uint8)).save(
                tmp_path / name / f"{number}.png"
            )
    damaged = tmp_path / "a" / "2.png"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: whole.index(b"IDAT") + 6])  # its header is fine
    source = build(f"folder:{tmp_path}", size=3, grey=True)
    assert len(source.train.y) == 6
    with pytest.raises(DataError, match=r"a/2\.png is damaged"):
        [split.x[:] for split in (source.train, source.test)]
    damaged.write_bytes(whole)
    for split in (source.train, source.test):
        assert split.x[:].shape == (len(split.y), 3, 3)


# --- partitions: the quick forms give what the plain ones give


def a_pool(seed, clients=5, rows=300, writers=9, text=False):
    fixed = np.random.default_rng(seed)
    who = fixed.integers(0, writers, rows), fixed.integers(0, writers, 4 * rows)
    names = np.array([f"writer {number}" for number in range(writers)])
    who = tuple(names[each] for each in who) if text else who
    train, test = fixed.integers(0, 6, rows), fixed.integers(0, 6, 4 * rows)
    generator = rng.generator(seed, "partition")
    return PartitionRequest(train, test, tuple("abcdef"), clients, 3, generator, "", *who)


def plain_portions(pool, trains, shots, tests=None):
    """Class by class, as one would write it for ten clients."""
    result = []
    for client, rows in enumerate(trains):
        chosen = []
        for label in np.unique(pool.train[rows]):
            own = np.flatnonzero(pool.test == label)
            own = own if tests is None else np.intersect1d(own, tests[client])
            chosen.extend(own if shots is None else pool.generator.permutation(own)[:shots])
        result.append((sorted(rows), sorted(chosen)))
    return result


def plain_natural(pool, shots):
    chosen = np.sort(pool.generator.permutation(np.unique(pool.train_writer))[: pool.clients])
    trains = [np.flatnonzero(pool.train_writer == writer) for writer in chosen]
    tests = [
        np.flatnonzero((pool.test_writer == writer) & np.isin(pool.test, pool.train[rows]))
        for writer, rows in zip(chosen, trains, strict=True)
    ]
    return plain_portions(pool, trains, shots, tests if all(map(len, tests)) else None)


def as_lists(found):
    return [(portion.train.tolist(), portion.test.tolist()) for portion in found]


seeds = st.integers(0, 2**31)


@given(seed=seeds, shots=st.none() | st.just(2))
@quickly
def test_portions_are_the_plain_ones(seed, shots):
    trains = np.array_split(np.random.default_rng(seed).permutation(300), 40)
    assert as_lists(add_test_rows(a_pool(seed), trains, shots)) == plain_portions(
        a_pool(seed), trains, shots
    )


@given(seed=seeds, shots=st.none() | st.just(1), text=st.booleans())
@quickly
def test_natural_is_the_plain_one(seed, shots, text):
    found = plugins.build(
        "partition", Part("natural", {"test_shots": shots}), a_pool(seed, text=text)
    )
    assert as_lists(found) == plain_natural(a_pool(seed, text=text), shots)


@given(seed=seeds, clients=st.integers(1, 30))
@quickly
def test_nway_deals_as_a_plain_loop_does(seed, clients):
    fixed, pool = np.random.default_rng(seed), a_pool(seed, rows=3000)
    classes = [fixed.permutation(6)[: fixed.integers(1, 7)] for _ in range(clients)]
    ks = fixed.integers(1, 5, clients)
    hands = [[] for _ in classes]
    for label, generator in enumerate(rng.generator(seed, "rows").spawn(6)):
        stack = generator.permutation(np.flatnonzero(pool.train == label)).tolist()
        for client in range(clients):
            if label in classes[client].tolist():
                hands[client] += [stack.pop(0) for _ in range(ks[client])]
    found = deal_rows(pool, rng.generator(seed, "rows").spawn(6), classes, ks)
    assert [rows.tolist() for rows in found] == hands


@given(st.lists(st.integers(0, 9), max_size=50))
@quickly
def test_grouped_is_a_search_for_each_number(values):
    array = np.array(values, int)
    found = group_positions(array, 7)  # numbers above are nobody's
    assert [rows.tolist() for rows in found] == [
        np.flatnonzero(array == number).tolist() for number in range(7)
    ]


def test_clients_with_the_same_classes_share_their_test_rows():
    train, test = (np.arange(count) % CLASSES for count in (MILLION // 10, 100_000))
    pool = PartitionRequest(
        train, test, tuple(map(str, range(CLASSES))), 100, 1, rng.generator(0, "partition"), ""
    )
    found, peak = peak_of(lambda: plugins.build("partition", Part("iid"), pool))
    assert all(len(portion.test) == 100_000 for portion in found)
    assert peak < 50 * MEGABYTE  # 80 if each had its own
