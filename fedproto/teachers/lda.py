import torch
from torch import Tensor

from fedproto.config.options import Fraction, PositiveFloat
from fedproto.core.closed_form import Solution, Sums, Teacher, solve_shifted, steady

#: A variance below this part of the mean square is what rounding leaves of 0.
ROUNDING = 1e-6


def lda(
    *, shrinkage: Fraction = 0.1, scale: PositiveFloat = 3.0, individual: Fraction = 0
) -> Teacher:
    """A linear discriminant: Gaussian classes with one covariance, and equal prior chances.

    W is the covariance within the classes, (Σ φ φᵀ − Σ_j n_j μ_j μ_jᵀ) / n, and S = (1 −
    shrinkage) W + shrinkage · (mean of W's diagonal) · I. The score of class j is w_j·φ + b_j with
    w_j = S⁻¹ μ_j and b_j = −½ μ_j·w_j. Scores are the log-likelihoods of that model, which is far
    too sure of itself with many features; they are divided by `scale` before they are added to
    other log-probabilities. While no class has two different rows, W is 0, and the nearest mean
    decides.

    With `individual` above 0 every client has a solution of its own, with (1 − individual) S +
    individual · W_i in place of S. W_i is the covariance of client i's rows around the class means
    of all clients, which follows from the sums that the client sends: n_i W_i = Σ φ φᵀ −
    Σ_j (μ_j s_jᵀ + s_j μ_jᵀ − n_j μ_j μ_jᵀ), with s_j = Σ φ over its n_j rows of class j.
    """

    def shrink(sums: Sums, means: Tensor) -> tuple[Tensor, Tensor]:
        """Return a matrix and a number, which S is the sum of: matrix + number · I."""
        assert sums.gram is not None
        within = (sums.gram - means.T @ sums.classes) / sums.counts.sum()
        mean_variance = within.diagonal().mean()
        mean_square = sums.gram.diagonal().mean() / sums.counts.sum()
        if shrinkage > 0 and mean_variance <= ROUNDING * mean_square.abs():  # noisy: below 0
            return torch.zeros_like(within), mean_square.abs()
        noise = sums.noise / float(sums.counts.sum())
        return steady((1 - shrinkage) * within, shrinkage * mean_variance, noise)

    def solve(sums: Sums) -> Solution:
        means = sums.classes / sums.counts[:, None]
        rest, added = shrink(sums, means)
        return _solve(means, rest, added, "raise shrinkage, or use fewer features or ncm")

    def solve_own(sums: Sums, own: Sums) -> Solution:
        means = sums.classes / sums.counts[:, None]
        rest, added = shrink(sums, means)
        rest = (1 - individual) * rest + individual * measure_around(own, means)
        return _solve(means, rest, (1 - individual) * added, "lower individual, or raise shrinkage")

    return Teacher(
        "lda",
        solve,
        needs_gram=True,
        scale=scale,
        solve_own=solve_own if individual > 0 else None,
    )


def _solve(means: Tensor, rest: Tensor, added: Tensor, advice: str) -> Solution:
    """Return the solution for class means (C, D) and the covariance rest + added · I."""
    vectors = solve_shifted(rest, added, means.T, advice).T
    return Solution(vectors, -0.5 * (vectors * means).sum(1))


def measure_around(own: Sums, means: Tensor) -> Tensor:
    """Return the covariance (D, D) of one client's rows around class means (C, D) of any rows."""
    assert own.gram is not None
    crossed = means.T @ own.classes
    of_means = means.T @ (own.counts[:, None] * means)
    return (own.gram - crossed - crossed.T + of_means) / own.counts.sum()
