"""The combiners: worked examples, numpy and scipy, and what wrong uploads can and cannot do."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedproto.combiners.geometric_median import geometric_median
from fedproto.combiners.krum import krum
from fedproto.combiners.median import median
from fedproto.combiners.sum import sum as plain_sum
from fedproto.combiners.trimmed_mean import trimmed_mean
from fedproto.core.combination import Combiner
from fedproto.core.types import Group

ROBUST = {
    "median": median(),
    "trimmed-mean": trimmed_mean(fraction=0.3),
    "krum": krum(),
    "multi-krum": krum(attackers=1, chosen=3),
    "geometric-median": geometric_median(),
}
robust = pytest.mark.parametrize("combiner", ROBUST.values(), ids=ROBUST)


def group_of(values, weight=None) -> Group:
    """Return the uploads of models: one weight per client."""
    values = torch.as_tensor(values, dtype=torch.float64)
    weight = torch.ones(len(values)) if weight is None else torch.as_tensor(weight)
    weight = weight.to(torch.float64)
    aligned = weight.reshape(-1, *[1] * (values.dim() - 1))
    return Group({"w": values * aligned}, weight)


def value_of(combiner: Combiner, values, weight=None) -> np.ndarray:
    """Return what the server divides out of the combined sums."""
    combined = combiner.combine(group_of(values, weight))
    assert combined.weight.shape == (1,)
    return (combined.sums["w"][0] / combined.weight[0]).numpy()


def random_values(seed: int, uploads: int, size: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(uploads, size))


# --- worked examples


def test_the_sum_is_the_sum() -> None:
    combined = plain_sum().combine(group_of([[1.0], [4.0]], [1, 3]))
    assert combined.sums["w"].tolist() == [[13.0]]
    assert combined.weight.tolist() == [4.0]


def test_the_median_of_three_and_of_four() -> None:
    assert value_of(median(), [[1.0, 9.0], [2.0, 7.0], [30.0, 8.0]]).tolist() == [2.0, 8.0]
    assert value_of(median(), [[1.0], [2.0], [4.0], [100.0]]).tolist() == [3.0]


def test_the_median_does_not_care_about_weights() -> None:
    combined = median().combine(group_of([[1.0], [2.0], [4.0]], [1, 1, 1000]))
    assert combined.sums["w"].tolist() == [[2.0 * 1002]]
    assert combined.weight.tolist() == [1002.0]


def test_a_trimmed_mean_leaves_out_the_extremes_of_each_coordinate() -> None:
    values = [[1.0, 50.0], [2.0, 4.0], [3.0, 5.0], [4.0, 6.0], [-90.0, 7.0]]
    assert value_of(trimmed_mean(fraction=0.2), values).tolist() == pytest.approx([2.0, 6.0])


@pytest.mark.parametrize(
    ("fraction", "values", "expected"),
    [
        (0.1, [0.0, 3.0, 90.0], 3.0),  # three: one on each side, though ⌊0.3⌋ is none
        (0.1, [0.0, 4.0], 2.0),
        (0.1, [7.0], 7.0),
        (0.0, [0.0, 3.0, 90.0], 31.0),
        (0.5, [0.0, 1.0, 3.0, 90.0], 2.0),  # the median
        (0.5, [0.0, 1.0, 90.0], 1.0),
        (0.4, [0.0, 1.0, 2.0, 4.0, 90.0], 2.0),
    ],
)
def test_a_trimmed_mean_of_few(fraction, values, expected) -> None:
    found = value_of(trimmed_mean(fraction=fraction), [[value] for value in values])
    assert found.tolist() == pytest.approx([expected])


def test_krum_takes_the_upload_with_the_nearest_neighbours() -> None:
    # n = 5, f = 1: the two nearest others count. Of 0, 1, 3, 4, 99 the scores are 10, 5, 5, 10 and
    # 95² + 96²; of the two with 5, the first is taken.
    assert value_of(krum(attackers=1), [[0.0], [1.0], [3.0], [4.0], [99.0]]).tolist() == [1.0]
    assert value_of(krum(), [[99.0], [0.0], [1.0], [2.5], [4.0]]).tolist() == [1.0]


def test_multi_krum_averages_the_chosen() -> None:
    # Scores of 0, 1, 2.5, 4: 1 + 6.25, 1 + 2.25, 2.25 + 2.25, 2.25 + 9; 1 and 2.5 are chosen.
    values = [[99.0], [0.0], [1.0], [2.5], [4.0]]
    assert value_of(krum(attackers=1, chosen=2), values).tolist() == [1.75]
    # No more than n − f: the one at 99 is never among them.
    assert value_of(krum(attackers=1, chosen=9), values).tolist() == [7.5 / 4]


def test_krum_measures_distances_over_all_tensors_of_a_row() -> None:
    # By `a` alone the first would be chosen, by `b` alone the fourth.
    a = torch.tensor([[0.0], [0.1], [-0.1], [5.0], [9.0]], dtype=torch.float64)
    b = torch.tensor([[90.0], [3.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    combined = krum(attackers=1).combine(Group({"a": a, "b": b}, torch.ones(5)))
    together = value_of(krum(attackers=1), torch.cat([a, b], 1))
    found = torch.cat([combined.sums["a"], combined.sums["b"]], 1) / 5
    assert found[0].tolist() == pytest.approx(together.tolist())
    assert found[0].tolist() == pytest.approx([-0.1, 1.0])


def test_few_uploads_of_krum_are_their_median() -> None:
    assert value_of(krum(), [[1.0], [2.0], [4.0], [100.0]]).tolist() == [3.0]
    values = [[0.0], [1.0], [3.0], [4.0], [5.0], [6.0]]
    assert value_of(krum(attackers=2), values).tolist() == [3.5]


def test_the_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    corners = [[1.0, 0.0], [-0.5, math.sqrt(3) / 2], [-0.5, -math.sqrt(3) / 2]]
    shifted = np.array(corners) + np.array([5.0, -3.0])
    assert value_of(geometric_median(), shifted) == pytest.approx([5.0, -3.0], abs=1e-9)


def test_the_geometric_median_of_a_square_and_its_centre_is_the_centre() -> None:
    values = [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
    assert value_of(geometric_median(), values) == pytest.approx([1.0, 1.0])


def test_who_has_more_than_half_of_the_weight_is_the_geometric_median() -> None:
    values = [[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]]
    assert value_of(geometric_median(), values, [1, 5, 1]) == pytest.approx([2.0, 0.0], abs=1e-4)
    unweighted = value_of(geometric_median(weighted=False), values, [1, 5, 1])
    assert unweighted == pytest.approx(value_of(geometric_median(), values), abs=1e-12)
    assert unweighted[1] > 0.1


# --- numpy and scipy


@pytest.mark.parametrize("uploads", range(1, 12))
def test_the_median_is_numpys(uploads) -> None:
    values = random_values(uploads, uploads)
    assert value_of(median(), values) == pytest.approx(np.median(values, 0), rel=1e-12)


@pytest.mark.parametrize("uploads", [3, 10, 29, 30, 100])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.29, 0.34, 0.45])
def test_the_trimmed_mean_is_scipys(uploads, fraction) -> None:
    values = random_values(uploads, uploads)
    if 0 < fraction * uploads < 1:
        pytest.skip("scipy cuts nothing, the combiner one on each side")
    expected = stats.trim_mean(values, fraction, axis=0)
    assert value_of(trimmed_mean(fraction=fraction), values) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("attackers", [1, 2, 3])
@pytest.mark.parametrize("chosen", [1, 4])
def test_krum_is_its_definition(seed, attackers, chosen) -> None:
    uploads = 9
    values = random_values(seed, uploads)
    scores = []
    for own in values:
        squares = sorted(float(((own - other) ** 2).sum()) for other in values)
        scores.append(sum(squares[1 : uploads - attackers - 1]))  # without itself
    best = np.argsort(scores)[:chosen]
    found = value_of(krum(attackers=attackers, chosen=chosen), values)
    assert found == pytest.approx(values[best].mean(0), rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_the_geometric_median_is_that_of_an_optimiser(seed) -> None:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(7, 3))
    weight = generator.integers(1, 9, size=7).astype(float)

    def total_distance(point: np.ndarray) -> float:
        return float((weight * np.linalg.norm(values - point, axis=1)).sum())

    expected = optimize.minimize(total_distance, values.mean(0), method="Nelder-Mead", tol=1e-12)
    found = value_of(geometric_median(iterations=1000), values, weight)
    assert total_distance(found) <= expected.fun * (1 + 1e-6)
    assert found == pytest.approx(expected.x, abs=1e-3)
    in_default_time = value_of(geometric_median(), values, weight)
    assert total_distance(in_default_time) <= expected.fun * (1 + 1e-3)


# --- rows


@robust
def test_a_class_is_combined_over_its_holders_only(combiner) -> None:
    values = torch.as_tensor(random_values(0, 9, 6)).reshape(9, 3, 2)
    weight = torch.ones(9, 3, dtype=torch.float64)
    weight[7:, 0] = 0
    weight[3:, 1] = 0
    weight[:, 2] = 0
    counts = {"holders": (weight > 0).double()}
    group = Group({"prototypes": values * weight[..., None]}, weight, counts)
    combined = combiner.combine(group)
    assert combined.weight.tolist() == [[7.0, 3.0, 0.0]]
    assert combined.counts["holders"].tolist() == [[7.0, 3.0, 0.0]]
    sums = combined.sums["prototypes"]
    assert sums.shape == (1, 3, 2)
    assert sums[0, 2].tolist() == [0.0, 0.0]
    for row, holders in enumerate([7, 3]):
        alone = value_of(combiner, values[:holders, row])
        assert (sums[0, row] / holders).tolist() == pytest.approx(alone.tolist())


@robust
def test_values_of_a_row_without_weight_do_not_matter(combiner) -> None:
    values = random_values(1, 6)
    spoiled = group_of(np.concatenate([values, [[1e9] * 4]]))
    spoiled.weight[-1] = 0
    found = combiner.combine(spoiled).sums["w"][0] / 6
    assert found.tolist() == pytest.approx(value_of(combiner, values).tolist())


@robust
def test_tensors_keep_their_shapes_and_types(combiner) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = {
        "kernel": torch.randn(6, 2, 3, 4, generator=generator),
        "bias": torch.randn(6, 2, generator=generator),
        "scale": torch.randn(6, generator=generator).double(),
    }
    combined = combiner.combine(Group(sums, torch.full((6,), 2.0)))
    for name, value in combined.sums.items():
        assert value.shape == (1, *sums[name].shape[1:])
        assert value.dtype == sums[name].dtype
    assert combined.weight.tolist() == [12.0]


@robust
def test_large_groups_are_combined_in_parts(combiner, monkeypatch) -> None:
    values = random_values(2, 7, 11)
    at_once = value_of(combiner, values)
    monkeypatch.setattr("fedproto.core.combination._CHUNK_VALUES", 7 * 3)
    assert value_of(combiner, values) == pytest.approx(at_once, rel=1e-12)


@robust
def test_a_group_of_counts_alone_is_added(combiner) -> None:
    counts = {"rows": torch.tensor([1.0, 2.0])}
    combined = combiner.combine(Group({}, torch.ones(2), counts))
    assert combined.counts["rows"].tolist() == [3.0]


# --- properties

seeds = st.integers(0, 10**6)
sizes = st.integers(5, 12)
quickly = settings(max_examples=20, deadline=None)


@robust
@given(seeds, sizes, st.randoms(use_true_random=False))
@quickly
def test_the_order_of_the_clients_does_not_matter(combiner, seed, uploads, random) -> None:
    values = random_values(seed, uploads)
    order = list(range(uploads))
    random.shuffle(order)
    expected = value_of(combiner, values)
    assert value_of(combiner, values[order]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@robust
@given(seeds, sizes, st.floats(-1e3, 1e3))
@quickly
def test_moving_all_uploads_moves_the_result(combiner, seed, uploads, shift) -> None:
    values = random_values(seed, uploads)
    expected = value_of(combiner, values) + shift
    assert value_of(combiner, values + shift) == pytest.approx(expected, abs=1e-6)


@robust
@given(seeds, sizes, st.sampled_from([1e9, -1e9, 1e30]))
@quickly
def test_one_wrong_upload_changes_little(combiner, seed, uploads, wrong) -> None:
    values = random_values(seed, uploads)
    values[seed % uploads] = wrong
    right = np.delete(values, seed % uploads, axis=0)
    found = value_of(combiner, values)
    furthest = np.linalg.norm(right - right.mean(0), axis=1).max()
    assert np.linalg.norm(found - right.mean(0)) <= 3 * furthest
    added = value_of(plain_sum(), values)
    assert np.abs(added).max() > 1e7


@robust
@given(seeds, st.integers(1, 12))
@quickly
def test_equal_uploads_give_what_all_say(combiner, seed, uploads) -> None:
    value = random_values(seed, 1)
    weight = np.random.default_rng(seed).integers(1, 500, uploads)
    equal = np.repeat(value, uploads, axis=0)
    assert value_of(combiner, equal, weight) == pytest.approx(value[0], rel=1e-12)


@robust
@given(seeds, sizes)
@quickly
def test_a_minority_that_colludes_decides_nothing(combiner, seed, uploads) -> None:
    values = random_values(seed, uploads)
    wrong = (uploads - 3) // 2 if combiner.name == "krum" else int(0.3 * uploads)
    if combiner is ROBUST["multi-krum"]:
        wrong = 1
    values[:wrong] = 1e6
    assert np.abs(value_of(combiner, values)).max() < 100


@pytest.mark.parametrize("uploads", [5, 8])
def test_a_median_stays_within_the_range_of_the_right_ones(uploads) -> None:
    values = random_values(uploads, uploads)
    wrong = (uploads - 1) // 2
    values[:wrong] = 1e9
    found = value_of(median(), values)
    assert (found >= values[wrong:].min(0)).all()
    assert (found <= values[wrong:].max(0)).all()
