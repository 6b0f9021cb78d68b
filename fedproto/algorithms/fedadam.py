import torch

from fedproto.algorithms import optimising
from fedproto.config.options import Decay, PositiveFloat
from fedproto.core.tensors import map_trees
from fedproto.core.types import Algorithm, State, Tree


def fedadam(
    *,
    server_lr: PositiveFloat = 0.01,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: PositiveFloat = 1e-3,
) -> Algorithm:
    """FedAvg whose server moves by Adam (Reddi et al. 2021, Algorithm 2).

    m ← β1 m + (1 − β1) Δ, v ← β2 v + (1 − β2) Δ² and w ← w + η m / (√v + τ), where
    Δ = Σ_i |D_i|/N · w_i − w is FedAvg's step and η is `server_lr`; m starts at 0 and v at τ².
    As in the paper, neither is corrected for its start. BatchNorm's running statistics are
    averaged.
    """

    def start(weights: Tree) -> State:
        mean = map_trees(torch.zeros_like, weights)
        return {"mean": mean, "square": map_trees(lambda m: m + tau**2, mean)}

    def move(kept: State, changes: Tree) -> tuple[Tree, State]:
        mean = map_trees(lambda m, d: beta1 * m + (1 - beta1) * d, kept["mean"], changes)
        square = map_trees(lambda v, d: beta2 * v + (1 - beta2) * d * d, kept["square"], changes)
        moves = map_trees(lambda m, v: server_lr * m / (v.sqrt() + tau), mean, square)
        return moves, {"mean": mean, "square": square}

    return optimising("fedadam", start, move)
