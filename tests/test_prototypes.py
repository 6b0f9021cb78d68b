import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial import distance as scipy_distance
from sklearn.neighbors import NearestCentroid

from fedproto import prototypes

#: What libraries nobody here wrote say the distances are.
ORACLES = {
    "mse": lambda a, b: np.mean((a - b) ** 2),
    "l2": scipy_distance.euclidean,
    "sql2": scipy_distance.sqeuclidean,
    "l1": scipy_distance.cityblock,
    "cosine": scipy_distance.cosine,
    "emd": stats.wasserstein_distance,
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 1000), st.integers(1, 30))
def test_class_means_are_numpys(seed, samples):
    rng = np.random.default_rng(seed)
    x, y, mask = rng.normal(size=(samples, 3)), rng.integers(0, 5, samples), rng.integers(0, 2, samples)
    means, counts = prototypes.class_means(*map(torch.from_numpy, (x, y, mask.astype(float))), 5)
    for label in range(5):
        rows = x[(y == label) & (mask == 1)]
        assert counts[label] == len(rows)
        np.testing.assert_allclose(means[label], rows.mean(0) if len(rows) else np.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_means_are_as_precise_as_the_features_whatever_the_mask_is(dtype):
    """A mask of another type must neither fail nor change the type that is summed in."""
    features, y = torch.tensor([[1.0], [3.0], [7.0]], dtype=dtype), torch.tensor([0, 0, 1])
    for mask in (torch.ones(3), torch.ones(3, dtype=torch.bool)):
        means, counts = prototypes.class_means(features, y, mask, 2)
        assert means.dtype == counts.dtype == dtype
        assert means.flatten().tolist() == [2, 7] and counts.tolist() == [2, 1]


@pytest.mark.parametrize("name", prototypes.DISTANCES)
def test_distances_are_scipys(name):
    a, b = random(7, 5), random(4, 5, seed=1)
    ours = prototypes.distances(a, b, name)
    theirs = [[ORACLES[name](row, column) for column in b.numpy()] for row in a.numpy()]
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)


def test_every_distance_has_an_oracle():
    assert ORACLES.keys() == prototypes.DISTANCES.keys()


@pytest.mark.parametrize("name", prototypes.DISTANCES)
def test_gradients_of_distances_are_finite_differences(name):
    a, b = random(3, 4).requires_grad_(), random(3, 4, seed=1)
    assert torch.autograd.gradcheck(lambda x: prototypes.DISTANCES[name](x, b), (a,))


@pytest.mark.parametrize("name", prototypes.DISTANCES)
def test_no_distance_to_itself_breaks_training(name):
    a = random(2, 4).requires_grad_()
    apart = prototypes.DISTANCES[name](a, a.detach().clone())
    apart.sum().backward()
    assert apart.abs().max() < 1e-12
    assert torch.isfinite(a.grad).all()


def test_nearest_is_scikit_learns_nearest_centroid():
    x, y = random(60, 4), torch.arange(60) % 6
    means, counts = prototypes.class_means(x, y, torch.ones(60, dtype=x.dtype), 6)
    theirs = NearestCentroid().fit(x.numpy(), y.numpy()).predict(random(40, 4, seed=1).numpy())
    assert prototypes.nearest(random(40, 4, seed=1), means, counts).tolist() == theirs.tolist()


def test_a_class_without_prototype_is_never_predicted():
    known = torch.tensor([1.0, 0.0, 1.0])
    assert 1 not in prototypes.nearest(random(50, 4), random(3, 4, seed=1), known).tolist()
