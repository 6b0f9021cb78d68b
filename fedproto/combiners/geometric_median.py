from typing import Annotated

import torch
from torch import Tensor

from fedproto.config.options import Bounds, PositiveFloat
from fedproto.core.combination import Combiner, average_weighted, combine_rows, compute_gram


def geometric_median(
    *,
    weighted: bool = True,
    smoothing: PositiveFloat = 1e-6,
    iterations: Annotated[int, Bounds(1, 10**5)] = 100,
) -> Combiner:
    """Take the point nearest to all uploads (Pillutla, Kakade, Harchaoui 2022, RFA).

    v = argmin Σ_i α_i ‖v − x_i‖ with α_i the weight of upload i, or 1 (`weighted=false`), by the
    smoothed Weiszfeld algorithm: v ← Σ_i β_i x_i / Σ_i β_i, β_i = α_i / max(ν, ‖v − x_i‖), with ν
    the `smoothing`, from the median on. It is not moved far while the wrong uploads have less than
    half of the weight. Distances are those of all tensors of a group together.
    """

    def minimise(values: Tensor, weight: Tensor) -> Tensor:
        gram = compute_gram(values, weight)  # around the median, from which the search starts
        lengths = gram.diagonal(dim1=1, dim2=2)  # ‖x_i‖²
        trusted = weight if weighted else (weight > 0)
        alphas = trusted.double().T
        squares = lengths
        for _ in range(iterations):
            betas = alphas / squares.clamp(min=0).sqrt().clamp(min=smoothing)
            shares = betas / betas.sum(1, keepdim=True).clamp(min=1e-300)  # v = Σ_i shares_i x_i
            products = torch.einsum("rij,rj->ri", gram, shares)  # v · x_i
            length = (products * shares).sum(1, keepdim=True)  # ‖v‖²
            squares = lengths - 2 * products + length  # ‖v − x_i‖²
        return average_weighted(values, shares.T)

    return combine_rows("geometric-median", minimise)
