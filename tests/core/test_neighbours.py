"""The nearest of many vectors: by hand, with ties, and as scikit-learn finds them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.neighbors import NearestNeighbors

from fedproto.core import neighbours
from fedproto.core.neighbours import find_nearest


def test_distances_are_those_of_pythagoras() -> None:
    among = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0], [5.0, 12.0]])
    numbers, distances = find_nearest(torch.zeros(1, 2), among, 3)
    assert numbers.tolist() == [[1, 0, 2]]
    assert distances.tolist() == [[1.0, 5.0, 10.0]]


def test_of_equally_near_ones_the_first_comes_first() -> None:
    among = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0], [1.0, 0.0]])
    numbers, distances = find_nearest(torch.zeros(2, 2), among, 4)
    assert numbers.tolist() == [[1, 2, 3, 4]] * 2
    assert distances.tolist() == [[1.0] * 4] * 2


def test_there_may_be_fewer_than_are_asked_for() -> None:
    numbers, distances = find_nearest(torch.zeros(2, 3), torch.ones(1, 3), 5)
    assert numbers.tolist() == [[0], [0]]
    assert distances.tolist() == [[pytest.approx(3**0.5)]] * 2
    numbers, distances = find_nearest(torch.zeros(0, 3), torch.ones(4, 3), 2)
    assert numbers.shape == distances.shape == (0, 2)


def test_equal_vectors_have_distance_zero_even_far_from_the_origin() -> None:
    """Distances by products of matrices would be off by the rounding error of large squares."""
    among = torch.full((3, 50), 1e6) + torch.arange(3)[:, None]
    numbers, distances = find_nearest(among, among, 1)
    assert numbers.flatten().tolist() == [0, 1, 2]
    assert distances.flatten().tolist() == [0.0, 0.0, 0.0]


def test_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(7, 4, generator=draw)
    among = torch.randn(5, 4, generator=draw)
    whole = find_nearest(points, among, 3)
    for size in (1, 10, 12):
        monkeypatch.setattr(neighbours, "MAX_DISTANCES", size)
        for found, wanted in zip(find_nearest(points, among, 3), whole, strict=True):
            assert torch.equal(found, wanted)


VALUES = st.integers(-3, 3).map(float)


@given(arrays(float, (9, 2), elements=VALUES), arrays(float, (4, 2), elements=VALUES))
def test_distances_are_scikit_learns_and_ties_are_by_number(
    among: np.ndarray, points: np.ndarray
) -> None:
    numbers, distances = find_nearest(torch.from_numpy(points), torch.from_numpy(among), 5)
    found = NearestNeighbors(n_neighbors=5, algorithm="kd_tree").fit(among).kneighbors(points)
    np.testing.assert_allclose(distances, found[0], atol=1e-12)
    for row, gaps in zip(numbers.tolist(), distances.tolist(), strict=True):
        assert list(zip(gaps, row, strict=True)) == sorted(zip(gaps, row, strict=True))
