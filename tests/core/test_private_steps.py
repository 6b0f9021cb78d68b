"""Gradients of single records: against a loop and finite differences, clipped whatever comes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.func import functional_call

from fedproto.algorithms.fedproto import fedproto
from fedproto.core.entropy import Entropy
from fedproto.core.private_steps import (
    PrivateSteps,
    clip_factors,
    expected_batch,
    record_gradients,
    sampling_rate,
    sum_clipped,
)
from fedproto.core.types import Batch, Step


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 3, 3), torch.nn.MaxPool2d(2), torch.nn.Tanh(), torch.nn.Flatten()
        )
        self.head = torch.nn.Linear(12, 4)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


@pytest.fixture
def problem():
    """A network, five records, FedProto's loss with its regulariser, and prototypes."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    net = Net().double()
    params = {name: value.detach() for name, value in net.named_parameters()}
    x = torch.randn(5, 1, 6, 6, generator=generator, dtype=torch.float64)
    batch = Batch(x, torch.tensor([0, 1, 2, 2, 3]), torch.ones(5, dtype=torch.float64))
    prototypes = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    received = {
        "prototypes": prototypes,
        "known": torch.tensor([1.0, 1, 1, 0], dtype=torch.float64),
    }
    algorithm = fedproto(lam=2.0, contrast=0.3)

    def compute_terms(trained, batch, keep):
        features, logits = functional_call(net, params | trained, (batch.x,))
        step = Step(params | trained, features, logits, batch, received)
        return algorithm.loss(step), step

    return params, batch, compute_terms


def _loss_of_record(compute_terms, params, batch, record):
    rows = slice(record, record + 1)
    terms, _ = compute_terms(params, Batch(batch.x[rows], batch.y[rows], batch.mask[rows]), {})
    return sum(terms.values())


def test_gradients_of_records_are_those_of_a_loop_over_them(problem):
    params, batch, compute_terms = problem
    gradients, terms, step = record_gradients(compute_terms, params, batch, {})
    losses = []
    for record in range(5):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        loss = _loss_of_record(compute_terms, leaves, batch, record)
        losses.append(float(loss))
        expected = torch.autograd.grad(loss, list(leaves.values()))
        for name, value in zip(leaves, expected, strict=True):
            torch.testing.assert_close(gradients[name][record], value, rtol=1e-12, atol=1e-14)
    assert float(sum(terms.values())) == pytest.approx(sum(losses) / 5, rel=1e-12)
    assert step.features.shape == (5, 12) and step.logits.shape == (5, 4)


def test_gradients_of_records_agree_with_finite_differences(problem):
    params, batch, compute_terms = problem
    gradients, _, _ = record_gradients(compute_terms, params, batch, {})
    generator = torch.Generator().manual_seed(2)
    direction = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in params.items()
    }
    width = 1e-6
    for record in range(5):
        ahead = {name: value + width * direction[name] for name, value in params.items()}
        behind = {name: value - width * direction[name] for name, value in params.items()}
        difference = _loss_of_record(compute_terms, ahead, batch, record) - _loss_of_record(
            compute_terms, behind, batch, record
        )
        slope = sum(float((gradients[name][record] * direction[name]).sum()) for name in params)
        assert float(difference) / (2 * width) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_unclipped_sum_over_the_records_is_the_gradient_of_the_batch(problem):
    params, batch, compute_terms = problem
    gradients, _, _ = record_gradients(compute_terms, params, batch, {})
    sums = sum_clipped(gradients, batch.mask, math.inf)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = sum(compute_terms(leaves, batch, {})[0].values())
    expected = torch.autograd.grad(loss, list(leaves.values()))
    for name, value in zip(leaves, expected, strict=True):
        torch.testing.assert_close(sums[name] / 5, value, rtol=1e-12, atol=1e-14)


