"""Uploads that are kept by the rows that members sent: against dense ones, and sums of sums."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedproto.core.tensors import flatten_upload, sum_uploads
from fedproto.core.types import Group, Upload
from fedproto.core.uploads import LatestUploads
from fedproto.deploy import member_uploads
from fedproto.deploy.member_uploads import MemberUploads
from fedproto.deploy.row_sums import add_rows
from fedproto.privacy.secure_sum.fixed_point import FixedPoint

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


def test_a_small_sum_is_that_of_dense_ones_bit_by_bit() -> None:
    sparse, dense = make_pair(40, 130, 12)
    sparse.adds = True
    uploads = dense.recall()
    assert uploads is not None
    assert_equal(sparse.recall(), sum_uploads(uploads))


@settings(deadline=None)
@given(
    st.one_of(st.integers(1, 70), st.integers(250, 320)),
    st.integers(1, 9),
    st.sampled_from([64, 128]),
)
@example(members=5_000, classes=3, dim=64)
def test_a_large_sum_is_that_of_dense_ones_bit_by_bit(members: int, classes: int, dim: int) -> None:
    """torch adds columns of other numbers in another order, which depends on the processor."""
    sparse, dense = make_pair(members, classes, dim)
    sparse.adds = True
    uploads = dense.recall()
    assert uploads is not None
    expected = uploads["prototypes"].sums["prototypes"].sum(0, keepdim=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member_uploads, "LARGEST_SPREAD_VALUES", 0)
        found = sparse.recall()
    assert found is not None
    assert torch.equal(found["prototypes"].sums["prototypes"], expected)
    exact = uploads["prototypes"].weight.double().sum(0, keepdim=True)
    assert torch.allclose(found["prototypes"].weight.double(), exact, rtol=1e-6, atol=0)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=300), st.integers(1, 5))
def test_a_row_that_is_missing_counts_like_one_of_zeros(held: list[bool], dim: int) -> None:
    draw = torch.Generator().manual_seed(len(held) + dim)
    rows = torch.randn(len(held), 1, dim, generator=draw)
    place = torch.tensor([1])
    full = [(place, row * is_held) for row, is_held in zip(rows, held, strict=True)]
    nothing = (place[:0], rows[0, :0])
    sparse = [part if is_held else nothing for part, is_held in zip(full, held, strict=True)]
    assert torch.equal(add_rows(sparse, torch.zeros(3, dim)), add_rows(full, torch.zeros(3, dim)))


def test_uploads_without_rows_of_classes_are_added_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of a model, of which some members have one tensor more."""
    monkeypatch.setattr(member_uploads, "LARGEST_SPREAD_VALUES", 0)
    uploads = MemberUploads([], 0, adds=True)
    uploads.add_clients(40)
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(40, 2, 32, generator=draw)
    for number, value in enumerate(values):
        sums = {"weight": value} if number % 2 else {"weight": value, "bias": value[0]}
        upload = {"model": Group(sums, torch.tensor(1.0 + number))}
        uploads.put(number, upload, torch.zeros(0, dtype=torch.int64), 1)
    found = uploads.recall()
    assert found is not None
    assert torch.equal(found["model"].sums["weight"], values.sum(0, keepdim=True))
    assert torch.allclose(found["model"].sums["bias"][0], values[::2, 0].sum(0))
    assert found["model"].weight.tolist() == [40 * 41 / 2]


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


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 90), st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]))
def test_two_levels_of_servers_make_the_flat_sum(
    members: int, per_region: int, dtype: torch.dtype
) -> None:
    """Exactly in whole numbers; in floats up to one rounding for each addition on the way."""
    draw = torch.Generator().manual_seed(members)
    values = torch.randn(members, 3, 4, generator=draw, dtype=torch.float64).to(dtype)
    fixed_point = FixedPoint.choose(members, largest=100.0, error=1e-6)
    whole = fixed_point.encode(values.numpy())
    regions = []
    of_regions = np.zeros(values.shape[1:], whole.dtype)
    for first in range(0, members, per_region):
        in_region = slice(first, first + per_region)
        regions.append(add_all(values[in_region]))
        of_regions += whole[in_region].sum(0, dtype=whole.dtype)
    assert np.array_equal(of_regions, whole.sum(0, dtype=whole.dtype))
    error = add_all(torch.stack(regions)).double() - values.double().sum(0)
    bound = members * torch.finfo(dtype).eps * values.double().abs().sum(0)
    assert (error.abs() <= bound).all()


def add_all(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first axis as a server makes it that keeps uploads by rows."""
    everywhere = torch.arange(values.shape[1])
    return add_rows([(everywhere, value) for value in values], torch.zeros_like(values[0]))
