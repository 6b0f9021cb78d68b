"""Draws that protect: from the operating system, standard normal, and repeatable only in tests."""

import os

import numpy as np
import pytest
import torch
from scipy import stats

from fedproto.core.entropy import Entropy


def test_the_operating_system_is_asked_for_every_draw(monkeypatch):
    asked = []

    def count_bytes(size):
        asked.append(size)
        return bytes([255]) * size

    monkeypatch.setattr(os, "urandom", count_bytes)
    draws = Entropy().uniform((3, 2), "test")
    assert asked == [48]
    assert draws.tolist() == [[1 - 2**-53] * 2] * 3  # all bits set, and still below 1


def test_draws_of_the_operating_system_do_not_repeat_and_leave_torchs_generator_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = Entropy().normal((50,), "noise", 1, 2)
    second = Entropy().normal((50,), "noise", 1, 2)
    assert (first != second).all()
    assert torch.equal(torch.get_rng_state(), state)


def test_seeded_draws_repeat_and_differ_by_purpose_and_part():
    entropy = Entropy(seed=5)
    first = entropy.normal((7,), "noise", 1, 2)
    assert torch.equal(first, entropy.normal((7,), "noise", 1, 2))
    assert not torch.equal(first, entropy.normal((7,), "noise", 1, 3))
    assert not torch.equal(first, entropy.normal((7,), "other", 1, 2))


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_have_the_distributions_they_should_have(seed):
    entropy = Entropy(seed)
    uniform = entropy.uniform((40_000,), "test").numpy()
    normal = entropy.normal((40_001,), "test").numpy()  # an odd number: one of a pair is left over
    assert stats.kstest(uniform, "uniform").pvalue > 1e-4
    assert stats.kstest(normal, "norm").pvalue > 1e-4
    first_half, second_half = np.split(normal[:40_000], 2)  # the two parts of each pair
    assert abs(np.corrcoef(first_half, second_half)[0, 1]) < 0.03
    assert abs(np.corrcoef(first_half**2, second_half**2)[0, 1]) < 0.03


def test_an_empty_shape_has_no_draws_and_a_scalar_has_one():
    assert Entropy().normal((0, 3), "test").shape == (0, 3)
    assert Entropy().normal((), "test").shape == ()
