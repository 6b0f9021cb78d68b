"""Noise that follows the size of each coordinate: its bounds, its size, and what it gains."""

import math

import pytest
import torch
from helpers.canaries import lower_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.types import Batch, Step, Task
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.privacy.bounds import bound_records
from fedproto.privacy.clipping import clip_rows
from fedproto.privacy.mechanism import protect
from fedproto.privacy.noise import Grid
from fedproto.privacy.noisy_uploads import Protection
from fedproto.privacy.shaped_noise import MOMENTS, choose_shape, fit_shaped, sum_squares

CLASSES = 3
WIDTH = 4
TASK = Task(CLASSES, WIDTH, clients=2, seed=0)
PARAMS = {"head.weight": torch.zeros(CLASSES, WIDTH)}
ALGORITHM = plugins.build("algorithm", Part("fedproto", {}))
LAYOUTS = ALGORITHM.declare(PARAMS, TASK)
NO_NOISE = Grid(1e-12, 2.0**-40)


def send(algorithm, rows, labels, key=0):
    batch = Batch(torch.empty(0), labels, torch.ones(len(labels)))
    received = {"known": torch.zeros(CLASSES)}
    logits = torch.zeros(len(labels), CLASSES)
    step = Step(PARAMS, rows, logits, batch, received, key=torch.as_tensor(key))
    return algorithm.upload(step)["prototypes"]


def test_equal_coordinates_have_equal_noise():
    shape = choose_shape(torch.full((9,), 5.0, dtype=torch.float64), NO_NOISE)
    torch.testing.assert_close(shape, torch.ones(9, dtype=torch.float64))


def test_a_shape_computed_by_hand():
    # Shares 16/17 and 1/17: s² = √p · (4 + 1)/√17, so 20/17 and 5/17; their sum is (Σ√p)² = 25/17.
    shape = choose_shape(torch.tensor([16.0, 1.0], dtype=torch.float64), NO_NOISE)
    expected = torch.tensor([20 / 17, 5 / 17], dtype=torch.float64)
    torch.testing.assert_close(shape.square(), expected)


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12))
@settings(max_examples=100, deadline=None)
def test_no_other_shape_of_equal_length_has_less_noise(moments):
    """Embeddings keep their mean square, and the noise is at most that of equal coordinates."""
    values = torch.tensor(moments, dtype=torch.float64)
    shares = values / values.sum()
    shape = choose_shape(values, NO_NOISE)
    assert float((shares / shape.square()).sum()) == pytest.approx(1)
    total = float(shape.square().sum())
    assert total <= len(moments) * (1 + 1e-9)
    for power in (0.1, 0.5, 0.9, 2.0):  # of other shapes, brought to the same mean square
        other = shape**power
        other = other * (shares / other.square()).sum().sqrt()
        assert total <= float(other.square().sum()) * (1 + 1e-9)


ROWS = st.lists(
    st.lists(st.floats(width=32), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=6
)
SHAPES = st.lists(st.floats(1e-6, 1e6), min_size=WIDTH, max_size=WIDTH)


@given(rows=ROWS, shape=SHAPES, clip=st.sampled_from([0.5, 1.0, 7.0]))
@settings(max_examples=150, deadline=None)
def test_one_record_moves_moments_and_scaled_sums_by_no_more_than_their_bounds(rows, shape, clip):
    clipped = clip_rows(torch.tensor(rows, dtype=torch.float32).double(), clip)
    mask = torch.ones(len(rows))
    moved = sum_squares(clipped, mask) - sum_squares(clipped[:-1], mask[:-1])
    assert float(moved.norm()) <= clip**2 * (1 + 1e-9)
    scaled = clip_rows(clipped / torch.tensor(shape, dtype=torch.float64), clip)
    assert float(scaled[-1].norm()) <= clip


def test_shares_of_a_release_add_up_to_its_noise():
    protection = Protection("record", 3.0, 2.0, shape="variance")
    grids = fit_shaped(protection, LAYOUTS)
    lost = (2.0**2 / grids[MOMENTS][(MOMENTS,)].deviation) ** 2
    for part in bound_records(LAYOUTS, 2.0):
        lost += (part.bound / grids[part.group][part.tensors].deviation) ** 2
    assert lost <= 1 / 3.0**2  # the rounding to a grid is paid for
    assert lost == pytest.approx(1 / 3.0**2, rel=1e-4)


def test_large_coordinates_get_more_noise_than_small_ones():
    rows = torch.tensor([[0.9, 0.2, 0.05, 0.05]]).repeat(4000, 1)
    labels = torch.zeros(4000, dtype=torch.int64)
    protection = Protection("record", 1.0, 1.0, shape="variance", seeded=True)
    protected = protect(ALGORITHM, protection, LAYOUTS)
    groups = vmap(lambda key: send(protected, rows, labels, key))(torch.arange(1500))
    deviations = groups.sums["prototypes"][:, 0].std(0)
    grids = fit_shaped(protection, LAYOUTS)
    equal = next(grid.deviation for names, grid in grids["prototypes"].items() if names)
    expected = equal * choose_shape(rows[0].double().square() * 4000, NO_NOISE)
    torch.testing.assert_close(deviations.double(), expected, rtol=0.1, atol=0)
    means = groups.sums["prototypes"][:, 0].mean(0) / 4000
    torch.testing.assert_close(means, rows[0], rtol=0, atol=0.01)  # nothing is biased


def test_without_rows_the_shape_is_equal_and_finite():
    protection = Protection("record", 1.0, 1.0, shape="variance", seeded=True)
    protected = protect(ALGORITHM, protection, LAYOUTS)
    rows = torch.full((2, WIDTH), math.nan)
    group = send(protected, rows, torch.zeros(2, dtype=torch.int64))
    assert group.sums["prototypes"].isfinite().all() and group.weight.isfinite().all()


def test_an_attack_with_a_canary_proves_some_epsilon_but_never_more_than_promised():
    """The canary is clipped, and large where all other rows are small: it moves the shape, too."""
    noise = 1.0
    protection = Protection("record", noise, 1.0, threshold=0.0, shape="variance", seeded=True)
    protected = protect(ALGORITHM, protection, LAYOUTS)
    others = torch.tensor([[0.0, 0.3, 0.4, 0.0]]).repeat(4, 1)
    rows = torch.cat([others, torch.tensor([[5.0, 0.0, 0.0, 0.0]])])
    labels = torch.zeros(5, dtype=torch.int64)

    def score(rows, labels, first_key):
        keys = torch.arange(first_key, first_key + 6000)
        group = vmap(lambda key: send(protected, rows, labels, key))(keys)
        return (group.sums["prototypes"][:, 0, 0] + group.weight[:, 0] * 0.2).double()

    inside = score(rows, labels, 0)
    outside = score(rows[:-1], labels[:-1], 10_000)
    promised = compute_epsilon([Release(noise)], 1e-5)
    assert promised / 10 < lower_bound(inside, outside, 1e-5) <= promised
