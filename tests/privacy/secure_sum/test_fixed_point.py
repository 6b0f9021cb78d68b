"""Values as whole numbers: the stated error, the choice of 32 or 64 bits, and overflow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.errors import ConfigError, TrainingError
from fedproto.privacy.secure_sum.fixed_point import FixedPoint


def test_a_value_is_written_by_hand():
    fixed_point = FixedPoint(bits=32, fraction_bits=4, largest=100.0, members=3)
    encoded = fixed_point.encode(np.array([1.0, -1.0, 0.03, 2.53125, 0.09375]))
    # 0.03 · 16 = 0.48, and 2.53125 · 16 = 40.5 and 0.09375 · 16 = 1.5, which go to the even number
    assert encoded.tolist() == [16, 2**32 - 16, 0, 40, 2]
    assert encoded.dtype == np.dtype("<u4")
    assert fixed_point.decode(encoded).tolist() == [1.0, -1.0, 0.0, 2.5, 0.125]
    assert fixed_point.rounding_error() == 1 / 32


def test_the_shortest_number_that_is_exact_enough_is_chosen():
    small = FixedPoint.choose(members=20, largest=100.0, error=1e-4)
    assert (small.bits, small.fraction_bits) == (32, 20)  # 20 · 100 · 2^20 = 2^30.97 < 2^31
    large = FixedPoint.choose(members=20, largest=1e6, error=1e-6)
    assert (large.bits, large.fraction_bits) == (64, 38)
    assert large.rounding_error() <= 1e-6
    assert FixedPoint.choose(members=3, largest=1e-6, error=1e-9).fraction_bits <= 52


@pytest.mark.parametrize(
    ("members", "largest", "error", "sentence"),
    [
        (10, 1e12, 1e-9, "no number of 64 bits holds the sum of 10 values up to 1e\\+12"),
        (10, 0.0, 1e-9, "needs a range and an error above 0, not 0 and 1e-09"),
        (10, 1.0, 0.0, "needs a range and an error above 0"),
        (10, np.inf, 1.0, "needs a range and an error above 0"),
        (10, np.nan, 1.0, "needs a range and an error above 0"),
    ],
)
def test_a_range_that_no_number_holds_is_refused(members, largest, error, sentence):
    with pytest.raises(ConfigError, match=sentence):
        FixedPoint.choose(members, largest, error)


@pytest.mark.parametrize("value", [100.0001, -101.0, np.inf, -np.inf, np.nan])
def test_a_value_out_of_range_is_refused(value):
    fixed_point = FixedPoint.choose(5, 100.0, 1e-4)
    with pytest.raises(TrainingError, match="does not fit a secure sum, whose range is 100"):
        fixed_point.encode(np.array([1.0, value]))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("members", [3, 7, 1000])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_of_all_members_do_not_overflow(bits, members, sign):
    error = 1e-3 if bits == 32 else 1e-9
    fixed_point = FixedPoint.choose(members, 1000.0, error)
    while fixed_point.bits != bits:
        fixed_point = FixedPoint.choose(members, fixed_point.largest / 2, error)
    one = fixed_point.encode(np.array([sign * fixed_point.largest]))
    total = (one.astype(object) * members % 2**bits).astype(fixed_point.dtype)
    expected = sign * members * fixed_point.largest
    assert fixed_point.decode(total)[0] == pytest.approx(expected, rel=1e-6)
    tighter = FixedPoint(bits, fixed_point.fraction_bits + 1, fixed_point.largest, members)
    assert not tighter.cannot_overflow or tighter.fraction_bits > 52


@given(
    values=st.lists(st.lists(st.floats(-50, 50), min_size=3, max_size=3), min_size=2, max_size=8),
    error=st.sampled_from([1e-2, 1e-4, 1e-7]),
)
@settings(max_examples=100, deadline=None)
def test_a_sum_is_within_the_stated_error(values, error):
    rows = np.array(values)
    fixed_point = FixedPoint.choose(len(rows), 50.0, error)
    total = np.zeros(3, fixed_point.dtype)
    for row in rows:
        total = total + fixed_point.encode(row)
    difference = np.abs(fixed_point.decode(total) - rows.sum(0)).max()
    assert difference <= fixed_point.rounding_error(len(rows)) + 1e-12
    assert fixed_point.rounding_error() <= error
