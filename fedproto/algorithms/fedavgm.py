import torch

from fedproto.algorithms import optimising
from fedproto.config.options import Decay, PositiveFloat
from fedproto.core.tensors import map_trees
from fedproto.core.types import Algorithm, State, Tree


def fedavgm(*, server_lr: PositiveFloat = 1.0, server_momentum: Decay = 0.9) -> Algorithm:
    """FedAvg with momentum at the server (Hsu et al. 2019, Section 4.3).

    v ← β v + Δ and w ← w + η v, where Δ = Σ_i |D_i|/N · w_i − w is FedAvg's step, β is
    `server_momentum` and η is `server_lr`. BatchNorm's running statistics are averaged.
    """

    def start(weights: Tree) -> State:
        return {"momentum": map_trees(torch.zeros_like, weights)}

    def move(kept: State, changes: Tree) -> tuple[Tree, State]:
        momentum = map_trees(lambda v, d: server_momentum * v + d, kept["momentum"], changes)
        moves = map_trees(lambda v: server_lr * v, momentum)
        return moves, {"momentum": momentum}

    return optimising("fedavgm", start, move)
