"""Which rows are held out, and which clients get whole groups: properties over random data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.core.row_splits import draw_held_out, find_shared_group, keep_groups_whole

labels = st.lists(st.integers(0, 3), min_size=1, max_size=60).map(np.array)
fractions = st.sampled_from([0.1, 0.2, 0.5, 0.9])
seeds = st.integers(0, 2**32)


@st.composite
def grouped_rows(draw):
    """Labels, and the group of each row: 2 to 12 groups, whose rows may have several classes."""
    count = draw(st.integers(4, 60))
    y = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    groups = draw(st.integers(2, 12))
    group = draw(st.lists(st.integers(0, groups - 1), min_size=count, max_size=count))
    return np.array(y), np.array([f"patient {number}" for number in group])


def held_out(y, fraction, seed, group=None):
    return draw_held_out(y, fraction, np.random.default_rng(seed), group)


# --- without groups


@given(labels, fractions, seeds)
def test_every_class_keeps_a_row_and_loses_about_the_fraction(y, fraction, seed):
    held = held_out(y, fraction, seed)
    assert len(np.unique(held)) == len(held)
    assert (np.diff(held) > 0).all()
    for label in np.unique(y):
        rows = int((y == label).sum())
        taken = int((y[held] == label).sum())
        assert taken < rows
        assert abs(taken - fraction * rows) <= 1
        assert taken >= min(1, rows - 1)


@given(labels, fractions, seeds)
def test_a_seed_gives_the_same_rows_every_time(y, fraction, seed):
    assert np.array_equal(held_out(y, fraction, seed), held_out(y, fraction, seed))


def test_seeds_give_different_rows():
    y = np.zeros(50, int)
    assert not np.array_equal(held_out(y, 0.2, 0), held_out(y, 0.2, 1))


# --- with groups


@given(grouped_rows(), fractions, seeds)
def test_no_group_is_on_two_sides_and_every_class_stays(rows, fraction, seed):
    y, group = rows
    held = held_out(y, fraction, seed, group)
    kept = np.setdiff1d(np.arange(len(y)), held)
    assert not set(group[held]) & set(group[kept])
    assert set(y[kept]) == set(y)


@given(grouped_rows(), fractions, seeds)
def test_groups_come_near_to_the_fraction(rows, fraction, seed):
    """Off by at most the two largest groups: one more or less, and one for a class without any."""
    y, group = rows
    held = held_out(y, fraction, seed, group)
    sizes = np.sort(np.unique(group, return_counts=True)[1])
    classes = len(np.unique(y))
    slack = sizes[-2:].sum() + classes
    assert len(held) <= fraction * len(y) + slack


@given(grouped_rows(), seeds, st.randoms())
def test_which_groups_are_held_out_does_not_depend_on_the_order_of_the_rows(rows, seed, random):
    y, group = rows
    order = list(range(len(y)))
    random.shuffle(order)
    held = held_out(y, 0.2, seed, group)
    shuffled = held_out(y[order], 0.2, seed, group[order])
    assert set(group[held]) == set(group[order][shuffled])


@given(labels, fractions, seeds)
def test_groups_of_one_row_are_stratified_as_single_rows_are(y, fraction, seed):
    group = np.arange(len(y))
    alone = held_out(y, fraction, seed)
    grouped = held_out(y, fraction, seed, group)
    for label in np.unique(y):
        assert (y[alone] == label).sum() == (y[grouped] == label).sum()


def test_equal_groups_give_exactly_the_fraction():
    y = np.tile([0, 1], 50)
    group = np.repeat(np.arange(10), 10)
    held = held_out(y, 0.2, 0, group)
    assert np.bincount(y[held]).tolist() == [10, 10]
    assert len(np.unique(group[held])) == 2


def test_a_class_of_a_single_group_stays():
    y = np.array([0, 0, 0, 0, 1, 1])
    group = np.array(["a", "b", "c", "d", "e", "e"])
    assert 4 not in held_out(y, 0.5, 0, group)


# --- clients


@given(grouped_rows(), st.integers(1, 5), seeds)
def test_no_group_is_with_two_clients_and_no_row_is_lost(rows, clients, seed):
    y, group = rows
    order = np.random.default_rng(seed).permutation(len(y))
    dealt = np.array_split(order[: len(y) * 3 // 4], clients)
    whole = keep_groups_whole(dealt, y, group)
    assert find_shared_group([group[part] for part in whole]) is None
    assert sorted(np.concatenate(whole)) == sorted(np.concatenate(dealt))


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(5, 20), seeds)
def test_many_small_groups_are_dealt_evenly(clients, groups_per_client, seed):
    """Groups of three rows of both classes: no client is off by more than a group."""
    groups = clients * groups_per_client
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 2, 3 * groups)
    group = np.repeat(np.arange(groups), 3)
    dealt = np.array_split(generator.permutation(len(y)), clients)
    sizes = [len(part) for part in keep_groups_whole(dealt, y, group)]
    assert max(sizes) - min(sizes) <= 6


def test_clients_that_hold_whole_groups_keep_them():
    y = np.array([0, 1, 0, 1, 2, 2])
    group = np.array(["a", "a", "b", "b", "c", "c"])
    dealt = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    whole = keep_groups_whole(dealt, y, group)
    assert [sorted(part) for part in whole] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([["a"], ["b"]], None),
        ([["a", "a"], []], None),
        ([["a"], ["b", "a"]], ("a", 0, 1)),
        ([[1], [2], [3, 2]], (2, 1, 2)),
    ],
)
def test_a_shared_group_is_found(parts, found):
    assert find_shared_group([np.array(part) for part in parts]) == found
