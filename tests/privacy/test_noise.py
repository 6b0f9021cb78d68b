"""Noise on a grid: its size, its source, and that nothing but the grid is left of a value."""

import math

import pytest
import torch
from scipy import stats
from torch.func import vmap

from fedproto.privacy.noise import Grid, add_noise

GRID = Grid.fit(sensitivity=2.0, values=50, noise=1.5)


@pytest.mark.parametrize("seeded", [True, False])
def test_noise_is_normal_with_the_promised_deviation(seeded, repeatable_entropy):
    noisy = add_noise(torch.zeros(40_000), GRID, torch.tensor(3), "test", seeded)
    assert GRID.deviation >= 3.0
    assert GRID.deviation == pytest.approx(3.0, rel=1e-4)
    assert stats.kstest(noisy.numpy() / GRID.deviation, "norm").pvalue > 1e-5


def test_what_is_released_lies_on_the_grid_and_its_low_bits_tell_nothing():
    values = torch.rand(1000, dtype=torch.float64) * 100
    noisy = add_noise(values, GRID, torch.tensor(0), "test", seeded=False)
    steps = noisy / GRID.step
    assert torch.equal(steps, steps.round())
    assert math.log2(GRID.step).is_integer()


def test_the_grid_pays_for_the_rounding_of_the_values():
    many = Grid.fit(sensitivity=1.0, values=10_000, noise=1.0)
    assert many.deviation >= 1.0 + many.step * 100
    # Two vectors that differ by at most 1 differ by at most that after rounding.
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(10_000, dtype=torch.float64, generator=generator)
    change = torch.randn(10_000, dtype=torch.float64, generator=generator)
    second = first + change / change.norm()
    rounded = (second / many.step).round() - (first / many.step).round()
    assert float(rounded.norm()) * many.step <= many.deviation


def test_clients_of_a_batch_have_noise_of_their_own():
    def draw(value, key):
        return add_noise(value, GRID, key, "test", seeded=False)

    noisy = vmap(draw)(torch.zeros(200, 3), torch.arange(200))
    assert len(set(noisy.flatten().tolist())) > 590
    same_value = vmap(lambda key: draw(torch.zeros(3), key))(torch.arange(200))
    assert len(set(same_value.flatten().tolist())) > 590
    in_chunks = vmap(draw, chunk_size=7)(torch.zeros(200, 3), torch.arange(200))
    assert len(set(in_chunks.flatten().tolist())) > 590


def test_seeded_noise_is_the_same_for_one_client_and_for_many():
    keys = torch.arange(5)

    def draw(key):
        return add_noise(torch.zeros(4), GRID, key, "test", seeded=True)

    together = vmap(draw)(keys)
    assert torch.equal(together, torch.stack([draw(key) for key in keys]))
    other_purpose = add_noise(torch.zeros(4), GRID, keys[0], "other", seeded=True)
    assert not torch.equal(together[0], other_purpose)
