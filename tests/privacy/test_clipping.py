"""Clipped rows keep their bound whatever they hold."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto.privacy.clipping import clip_rows

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)


def exact_square(row: torch.Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in row.tolist()), Fraction(0))


@given(st.lists(ANY_FLOAT, min_size=1, max_size=30), st.floats(1e-3, 1e3))
@settings(max_examples=300, deadline=None)
def test_no_row_is_longer_than_the_bound(values, bound):
    rows = torch.tensor([values], dtype=torch.float64)
    clipped = clip_rows(rows, bound)
    assert clipped.isfinite().all()
    assert exact_square(clipped[0]) <= Fraction(bound) ** 2


@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_the_bound_holds_for_float32_too(values):
    clipped = clip_rows(torch.tensor([values], dtype=torch.float32), 1.0)
    assert exact_square(clipped[0]) <= 1


def test_a_short_row_stays_and_a_long_one_keeps_its_direction():
    rows = torch.tensor([[0.3, 0.4], [30.0, 40.0]], dtype=torch.float64)
    clipped = clip_rows(rows, 1.0)
    torch.testing.assert_close(clipped, torch.tensor([[0.3, 0.4], [0.6, 0.8]]).double())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_counts_nothing(bad):
    rows = torch.tensor([[bad, 1.0], [0.5, 0.5]])
    clipped = clip_rows(rows, 2.0)
    assert clipped[0].tolist() == [0, 0]
    torch.testing.assert_close(clipped[1], rows[1])


def test_the_gradient_is_finite_at_zero_and_that_of_a_normalised_row_elsewhere():
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: clip_rows(each, 1.0), rows[1:])
    (gradient,) = torch.autograd.grad(clip_rows(rows, 1.0).sum(), rows)
    assert gradient.isfinite().all()
