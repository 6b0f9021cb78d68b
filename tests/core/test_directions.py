"""Directions that are spread over the unit sphere."""

import pytest
import torch
import torch.nn.functional as F

from fedproto.core import rng
from fedproto.core.directions import spread_directions


@pytest.mark.parametrize(("classes", "dim"), [(2, 2), (3, 2), (5, 8), (10, 9)])
def test_few_directions_are_spread_like_a_simplex(classes, dim):
    directions = spread_directions(rng.key(3, "test"), classes, dim)
    cosines = directions @ directions.T
    off_diagonal = cosines[~torch.eye(classes, dtype=torch.bool)]
    assert torch.allclose(cosines.diagonal(), torch.ones(classes, dtype=torch.float64))
    assert torch.allclose(off_diagonal, torch.tensor(-1 / (classes - 1)).double(), atol=0.02)


def test_many_directions_are_further_apart_than_random_ones():
    spread = spread_directions(rng.key(3, "test"), 20, 3)
    random = F.normalize(2 * rng.uniform(rng.key(3, "test"), 60).reshape(20, 3) - 1, dim=-1)
    own = 3 * torch.eye(20, dtype=torch.float64)
    assert (spread @ spread.T - own).max() < (random @ random.T - own).max() - 0.05
    assert spread_directions(rng.key(3, "test"), 1, 3).norm().item() == pytest.approx(1)
