import torch

from fedproto.config.options import Fraction, PositiveFloat
from fedproto.core.closed_form import Solution, Sums, Teacher, solve_shifted

#: A variance below this part of the mean square is what rounding leaves of 0.
ROUNDING = 1e-6


def lda(*, shrinkage: Fraction = 0.1, scale: PositiveFloat = 3.0) -> Teacher:
    """A linear discriminant: Gaussian classes with one covariance, and equal prior chances.

    W is the covariance within the classes, (Σ φ φᵀ − Σ_j n_j μ_j μ_jᵀ) / n, and S = (1 −
    shrinkage) W + shrinkage · (mean of W's diagonal) · I. The score of class j is w_j·φ + b_j with
    w_j = S⁻¹ μ_j and b_j = −½ μ_j·w_j. Scores are the log-likelihoods of that model, which is far
    too sure of itself with many features; they are divided by `scale` before they are added to
    other log-probabilities. While no class has two different rows, W is 0, and the nearest mean
    decides.
    """

    def solve(sums: Sums) -> Solution:
        assert sums.gram is not None
        means = sums.classes / sums.counts[:, None]
        within = (sums.gram - means.T @ sums.classes) / sums.counts.sum()
        mean_variance = within.diagonal().mean()
        mean_square = sums.gram.diagonal().mean() / sums.counts.sum()
        rest = (1 - shrinkage) * within
        added = shrinkage * mean_variance
        if shrinkage > 0 and mean_variance <= ROUNDING * mean_square:
            rest = torch.zeros_like(within)
            added = mean_square
        advice = "raise shrinkage, or use fewer features or ncm"
        vectors = solve_shifted(rest, added, means.T, advice).T
        return Solution(vectors, -0.5 * (vectors * means).sum(1))

    return Teacher("lda", solve, needs_gram=True, scale=scale)
