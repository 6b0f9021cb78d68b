"""Feature maps: fixed, shared, and the same whatever else is in the batch."""

import math
import zlib

import pytest
import torch
from torch.func import vmap

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.errors import ConfigError
from fedproto.feature_maps import Inputs, compute_features, draw_normal, standardise

IMAGES = Inputs((1, 12, 12))
COLOURS = Inputs((3, 12, 12))
ROWS = Inputs((5,))
TEXTS = Inputs((6,), words=("a", "good", "film", "bad"))
CASES = [
    ("random-conv", IMAGES),
    ("random-conv", COLOURS),
    ("random-fourier", ROWS),
    ("hashed-ngrams", TEXTS),
    ("flat", IMAGES),
    ("auto", IMAGES),
    ("auto", ROWS),
    ("auto", TEXTS),
    ("random-projection", IMAGES),
    ("random-projection", ROWS),
]


def build(name, **options):
    return plugins.build("feature_map", Part(name, options))


def draw_inputs(inputs, count=4):
    generator = torch.Generator().manual_seed(1)
    if inputs.words is not None:
        return torch.randint(0, 6, (count, *inputs.shape), generator=generator).float()
    return torch.randn(count, *inputs.shape, generator=generator)


@pytest.mark.parametrize(("name", "inputs"), CASES)
def test_a_map_gives_as_many_values_as_it_says_row_by_row(name, inputs):
    feature_map = build(name)
    compute = feature_map.build(inputs)
    x = draw_inputs(inputs)
    features = compute(x)
    assert features.shape == (4, feature_map.count(inputs))
    assert features.isfinite().all()
    assert torch.allclose(compute(x[2:3]), features[2:3], atol=1e-6)
    assert torch.allclose(feature_map.build(inputs)(x), features)
    assert torch.equal(compute_features(compute, x), features)
    stacked = vmap(compute)(torch.stack([x, x.flip(0)]))
    assert torch.allclose(stacked[1], features.flip(0), atol=1e-6)


@pytest.mark.parametrize("name", ["random-conv", "random-fourier", "hashed-ngrams"])
def test_draws_depend_on_the_maps_own_seed_alone(name):
    inputs = {"random-conv": IMAGES, "random-fourier": ROWS, "hashed-ngrams": TEXTS}[name]
    x = draw_inputs(inputs)
    torch.manual_seed(3)
    first = build(name).build(inputs)(x)
    torch.manual_seed(4)
    assert torch.equal(build(name).build(inputs)(x), first)
    assert not torch.allclose(build(name, seed=1).build(inputs)(x), first)


def test_a_projection_keeps_lengths_and_leaves_out_what_all_features_share():
    x = draw_inputs(ROWS, 50)
    base = build("auto").build(ROWS)(x)
    projected = build("random-projection", values=2000).build(ROWS)(x)
    centred = base - base.mean(1, keepdim=True)
    torch.testing.assert_close(projected.norm(dim=1), centred.norm(dim=1), rtol=0.1, atol=0)
    other = build("random-projection", values=2000, seed=1).build(ROWS)(x)
    assert not torch.allclose(projected, other)


def test_draws_are_normal():
    draws = draw_normal(0, "here", 200, 100)
    assert abs(draws.mean()) < 0.03
    assert abs(draws.std() - 1) < 0.03
    assert draw_normal(0, "here", 2, 2)[0, 0] == draw_normal(0, "here", 2, 2)[0, 0]


def test_random_filters_do_not_see_brightness_contrast_or_normalisation():
    compute = build("random-conv").build(IMAGES)
    x = draw_inputs(IMAGES)
    assert torch.allclose(compute(0.3 * x + 5), compute(x), atol=1e-4)
    flat = torch.full((1, 1, 12, 12), 3.0)
    assert not compute(flat).any()
    assert torch.equal(standardise(flat), torch.zeros_like(flat))


def test_one_filter_by_hand():
    """A filter of one pixel has mean 0 and so norm 0 / 0; of two pixels it is (±1, ∓1) / √2."""
    inputs = Inputs((1, 2, 2))
    compute = build("random-conv", filters=1, kernel=2, pool=1, threshold=0.0).build(inputs)
    x = torch.tensor([[[[1.0, 0], [0, 0]]]])
    weight = draw_normal(0, "random-conv", 1, 1, 2, 2)
    weight = weight - weight.mean()
    weight = weight / weight.norm()
    expected = max(0.0, float((standardise(x)[0, 0] * weight[0, 0]).sum()))
    assert compute(x).item() == pytest.approx(expected, abs=1e-6)


def test_fourier_features_approximate_their_kernel():
    inputs = Inputs((3,))
    compute = build("random-fourier", values=40000).build(inputs)
    x = torch.tensor([[0.5, -1, 2], [1, 0, 1.0]])
    waves = compute(x)[:, :40000]
    kernel = math.exp(-float((x[0] - x[1]).square().sum()) / (2 * 3))
    assert float(waves[0] @ waves[1]) == pytest.approx(kernel, abs=0.02)
    assert torch.equal(compute(x)[:, 40000:], x)


def test_words_count_by_their_hash_whatever_their_rank():
    """A member with another vocabulary has the same features for words that both know."""
    x = torch.tensor([[2.0, 3, 4, 0, 0, 0]])  # a good film
    other = Inputs((8,), words=("film", "plot", "a", "good"))
    same = torch.tensor([[4.0, 5, 2, 0, 0, 0, 0, 0]])
    compute = build("hashed-ngrams").build
    assert torch.equal(compute(TEXTS)(x), compute(other)(same))
    assert not torch.allclose(compute(TEXTS)(x), compute(TEXTS)(x[:, [1, 0, 2, 3, 4, 5]]))
    bag = build("hashed-ngrams", n=1).build(TEXTS)
    assert torch.allclose(bag(x), bag(x[:, [1, 0, 2, 3, 4, 5]]))  # without order
    assert (bag(x) != 0).sum() == 3
    unknown = torch.tensor([[1.0, 1, 0, 0, 0, 0]])
    assert not bag(unknown).any()
    assert zlib.crc32(b"a") != zlib.crc32(b"good")


@pytest.mark.parametrize(
    ("name", "inputs", "sentence"),
    [
        ("random-conv", ROWS, r"random-conv is for images, not for inputs of shape \(5,\)"),
        ("random-fourier", TEXTS, "random-fourier is for tables, not for texts"),
        ("hashed-ngrams", ROWS, "hashed-ngrams is for texts, not for inputs"),
        ("random-conv", Inputs((1, 7, 12)), "at least 8 pixels per side, not 7 x 12"),
    ],
)
def test_other_inputs_are_refused(name, inputs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(name).build(inputs)


def test_frozen_weights_embed_in_512_values(shared_weights):
    feature_map = build("frozen", weights=str(shared_weights))
    inputs = Inputs((1, 28, 28))
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    features = feature_map.build(inputs)(x)
    assert features.shape == (2, 512) == (2, feature_map.count(inputs))
    colours = feature_map.build(Inputs((3, 28, 28)))(x.expand(-1, 3, -1, -1))
    assert torch.allclose(features, colours, atol=1e-5)


@pytest.fixture
def shared_weights():
    from pathlib import Path

    path = Path("/work/shared/data/weights/resnet18-tiny-imagenet-32.safetensors")
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path
