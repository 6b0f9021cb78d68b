"""What partitions promise for every seed: no shared training images, and the right numbers."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core import rng
from fedproto.data import DataFolders
from fedproto.errors import ConfigError, DataError, FedProtoError
from fedproto.partitions import PartitionRequest
from fedproto.partitions.file import hash_partition
from fedproto.runs import assemble
from fedproto.runs.experiment import Experiment

CLASSES = 6
WRITERS = 12
OPTIONS = {"nway": {"shots": 5, "stdev": 2}, "dirichlet": {"smallest": 1}, "natural": {}, "iid": {}}

every_partition = pytest.mark.parametrize("name", OPTIONS)
seeds = st.integers(0, 2**31)
client_counts = st.integers(1, 6)
# No deadline, because the machine may be busy.
quickly = settings(max_examples=30, deadline=None)


def a_request(clients=4, seed=0, **changes):
    """A request for 600 training and 120 test images of uneven classes, always the same ones."""
    fixed = np.random.default_rng(1)
    request = PartitionRequest(
        train=fixed.integers(0, CLASSES, 600),
        test=fixed.integers(0, CLASSES, 120),
        names=tuple("abcdef"),
        clients=clients,
        shots=7,
        generator=rng.generator(seed, "partition"),
        source="",
        train_writer=fixed.integers(0, WRITERS, 600),
    )
    return request._replace(**changes)


def divide(name, request, **options):
    return plugins.build("partition", Part(name, OPTIONS.get(name, {}) | options), request)


def rows_of(portions):
    return [(portion.train.tolist(), portion.test.tolist()) for portion in portions]


def counts_of(request, portion):
    """The classes of a client, and its number of training images of each."""
    return np.unique(request.train[portion.train], return_counts=True)


# --- all partitions


@every_partition
@given(clients=client_counts, seed=seeds)
@quickly
def test_no_training_row_is_in_two_portions(name, clients, seed):
    portions = divide(name, a_request(clients, seed))
    rows = np.concatenate([portion.train for portion in portions])
    assert len(portions) == clients
    assert len(np.unique(rows)) == len(rows)


@every_partition
@given(clients=client_counts, seed=seeds)
@quickly
def test_rows_are_sorted_and_in_range(name, clients, seed):
    for portion in divide(name, a_request(clients, seed)):
        for rows, there in ((portion.train, 600), (portion.test, 120)):
            assert (np.diff(rows) > 0).all()
            assert rows[0] >= 0 and rows[-1] < there


@every_partition
@given(clients=client_counts, seed=seeds)
@quickly
def test_a_client_is_tested_on_all_test_rows_of_its_classes(name, clients, seed):
    request = a_request(clients, seed)
    for portion in divide(name, request):
        own = np.unique(request.train[portion.train])
        assert portion.test.tolist() == np.flatnonzero(np.isin(request.test, own)).tolist()


@every_partition
@given(clients=client_counts, seed=seeds, test_shots=st.integers(1, 10))
@quickly
def test_test_shots_are_that_many_of_each_own_class(name, clients, seed, test_shots):
    request = a_request(clients, seed)
    for portion in divide(name, request, test_shots=test_shots):
        own = np.unique(request.train[portion.train])
        labels, counts = np.unique(request.test[portion.test], return_counts=True)
        assert labels.tolist() == own.tolist()
        assert (counts == test_shots).all()


@every_partition
def test_the_same_seed_gives_the_same_rows(name):
    first, again = (rows_of(divide(name, a_request(seed=3), test_shots=2)) for _ in range(2))
    assert first == again


@every_partition
def test_another_seed_gives_other_rows(name):
    first, other = (rows_of(divide(name, a_request(seed=seed))) for seed in (3, 4))
    assert first != other


def test_test_shots_are_drawn_by_the_seed():
    # With iid data every client has all classes, whatever the seed: only the draw can differ.
    first, other = (
        divide("iid", a_request(1, seed), test_shots=3)[0].test.tolist() for seed in (3, 4)
    )
    assert first != other


@every_partition
def test_too_few_test_images_are_an_error_with_class_and_numbers(name):
    request = a_request()
    there = dict(zip(request.names, np.bincount(request.test), strict=True))
    with pytest.raises(ConfigError, match="test rows, but 60 are wanted") as caught:
        divide(name, request, test_shots=60)
    assert any(
        f"class {label!r} has {count} test rows" in str(caught.value)
        for label, count in there.items()
    )


# --- nway


@st.composite
def nway_settings(draw):
    """A request that always has enough images, and options for it."""
    classes, clients, shots = draw(st.integers(1, 8)), draw(client_counts), draw(st.integers(1, 8))
    options = {
        "ways": draw(st.integers(1, classes)),
        "shots": shots,
        "stdev": draw(st.integers(0, 4)),
        "shots_stdev": draw(st.none() | st.integers(0, 4)),
    }
    train = np.repeat(np.arange(classes), clients * (shots + 4))
    request = a_request(
        clients,
        draw(seeds),
        names=tuple("abcdefgh"[:classes]),
        train=train,
        test=np.arange(classes),
    )
    return request, options


@given(nway_settings())
@quickly
def test_nway_classes_are_within_stdev_of_ways(case):
    request, options = case
    ways, stdev = options["ways"], options["stdev"]
    low, high = max(min(2, ways), ways - stdev), min(len(request.names), ways + stdev)
    for portion in divide("nway", request, **options):
        assert low <= len(counts_of(request, portion)[0]) <= high


@given(nway_settings())
@quickly
def test_nway_gives_a_client_equally_many_images_of_each_class_within_shots_stdev(case):
    request, options = case
    spread = options["stdev"] if options["shots_stdev"] is None else options["shots_stdev"]
    for portion in divide("nway", request, **options):
        _, counts = counts_of(request, portion)
        assert len(set(counts)) == 1
        assert max(1, options["shots"] - spread) <= counts[0] <= options["shots"] + spread


@pytest.mark.parametrize("noise", ["uniform", "normal"])
@given(ways=st.integers(1, CLASSES), shots=st.integers(1, 8), seed=seeds)
@quickly
def test_nway_without_stdev_is_exact(noise, ways, shots, seed):
    request = a_request(seed=seed)
    for portion in divide("nway", request, ways=ways, shots=shots, stdev=0, noise=noise):
        assert counts_of(request, portion)[1].tolist() == [shots] * ways


@given(ways=st.integers(1, CLASSES), stdev=st.floats(0, 20), seed=seeds)
@quickly
def test_nway_normal_noise_stays_between_two_and_all_classes(ways, stdev, seed):
    request = a_request(seed=seed)
    for portion in divide("nway", request, ways=ways, stdev=stdev, shots_stdev=0, noise="normal"):
        assert min(2, ways) <= len(counts_of(request, portion)[0]) <= CLASSES


@given(seed=seeds)
@quickly
def test_nway_normal_noise_leaves_at_least_one_image(seed):
    request = a_request(seed=seed)
    # Half of all draws around 1 lie below it, so a missing bound would show.
    for portion in divide("nway", request, ways=3, shots=1, stdev=0, shots_stdev=8, noise="normal"):
        assert counts_of(request, portion)[1].min() >= 1


def test_nway_normal_noise_has_the_stated_spread():
    request = a_request(400, train=np.repeat(np.arange(CLASSES), 80_000))
    portions = divide("nway", request, ways=2, shots=100, stdev=0, shots_stdev=10, noise="normal")
    shots = [counts_of(request, portion)[1][0] for portion in portions]
    # The standard error of both estimates is 10 / sqrt(400) or less: these bounds are four of them.
    assert abs(np.mean(shots) - 100) < 2
    assert abs(np.std(shots) - 10) < 2


def test_nway_uniform_noise_reaches_both_ends():
    request = a_request(400, train=np.repeat(np.arange(CLASSES), 10_000))
    portions = divide("nway", request, ways=4, shots=10, stdev=2, shots_stdev=3)
    counted = [counts_of(request, portion) for portion in portions]
    assert {len(labels) for labels, _ in counted} == {2, 3, 4, 5, 6}
    assert {int(counts[0]) for _, counts in counted} == set(range(7, 14))


def test_nway_without_shots_takes_the_data_sets_own_number():
    request = a_request()
    (portion, *_) = plugins.build("partition", Part("nway", {"ways": 2, "stdev": 0}), request)
    assert counts_of(request, portion)[1].tolist() == [7, 7]


@pytest.mark.parametrize(("classes", "ways"), [(1, 1), (2, 2), (3, 3), (6, 3)])
def test_nway_without_ways_takes_three_or_as_many_as_there_are(classes, ways):
    train = np.repeat(np.arange(classes), 60)
    request = a_request(train=train, test=np.arange(classes), names=tuple("abcdef"[:classes]))
    for portion in divide("nway", request, stdev=0):
        assert len(counts_of(request, portion)[0]) == ways


def test_nway_spreads_the_data_sets_own_shots_by_less_than_they_are():
    """Around a shot of 1, a stdev of 2 would give out twice as many as the data set has to give."""
    request = a_request(shots=1)
    options = {"ways": 3, "stdev": 2}
    for portion in plugins.build("partition", Part("nway", options), request):
        assert set(counts_of(request, portion)[1]) == {1}
    for asked in ({"shots": 1}, {"shots_stdev": 2}):  # what is asked for is done
        portions = plugins.build("partition", Part("nway", options | asked), a_request(20, shots=1))
        assert {int(n) for p in portions for n in counts_of(request, p)[1]} == {1, 2, 3}


def test_nway_with_too_few_images_names_class_and_numbers():
    request = a_request(clients=3, names=("cat",), train=np.zeros(10, int), test=np.zeros(2, int))
    with pytest.raises(ConfigError, match="class 'cat' has 10 training rows, but 12 are wanted"):
        divide("nway", request, ways=1, shots=4, stdev=0)


def test_nway_with_more_ways_than_classes_is_refused():
    with pytest.raises(ConfigError, match="ways is 7, but there are only 6 classes"):
        divide("nway", a_request(), ways=7)


# --- nway: one setting does not change what another one draws


def plenty(clients=20, seed=0):
    """A request that never runs out."""
    train, test = (np.tile(np.arange(CLASSES), each) for each in (2000, 60))
    return a_request(clients, seed, train=train, test=test, train_writer=None)


def classes_of(request, portions):
    return [np.unique(request.train[portion.train]).tolist() for portion in portions]


def shots_of(request, portions):
    return [int(counts_of(request, portion)[1][0]) for portion in portions]


other_settings = st.fixed_dictionaries(
    {},
    optional={
        "shots": st.integers(1, 40),
        "shots_stdev": st.integers(0, 20),
        "test_shots": st.none() | st.integers(1, 30),
    },
)


@given(seed=seeds, changed=other_settings)
@quickly
def test_the_clients_classes_do_not_depend_on_numbers_of_images(seed, changed):
    before = {"ways": 3, "stdev": 2, "shots": 10, "shots_stdev": 2, "test_shots": None}
    first, other = (
        classes_of(plenty(seed=seed), divide("nway", plenty(seed=seed), **how))
        for how in (before, before | changed)
    )
    assert first == other


@pytest.mark.parametrize("noise", ["uniform", "normal"])
@given(seed=seeds, spread=st.integers(1, 9))
@quickly
def test_the_noise_of_k_does_not_change_the_clients_classes(noise, seed, spread):
    fixed = {"ways": 3, "stdev": 0, "shots": 12}  # every n is 3, whatever the kind of noise
    portions = divide("nway", plenty(seed=seed), **fixed, shots_stdev=spread, noise=noise)
    still = divide("nway", plenty(seed=seed), **fixed)
    assert classes_of(plenty(), portions) == classes_of(plenty(), still)
    assert len(set(shots_of(plenty(), portions))) > 1


@pytest.mark.parametrize("noise", ["uniform", "normal"])
@given(seed=seeds, clients=st.integers(1, 20), test_shots=st.none() | st.integers(1, 9))
@quickly
def test_a_further_client_changes_nothing_for_those_before(noise, seed, clients, test_shots):
    options = {
        "ways": 3,
        "stdev": 2,
        "shots": 10,
        "shots_stdev": 4,
        "noise": noise,
        "test_shots": test_shots,
    }
    fewer, more = (
        rows_of(divide("nway", plenty(n, seed), **options)) for n in (clients, clients + 1)
    )
    assert more[:-1] == fewer


@given(seed=seeds, test_shots=st.none() | st.integers(1, 59))
@quickly
def test_test_images_do_not_change_training_rows(seed, test_shots):
    fewer, more = (
        [portion.train.tolist() for portion in divide("nway", plenty(seed=seed), test_shots=n)]
        for n in (test_shots, (test_shots or 0) + 1)
    )
    assert fewer == more


@given(seed=seeds, ways=st.integers(2, CLASSES - 1), stdev=st.integers(0, 3))
@quickly
def test_with_more_ways_a_client_keeps_its_classes(seed, ways, stdev):
    """And its images of each: n is drawn apart from k, and from which classes they are."""
    options = {"shots": 10, "shots_stdev": 4}
    few = divide("nway", plenty(seed=seed), ways=ways, stdev=0, **options)
    more = divide("nway", plenty(seed=seed), ways=ways + 1, stdev=0, **options)
    pairs = zip(classes_of(plenty(), few), classes_of(plenty(), more), strict=True)
    assert all(set(old) < set(new) for old, new in pairs)
    noisy = divide("nway", plenty(seed=seed), ways=ways, stdev=stdev, **options)
    for old, new in zip(classes_of(plenty(), few), classes_of(plenty(), noisy), strict=True):
        assert set(old) <= set(new) or set(new) <= set(old)
    assert shots_of(plenty(), few) == shots_of(plenty(), more) == shots_of(plenty(), noisy)


def test_clients_draw_other_classes():
    held = classes_of(plenty(), divide("nway", plenty(), ways=3, stdev=0))
    assert len({tuple(each) for each in held}) > 10  # of 20 possible sets
    assert {label for each in held for label in each} == set(range(CLASSES))


# --- iid and dirichlet


@pytest.mark.parametrize("name", ["iid", "dirichlet"])
@given(clients=client_counts, seed=seeds)
@quickly
def test_iid_and_dirichlet_use_all_rows(name, clients, seed):
    rows = np.concatenate([portion.train for portion in divide(name, a_request(clients, seed))])
    assert np.sort(rows).tolist() == list(range(600))


@given(clients=st.integers(1, 100), seed=seeds)
@quickly
def test_iid_sizes_differ_by_at_most_one(clients, seed):
    sizes = [len(portion.train) for portion in divide("iid", a_request(clients, seed))]
    assert max(sizes) - min(sizes) <= 1


def test_iid_with_more_clients_than_images_is_refused():
    with pytest.raises(ConfigError, match="601 clients cannot share 600 training rows"):
        divide("iid", a_request(601))


@given(smallest=st.integers(1, 40), seed=seeds)
@quickly
def test_dirichlet_gives_each_client_the_smallest_number_or_more(smallest, seed):
    portions = divide("dirichlet", a_request(4, seed), alpha=1.0, smallest=smallest)
    assert min(len(portion.train) for portion in portions) >= smallest


@given(alpha=st.floats(1e-300, 1e6), seed=seeds)
@quickly
def test_dirichlet_loses_and_doubles_no_row_at_any_alpha(alpha, seed):
    # Tiny alphas are where proportions underflow, and cuts could become nonsense.
    rows = np.concatenate(
        [portion.train for portion in divide("dirichlet", a_request(2, seed), alpha=alpha)]
    )
    assert np.sort(rows).tolist() == list(range(600))


@given(rows=st.integers(30, 400), seed=seeds)
@quickly
def test_dirichlet_takes_as_many_rows_of_each_class_as_give_the_mean(rows, seed):
    request = a_request(4, seed)
    portions = divide("dirichlet", request, alpha=1.0, smallest=1, rows=rows)
    taken = np.concatenate([portion.train for portion in portions])
    wanted = -(-4 * rows // CLASSES)
    available = np.bincount(request.train, minlength=CLASSES)
    counts = np.bincount(request.train[taken], minlength=CLASSES)
    assert counts.tolist() == np.minimum(wanted, available).tolist()
    assert len(np.unique(taken)) == len(taken)


def test_dirichlet_is_the_more_uneven_the_smaller_alpha_is():
    def classes_held(alpha):
        request = a_request(6)
        return sum(
            len(counts_of(request, portion)[0])
            for portion in divide("dirichlet", request, alpha=alpha)
        )

    assert classes_held(0.05) < classes_held(0.5) < classes_held(100.0) == 6 * CLASSES


def test_dirichlet_draws_the_images_of_a_class():
    # Files are often sorted by writer: neighbouring images must not all go to one client.
    request = a_request(2, train=np.zeros(100, int), names=("a",))
    first, _ = divide("dirichlet", request, alpha=100.0)
    assert len(first.train) < 90 and first.train.max() > 90


def test_dirichlet_that_cannot_be_fulfilled_says_so():
    with pytest.raises(ConfigError, match="no split of 600 rows that gives each of 4 clients 151"):
        divide("dirichlet", a_request(4), smallest=151)


# --- natural


@given(clients=st.integers(1, WRITERS), seed=seeds)
@quickly
def test_natural_gives_a_client_exactly_its_writers_rows(clients, seed):
    request = a_request(clients, seed)
    writers = set()
    for portion in divide("natural", request):
        (writer,) = np.unique(request.train_writer[portion.train])
        assert portion.train.tolist() == np.flatnonzero(request.train_writer == writer).tolist()
        writers.add(int(writer))
    assert len(writers) == clients


def test_natural_tests_on_the_writers_own_images_of_classes_it_trains():
    # Writer 0 trains class 0 alone, so its test row of class 1 says nothing about it.
    request = a_request(
        clients=2,
        train=np.array([0, 0, 1, 0]),
        train_writer=np.array([0, 0, 1, 1]),
        test=np.array([0, 1, 0, 1, 0]),
        test_writer=np.array([0, 0, 1, 1, 0]),
    )
    assert rows_of(divide("natural", request)) == [([0, 1], [0, 4]), ([2, 3], [2, 3])]


def test_natural_takes_test_shots_from_the_writers_own_images():
    request = a_request(
        clients=2,
        train=np.zeros(4, int),
        train_writer=np.array([0, 0, 1, 1]),
        test=np.zeros(6, int),
        test_writer=np.array([0, 1, 0, 1, 0, 1]),
    )
    first, second = divide("natural", request, test_shots=2)
    assert len(first.test) == len(second.test) == 2
    assert set(first.test) <= {0, 2, 4} and set(second.test) <= {1, 3, 5}


def test_natural_tests_on_everybodys_images_where_a_writer_has_none():
    # As in chars74k, whose test typefaces are nobody's training typefaces.
    request = a_request(
        clients=2,
        train=np.array([0, 1]),
        train_writer=np.array([0, 1]),
        test=np.array([0, 1, 0]),
        test_writer=np.array([0, 7, 7]),
    )
    assert rows_of(divide("natural", request)) == [([0], [0, 2]), ([1], [1])]


def test_natural_tests_on_everybodys_images_where_a_writers_own_are_of_other_classes():
    request = a_request(
        clients=2,
        train=np.array([0, 1]),
        train_writer=np.array([0, 1]),
        test=np.array([1, 1, 0]),
        test_writer=np.array([0, 1, 7]),
    )
    assert rows_of(divide("natural", request)) == [([0], [2]), ([1], [0, 1])]


def test_natural_without_writers_is_refused():
    with pytest.raises(ConfigError, match="natural needs a data set that says who wrote each row"):
        divide("natural", a_request(train_writer=None))


def test_natural_with_more_clients_than_writers_is_refused():
    problem = r"clients is 13, but the training rows name only 12 different writers \(values of"
    with pytest.raises(ConfigError, match=f"{problem}.*pass --clients 12 or fewer"):
        divide("natural", a_request(13))


@pytest.mark.parametrize("clients", [4, 2])
def test_natural_numbers_clients_in_the_sorted_order_of_their_writers(clients):
    hospitals = np.array(["west", "east", "South", "north"])
    request = a_request(
        clients, train=np.zeros(4, int), test=np.zeros(4, int), train_writer=hospitals
    )._replace(test_writer=None)
    order = [str(hospitals[train[0]]) for train, _ in rows_of(divide("natural", request))]
    assert order == sorted(order)
    assert len(order) == clients


# --- file: a partition written before


def federation(**options):
    return Experiment.prepare(
        configure({"dataset": "digits", "clients": 3, "device": "cpu"} | options)[0]
    ).federation


@pytest.fixture(scope="module")
def written():
    return federation(ways=3, stdev=1, shots=10).partition


@pytest.fixture
def stored(tmp_path, written):
    """A function that writes a changed partition, with a new hash if wanted."""

    def store(change=lambda content: None, rehash=True):
        content = copy.deepcopy(written)
        change(content)
        path = tmp_path / "partition.json"
        path.write_text(
            json.dumps(content | ({"sha256": hash_partition(content)} if rehash else {}))
        )
        return f"file:{path}"

    return store


def test_file_reads_back_what_was_written(stored, written):
    again = federation(partition=stored(rehash=False), seed=99)  # a seed has no say in it
    assert again.partition == written


@pytest.mark.parametrize("partition", ["nway(shots=10,test_shots=4)", "iid", "dirichlet"])
def test_file_gives_bit_identical_examples(tmp_path, partition):
    first = federation(partition=partition, seed=5)
    (tmp_path / "partition.json").write_text(json.dumps(first.partition))
    again = federation(partition=f"file:{tmp_path}/partition.json")
    for one, other in zip(first.members, again.members, strict=True):
        for part in ("train", "test"):
            a, b = getattr(one, part), getattr(other, part)
            assert a.x[a.rows].equal(b.x[b.rows]) and a.y[a.rows].equal(b.y[b.rows])


def change_a_row(content):
    content["clients"][0]["train"][0] += 1


def use_a_row_twice(content):
    content["clients"][1]["train"][0] = content["clients"][0]["train"][0]
    content["clients"][1]["classes"] = []


def claim_a_class(content):
    held = content["clients"][0]["classes"]
    held.append(next(name for name in "0123456789" if name not in held))


def name_a_row_out_of_range(content):
    content["clients"][2]["test"][-1] = 359  # there are 359 test rows


def name_a_negative_row(content):
    content["clients"][2]["train"][0] = -1  # numpy would take it for the last row


def belong_to_other_data(content):
    for client in content["clients"]:
        client["labels"] = "0123456789abcdef"


def lose_a_client(content):
    content["clients"].pop()


@pytest.mark.parametrize(
    ("change", "rehash", "words"),
    [
        (change_a_row, False, "was changed after it was written"),
        (use_a_row_twice, True, r"gives training row \d+ to more than one client"),
        (claim_a_class, True, r"client 0 claims class '\d' but has no training row of it"),
        (
            name_a_row_out_of_range,
            True,
            "client 2 names a test row out of range: the data set has rows 0 to 358",
        ),
        (name_a_negative_row, True, "client 2 names a train row out of range"),
        (belong_to_other_data, True, "divides another data set"),
        (lose_a_client, True, "among 2 clients, but 3 are wanted"),
    ],
)
def test_file_refuses(stored, change, rehash, words):
    with pytest.raises(DataError, match=words):
        federation(partition=stored(change, rehash))


def test_file_refuses_the_wrong_data_set(stored, tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((30, 4), np.float32), y=np.arange(30) % 3)
    with pytest.raises(DataError, match="divides another data set"):
        federation(dataset=f"npz:{tmp_path}/own.npz", partition=stored(rehash=False))


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", "3", "\udcff"], ids=repr)
def test_file_refuses_other_files(tmp_path, text):
    path = tmp_path / "partition.json"
    if text is not None:  # None: there is no such file
        path.write_bytes(text.encode(errors="surrogateescape"))
    refusal = r"partition.json (is not a partition file|is not valid JSON|cannot be read)"
    with pytest.raises(DataError, match=refusal):
        federation(partition=f"file:{path}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ways": 11}, "ways is 11, but there are only 10 classes"),
        ({"partition": "natural"}, "natural needs a data set that says who wrote each row"),
        (
            {"ways": 10, "shots": 100, "stdev": 0},
            r"class '\d' has \d+ training rows, but 300 are wanted",
        ),
        (
            {"partition": "iid", "test_shots": 90},
            r"class '\d' has \d+ test rows, but 90 are wanted",
        ),
        ({"stdev": 0.9}, "stdev is 0.9, but uniform noise is in whole numbers"),
        ({"partition": "file"}, "partition 'file' needs a path"),
        ({"partition": "nway:x"}, "partition 'nway' takes no path"),
    ],
)
def test_impossible_partitions_are_refused_in_one_line(options, words):
    with pytest.raises(FedProtoError, match=words) as caught:
        federation(**options)
    assert "\n" not in str(caught.value)


def test_two_sources_with_equal_labels_are_told_apart(tmp_path):
    """A run over both must find its own clients again in its partition file."""
    for name in "ab":
        np.savez(
            tmp_path / f"{name}.npz",
            x=np.random.default_rng(0).normal(size=(60, 4)),
            y=np.arange(60) % 3,
        )
    mix = {
        "dataset": f"npz:{tmp_path}/a.npz*2,npz:{tmp_path}/b.npz*2",
        "clients": 4,
        "shots": 3,
        "ways": 2,
        "stdev": 0,
    }
    written = Experiment.prepare(configure(mix)[0]).federation.partition
    (tmp_path / "partition.json").write_text(json.dumps(written))
    again = {
        **{key: mix[key] for key in ("dataset", "clients")},
        "partition": f"file:{tmp_path}/partition.json",
    }
    assert Experiment.prepare(configure(again)[0]).federation.partition == written


@pytest.mark.parametrize("name", ["mnist5k", "digits"])
def test_embedded_data_is_enough_for_the_defaults(name):
    """Whatever the seed, the most wanted class of 20 clients must not run out."""
    source = plugins.build("dataset", Part(name), DataFolders())
    for seed in range(200):
        assert len(assemble.divide([source] * 20, Part("nway"), seed)) == 20
