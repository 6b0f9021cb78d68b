from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms.fedproto import fedproto
from fedproto.config.options import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat
from fedproto.core.types import Algorithm, State, Upload

_COOLING = 0.95  # of the step, every _STEPS_PER_COOLING steps
_STEPS_PER_COOLING = 10


def protonorm(
    *,
    lam: NonNegativeFloat = 1.0,
    scale: PositiveFloat = 10.0,
    server_steps: NonNegativeInt = 500,
    server_lr: PositiveFloat = 0.1,
    server_momentum: Decay = 0.9,
) -> Algorithm:
    """FedProto with prototypes spread out on a sphere (Lee et al. 2025, arXiv 2507.04310).

    Clients train and upload as in FedProto. The server takes the plain mean C̄^(j) over the holders
    of a class, starts at P_j = C̄^(j)/||C̄^(j)||, and lets the P_j repel each other on the unit
    sphere, as charges do (Thomson's problem):

    v_j ← m v_j + η Σ_{k≠j} (P_j − P_k)/||P_j − P_k||²,   P_j ← (P_j + v_j)/||P_j + v_j||,

    `server_steps` times, while η falls by 5% every ten steps. It sends `scale` · P_j.

    The force is that of the authors' code. Theirs ends early when forces change no more, has
    λ = 10 and a scale of 80, with 512 values; embeddings of 50 values are shorter.
    """
    base = fedproto(lam=lam, weighting="uniform", absent="drop")

    def aggregate(server: State, uploads: Upload) -> State:
        new = base.aggregate(server, uploads)
        spread = repel(new["prototypes"], new["known"], server_steps, server_lr, server_momentum)
        is_known = new["known"][:, None] > 0
        return new | {"prototypes": torch.where(is_known, scale * spread, new["prototypes"])}

    def notes(server: State) -> list[str]:
        return [note.replace("fedproto", "protonorm", 1) for note in base.notes(server)]

    return replace(base, name="protonorm", aggregate=aggregate, notes=notes, combinable=False)


def repel(vectors: Tensor, known: Tensor, steps: int, lr: float, momentum: float) -> Tensor:
    """Return the directions of vectors (C, d) after they have repelled each other.

    Those that are not known neither move nor push.
    """
    positions = F.normalize(vectors, dim=-1)
    itself = torch.eye(len(known), dtype=known.dtype, device=known.device)
    pairs = known[:, None] * known * (1 - itself)
    velocities = torch.zeros_like(positions)
    for step in range(steps):
        differences = positions[:, None] - positions
        squares = differences.square().sum(-1)
        pushes = pairs / torch.where(squares > 0, squares, 1)
        forces = (pushes[..., None] * differences).sum(1)
        velocities = momentum * velocities + lr * forces
        positions = F.normalize(positions + velocities, dim=-1)
        if step % _STEPS_PER_COOLING == 0:
            lr *= _COOLING
    return positions
