import torch

from fedproto.config.options import PositiveFloat
from fedproto.core.closed_form import Solution, Sums, Teacher


def ncm(*, scale: PositiveFloat = 0.05) -> Teacher:
    """The nearest class mean (FedNCM, Legate et al. 2023): no matrix is sent.

    The score of class j is −½ ‖φ − μ_j‖², but for what is equal for all classes: w_j = μ_j / s and
    b_j = −½ ‖μ_j‖² / s, where s is the mean squared distance between two class means.
    """

    def solve(sums: Sums) -> Solution:
        means = sums.classes / sums.counts[:, None]
        squared_distances = torch.cdist(means, means).square()
        pairs = max(1, len(means) * (len(means) - 1))
        unit = (squared_distances.sum() / pairs).clamp(min=1e-12)
        return Solution(means / unit, -0.5 * means.square().sum(1) / unit)

    return Teacher("ncm", solve, needs_gram=False, scale=scale)
