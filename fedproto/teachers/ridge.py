import torch

from fedproto.config.options import NonNegativeFloat, PositiveFloat
from fedproto.core.closed_form import Solution, Sums, Teacher, solve_shifted, steady


def ridge(*, strength: NonNegativeFloat = 0.1, scale: PositiveFloat = 0.1) -> Teacher:
    """Ridge regression on the classes as 0 and 1, with a bias (Fed3R, Fanì et al. 2024).

    With m the mean of all φ and G = Σ (φ − m)(φ − m)ᵀ: w_j = (G + αI)⁻¹ (Σ_j φ − n_j m) and b_j =
    n_j / n − w_j·m, where α is `strength` times the mean of G's diagonal.
    """

    def solve(sums: Sums) -> Solution:
        assert sums.gram is not None
        rows = sums.counts.sum()
        mean = sums.classes.sum(0) / rows
        centred = sums.gram - rows * torch.outer(mean, mean)
        added = strength * centred.diagonal().mean()
        right = (sums.classes - sums.counts[:, None] * mean).T
        advice = "raise strength, or use fewer features or ncm"
        centred, added = steady(centred, added, sums.noise)
        vectors = solve_shifted(centred, added, right, advice).T
        return Solution(vectors, sums.counts / rows - vectors @ mean)

    return Teacher("ridge", solve, needs_gram=True, scale=scale)
