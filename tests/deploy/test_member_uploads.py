"""Uploads that are kept by the rows that members sent: against dense ones, and sums of sums."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.core.tensors import flatten_upload, sum_uploads
from fedproto.core.types import Group, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.deploy import member_uploads
from fedproto.deploy.member_uploads import MemberUploads

GROUPS = {"prototypes"}


def make_pair(members: int, classes: int, dim: int) -> tuple[MemberUploads, LatestUploads]:
    """Return the same random uploads, sparse and dense; every third member has none."""
    draw = torch.Generator().manual_seed(members + classes + dim)
    sparse = MemberUploads(GROUPS, classes)
    dense = LatestUploads(members)
    sparse.add_clients(members)
    for number in range(0, members, 1):
        if number % 3 == 2:
            continue
        held = max(1, classes // 3)
        places = torch.randperm(classes, generator=draw)[:held].sort().values
        weight = torch.rand(held, generator=draw) + 0.5
        sums = {"prototypes": torch.randn(held, dim, generator=draw)}
        upload = {"prototypes": Group(sums, weight, {})}
        sparse.put(number, upload, places, 1 + number % 2)
        dense.store_one(number, spread(upload, places, classes), 1 + number % 2)
    return sparse, dense


def spread(upload: Upload, places: torch.Tensor, classes: int) -> Upload:
    group = upload["prototypes"]
    sums = torch.zeros(classes, group.sums["prototypes"].shape[1])
    weight = torch.zeros(classes)
    sums[places] = group.sums["prototypes"]
    weight[places] = group.weight
    return {"prototypes": Group({"prototypes": sums}, weight, {})}


def assert_equal(one: Upload | None, other: Upload | None) -> None:
    assert one is not None and other is not None
    first, second = flatten_upload(one), flatten_upload(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (40, 130, 12)])
def test_sparse_uploads_are_the_dense_ones(shape: tuple[int, int, int]) -> None:
    sparse, dense = make_pair(*shape)
    assert sparse.clients() == dense.clients() and sparse.rounds() == dense.rounds()
    for number in dense.clients():
        assert_equal(sparse.get(number), dense.get(number))
    for round in (None, 1):
        assert_equal(sparse.recall(round), dense.recall(round))


@pytest.mark.parametrize("at_a_time", [1, 2**24])
def test_their_sum_is_that_of_dense_ones_bit_by_bit(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_uploads, "VALUES_AT_A_TIME", at_a_time)
    sparse, dense = make_pair(40, 130, 12)
    sparse.adds = True
    uploads = dense.recall()
    assert uploads is not None
    assert_equal(sparse.recall(), sum_uploads(uploads))


def test_leavers_and_classes_go_and_a_file_keeps_the_rest() -> None:
    sparse, dense = make_pair(12, 9, 4)
    places = torch.tensor([8, 1, 4, 5])
    for uploads in (sparse, dense):
        uploads.remove(3)
        uploads.keep_classes(places, GROUPS)
        uploads.widen(6, GROUPS)
    again = MemberUploads(GROUPS, 0)
    again.read(sparse.export())
    for kept in (sparse, again):
        assert kept.clients() == dense.clients()
        assert_equal(kept.recall(), dense.recall())


def test_damaged_files_are_refused() -> None:
    exported = make_pair(6, 5, 2)[0].export()
    for damage in (
        {"uploads.classes": torch.tensor(1)},
        {"uploads.rows": exported["uploads.rows"][1:]},
        {"uploads.counts": exported["uploads.counts"][1:]},
        {"uploads.values.prototypes/weight": torch.ones(2)},
    ):
        with pytest.raises(ValueError, match="not those of its members and classes"):
            MemberUploads(GROUPS, 0).read(exported | damage)


# --- hierarchical aggregation


def to_fixed_point(value: float) -> int:
    """Return a value in units of 2**-40, as whole numbers add up exactly."""
    return round(Fraction(value) * 2**40)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_a_sum_of_sums_is_the_flat_sum_exactly(values: list[float], fan_ins: list[int]) -> None:
    """However members are divided among the servers of each level; sums of floats only nearly."""
    numbers = [to_fixed_point(value) for value in values]
    level = numbers
    for fan_in in fan_ins:
        level = [sum(level[place : place + fan_in]) for place in range(0, len(level), fan_in)]
    assert sum(level) == sum(numbers)
    assert sum(level) / 2**40 == pytest.approx(math.fsum(values), abs=60 * 2**-40)
