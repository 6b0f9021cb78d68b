"""What docs/which-method.md derives, checked by numbers."""

import pytest
import torch

from fedproto.core.prototypes import Tau, contrast_losses

D = 6
TAU = 0.7


def pull(h: torch.Tensor, y: int, prototypes: torch.Tensor) -> torch.Tensor:
    """Return minus the gradient of the contrast term at one embedding, by autograd."""
    h = h.clone().requires_grad_()
    known = torch.ones(len(prototypes), dtype=h.dtype)
    losses = contrast_losses(h[None], torch.tensor([y]), prototypes, known, Tau(TAU, "absolute"))
    (gradient,) = torch.autograd.grad(losses.sum(), h)
    return -gradient


def test_contrast_pushes_from_the_mean_of_the_prototypes_to_the_own_one():
    """−∂/∂h = 2/(τD) (C_y − Σ_j p_j C_j), p_j the softmax of −d(h, C_j)/τ."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(4, D, generator=generator, dtype=torch.float64)
    h = torch.randn(D, generator=generator, dtype=torch.float64)
    gaps = (h - prototypes).square().mean(1)
    p = torch.softmax(-gaps / TAU, 0)
    expected = 2 / (TAU * D) * (prototypes[2] - p @ prototypes)
    torch.testing.assert_close(pull(h, 2, prototypes), expected)


def test_two_classes_that_no_client_holds_together_move_apart_at_the_derived_rate():
    """Each client steps from its own prototype; their distance grows by 1 + 2 lr / (τD).

    Without the contrast term nothing moves: the distance to the own prototype is at its least.
    """
    lr = 0.05
    near = torch.zeros(2, D, dtype=torch.float64)
    near[1, 0] = 1e-4
    prototypes = near.clone()
    rate = 1 + 2 * lr / (TAU * D)
    for steps in range(1, 41):
        moved = [prototypes[y] + lr * pull(prototypes[y], y, prototypes) for y in range(2)]
        prototypes = torch.stack(moved)  # each class has one client, so its mean is the new one
        grown = (prototypes[1] - prototypes[0]).norm() / 1e-4
        assert float(grown) == pytest.approx(rate**steps, rel=1e-3)
    h = near[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((h - near[0]).square().mean(), h)
    assert torch.count_nonzero(gradient) == 0


def derive_error(m: float, clients: int, noise: float, spread: float) -> float:
    """Return m² v² + s² ((1 − 1/K)(1 − m)² + 1/K), the expected squared error of a blend."""
    return m**2 * spread + noise * ((1 - 1 / clients) * (1 - m) ** 2 + 1 / clients)


@pytest.mark.parametrize(("noise", "spread"), [(0.5, 2.0), (2.0, 0.5), (1.0, 1.0)])
def test_blending_with_the_mean_has_the_derived_error_and_the_derived_best_share(noise, spread):
    """K = 8 clients, whose optima differ by v² in the mean, know theirs up to s²."""
    clients, trials = 8, 200_000
    generator = torch.Generator().manual_seed(1)
    optima = torch.randn(clients, generator=generator, dtype=torch.float64)
    optima = optima - optima.mean()
    optima *= (spread / optima.square().mean()).sqrt()
    errors = torch.randn(trials, clients, generator=generator, dtype=torch.float64) * noise**0.5
    own = optima + errors
    mean = own.mean(1, keepdim=True)

    def measure(m: float) -> float:
        return float(((1 - m) * own + m * mean - optima).square().mean())

    for m in (0.0, 0.3, 0.7, 1.0):
        assert measure(m) == pytest.approx(derive_error(m, clients, noise, spread), rel=0.01)
    variance = noise * (1 - 1 / clients)
    best = variance / (variance + spread)
    assert measure(best) < min(measure(best - 0.1), measure(best + 0.1))
    # All or nothing: the mean is better where clients differ less than they err.
    assert (measure(1.0) < measure(0.0)) == (spread < variance)