def test_clipping_by_hand():
    gradients = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([[4.0], [0.4]])}
    assert clip_factors(gradients, 1.0).tolist() == pytest.approx([0.2, 1.0], rel=1e-5)
    sums = sum_clipped(gradients, torch.ones(2), 1.0)
    assert sums["a"].tolist() == pytest.approx([0.9, 0.0], rel=1e-5)
    assert sums["b"].tolist() == pytest.approx([1.2], rel=1e-5)
    without_first = sum_clipped(gradients, torch.tensor([0.0, 1.0]), 1.0)
    assert without_first["a"].tolist() == pytest.approx([0.3, 0.0])


values = st.floats(width=32, allow_nan=True, allow_infinity=True)
wild = st.lists(st.lists(values, min_size=7, max_size=7), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    rows=wild,
    norm=st.floats(1e-6, 1e6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1.0, 1e20, 1e-20]),
)
def test_no_record_ever_adds_more_than_the_bound(rows, norm, dtype, scale):
    flat = torch.tensor(rows, dtype=dtype) * scale
    gradients = {"a": flat[:, :6].reshape(-1, 2, 3), "b": flat[:, 6]}
    for record in range(len(rows)):
        alone = {name: value[record : record + 1] for name, value in gradients.items()}
        sums = sum_clipped(alone, torch.ones(1, dtype=dtype), norm)
        length = math.hypot(*[float(value) for each in sums.values() for value in each.flatten()])
        assert length <= norm * (1 + 1e-12)
    mask = torch.ones(len(rows), dtype=dtype)
    total = sum_clipped(gradients, mask, norm)
    length = math.hypot(*[float(value) for each in total.values() for value in each.flatten()])
    assert length <= len(rows) * norm * (1 + 1e-5)
    without = mask.clone()
    without[0] = 0
    rest = sum_clipped(gradients, without, norm)
    change = [float(a - b) for name in total for a, b in _pairs(total[name], rest[name])]
    assert math.hypot(*change) <= norm * (1 + len(rows) * 1e-5)  # adding rounds


def _pairs(a, b):
    return zip(a.flatten(), b.flatten(), strict=True)


def test_records_are_drawn_independently_with_the_rate():
    private = PrivateSteps(norm=1, noise=1, entropy=Entropy(seed=7))
    rate = sampling_rate(12, 60)
    taken = private.draw_places(rate, 60, 3000, key=5, first=0).double()
    # The number of records per step is binomial, not fixed: its variance is n q (1 − q).
    sizes = taken.sum(1)
    assert float(sizes.mean()) == pytest.approx(12, abs=4 * math.sqrt(9.6 / 3000))
    assert float(sizes.var()) == pytest.approx(9.6, rel=0.12)
    counts = taken.sum(0).numpy()
    chi = ((counts - 3000 * rate) ** 2 / (3000 * rate * (1 - rate))).sum()
    assert 1e-4 < stats.chi2.cdf(chi, 60) < 1 - 1e-4
    correlation = torch.corrcoef(taken.T) - torch.eye(60)
    assert float(correlation.abs().max()) < 5 / math.sqrt(3000)


def test_a_batch_of_everything_takes_every_record():
    private = PrivateSteps(norm=1, noise=1)
    assert sampling_rate(100, 60) == 1.0
    assert expected_batch(100, 60) == 60
    assert private.draw_places(1.0, 60, 10, key=0, first=0).all()


def test_noise_has_the_deviation_of_multiplier_times_bound(repeatable_entropy):
    private = PrivateSteps(norm=3.0, noise=0.5)
    trained = {"w": torch.zeros(100, 100), "b": torch.zeros(50, dtype=torch.float64)}
    noise = private.draw_noise(trained, [1, 2], [0, 0])
    assert noise["w"].shape == (2, 100, 100) and noise["b"].dtype == torch.float64
    assert float(noise["w"].std()) == pytest.approx(1.5, rel=0.05)
    assert stats.kstest(noise["w"].flatten().numpy() / 1.5, "norm").pvalue > 1e-5
    silent = PrivateSteps(norm=math.inf, noise=0.0).draw_noise(trained, [1], [0])
    assert not silent["w"].any()
