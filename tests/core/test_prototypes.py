import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial import distance as scipy_distance
from sklearn.neighbors import NearestCentroid

from fedproto.core import prototypes

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
    x, y, mask = (
        rng.normal(size=(samples, 3)),
        rng.integers(0, 5, samples),
        rng.integers(0, 2, samples),
    )
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


KINKED = ("l1", "l2", "emd")


def gradient(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.detach().requires_grad_()
    return torch.autograd.grad(prototypes.DISTANCES[name](a, b).sum(), a)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("name", KINKED)
def test_rounding_errors_have_no_gradient(name, scale, dtype):
    """Vectors that differ by rounding only: without a tolerance each value has a slope of 1."""
    b = (scale * random(4, 9)).to(dtype)
    a = b * (1 + 4 * torch.finfo(dtype).eps * random(4, 9, seed=1).sign().to(dtype))
    assert not torch.equal(a, b)
    assert torch.equal(gradient(name, a, b), torch.zeros_like(a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", KINKED)
def test_differences_that_are_no_rounding_errors_have_their_gradient(name, dtype):
    """A thousand units in the last place are far from the kink: the slope of |a − b| is 1."""
    b = torch.arange(1, 9, dtype=dtype)[None]
    a = b + 8 * 1000 * torch.finfo(dtype).eps
    upper_side = {"l1": 1.0, "l2": 8**-0.5, "emd": 1 / 8}
    expected = torch.full_like(a, upper_side[name])
    torch.testing.assert_close(gradient(name, a, b), expected, rtol=1e-2, atol=0)


@given(seed=st.integers(0, 1000))
@pytest.mark.parametrize("name", KINKED)
def test_away_from_the_kink_nothing_is_changed(name, seed):
    """To the bit: distances and gradients are those of the plain formulas."""
    plain = {
        "l1": lambda a, b: (a - b).abs().sum(-1),
        "l2": lambda a, b: (a - b).square().sum(-1).sqrt(),
        "emd": lambda a, b: (a.sort(-1).values - b.sort(-1).values).abs().mean(-1),
    }
    a, b = random(5, 7, seed=seed).requires_grad_(), random(5, 7, seed=seed + 5000)
    apart = plain[name](a, b)
    assert torch.equal(prototypes.DISTANCES[name](a, b), apart)
    assert torch.equal(gradient(name, a, b), torch.autograd.grad(apart.sum(), a)[0])


@pytest.mark.parametrize("name", KINKED)
def test_one_value_at_the_kink_leaves_the_others_their_gradient(name):
    a, b = torch.tensor([[1.0, 2.0, 5.0]]), torch.tensor([[1.0, 4.0, 3.0]])
    expected = {"l1": [0.0, -1, 1], "l2": [0, -(0.5**0.5), 0.5**0.5], "emd": [0, -1 / 3, 1 / 3]}
    torch.testing.assert_close(gradient(name, a, b), torch.tensor([expected[name]]))


def test_nearest_is_scikit_learns_nearest_centroid():
    x, y = random(60, 4), torch.arange(60) % 6
    means, counts = prototypes.class_means(x, y, torch.ones(60, dtype=x.dtype), 6)
    theirs = NearestCentroid().fit(x.numpy(), y.numpy()).predict(random(40, 4, seed=1).numpy())
    assert prototypes.nearest(random(40, 4, seed=1), means, counts).tolist() == theirs.tolist()


def test_a_class_without_prototype_is_never_predicted():
    known = torch.tensor([1.0, 0.0, 1.0])
    assert 1 not in prototypes.nearest(random(50, 4), random(3, 4, seed=1), known).tolist()
