from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms.fedproto import fedproto
from fedproto.algorithms.fedtgp import ServerLoss, generate, training_prototypes
from fedproto.config.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedproto.core.types import Algorithm, State, Tree, Upload


def fedorgp(
    *,
    lam: NonNegativeFloat = 1.0,
    gamma: NonNegativeFloat = 1.0,
    server_epochs: NonNegativeInt = 1,
    server_lr: PositiveFloat = 0.01,
    server_batch: PositiveInt = 10,
) -> Algorithm:
    """FedProto whose server trains prototypes to be orthogonal (Guo et al. 2025, arXiv 2502.16119).

    Clients minimise L_S + λ (1 − cos(f(φ; x), P^(y))) and upload their class means C_i^(j). The
    server's prototypes P^(c) = F(e_c) have FedTGP's form; it does SGD on the mean over clients i
    and their classes j of

    1 − cos(C_i^(j), P^(j)) + γ · (the mean over c ≠ j of |cos(C_i^(j), P^(c))|).

    Only directions matter, so they are sent with length 1: the nearest prototype is then the one
    with the largest cosine. This is the authors' code without its adaptive weights and without its
    filter of outlying embeddings; their figures are by the head.
    """

    def prepare(prototypes: Tensor, classes: Tensor, class_count: int) -> ServerLoss:
        return lambda generator, rows: orthogonality_loss(
            generator, prototypes[rows], classes[rows], gamma
        )

    base = fedproto(lam=lam, distance="cosine", absent="drop")
    trained = training_prototypes("fedorgp", base, prepare, server_epochs, server_lr, server_batch)

    def aggregate(server: State, uploads: Upload) -> State:
        new = trained.aggregate(server, uploads)
        return new | {"prototypes": F.normalize(new["prototypes"], dim=-1)}

    return replace(trained, aggregate=aggregate)


def orthogonality_loss(
    generator: Tree, prototypes: Tensor, classes: Tensor, gamma: float
) -> Tensor:
    """Return the server's loss of clients' prototypes (n, d), as a mean over them."""
    directions = F.normalize(generate(generator), dim=-1)
    cosines = F.normalize(prototypes, dim=-1) @ directions.T
    is_own = F.one_hot(classes, len(directions)).to(cosines.dtype)
    to_own = (cosines * is_own).sum(1)
    others = max(1, len(directions) - 1)
    to_others = (cosines.abs() * (1 - is_own)).sum(1) / others
    return torch.mean(1 - to_own + gamma * to_others)
