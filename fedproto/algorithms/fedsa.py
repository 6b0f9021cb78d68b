from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms import find_linear_head, masked_mean, supervised
from fedproto.algorithms.fedgh import linear_logits
from fedproto.algorithms.fedproto import fedproto
from fedproto.config.options import Decay, NonNegativeFloat
from fedproto.core import rng
from fedproto.core.prototypes import class_means, distances
from fedproto.core.types import Algorithm, Recipient, State, Step, Task, Tree, Upload

_VARIANCE_FLOOR = 1e-5  # BatchNorm's


def fedsa(
    *,
    lam: NonNegativeFloat = 1.0,
    contrast: NonNegativeFloat = 1.0,
    calibration: NonNegativeFloat = 1.0,
    rho: Decay = 0.9999,
) -> Algorithm:
    """Random anchors of the classes, which move slowly, guide all clients (Zhou et al. 2025, AAAI).

    With an anchor A^(c) per class, also of classes that a client lacks, it minimises

    L_S + λ mse(h, A^(y)) − β log softmax_c(−||h − A^(c)|| − δ 1[c = y])_y + κ L_A,

    L_A = mean over c of CE(g(A^(c)), c), h = f(φ; x) and g its linear head. The margin δ is the
    mean distance of a class to the one nearest to it: that of the anchors, or of the client's own
    class means after its last round, whichever is larger. It uploads its class means; the server
    takes the plain mean C̄^(c) over the holders of a class, by which classes are predicted, and
    A^(c) ← ρ A^(c) + (1 − ρ) C̄^(c).

    Anchors start as random vectors through two linear layers, each with BatchNorm over the classes
    and a ReLU, as in the authors' code, whose class means are those of the passing batches.
    """
    base = fedproto(weighting="uniform", absent="drop")

    def init(params: Tree, task: Task) -> State:
        server = base.init(params, task)
        anchors = draw_anchors(rng.key(task.seed, "fedsa"), server["prototypes"])
        return server | {"anchors": {"anchors": anchors}}

    def client_init(params: Tree, task: Task) -> State:
        head = find_linear_head(params, "fedsa")
        return {"means": {"gap": next(iter(head.values())).new_zeros(())}}

    def send(server: State, recipient: Recipient) -> State:
        return base.send(server, recipient) | {"anchors": server["anchors"]}

    def loss(step: Step) -> Tree:
        y, anchors = step.batch.y, step.received["anchors"]["anchors"]
        squares = (step.features - anchors[y]).square().mean(-1)
        gap = mean_gap(anchors, torch.ones_like(anchors[:, 0]))
        margin = torch.maximum(step.state["means"]["gap"], gap)
        own = F.one_hot(y, len(anchors)).to(anchors.dtype)
        scores = -(distances(step.features, anchors, "l2") + margin * own)
        contrasts = -(own * F.log_softmax(scores, -1)).sum(-1)
        head = find_linear_head(step.params, "fedsa")
        # A product rounds by where its factors lie in memory, and a resumed server's lie elsewhere.
        aligned = anchors.clone()
        calibrated = F.log_softmax(linear_logits(head, aligned), -1).diagonal()
        return supervised(step) | {
            "regulariser": lam * masked_mean(squares, step.batch.mask),
            "contrast": contrast * masked_mean(contrasts, step.batch.mask),
            "calibration": -calibration * calibrated.mean(),
        }

    def client_update(step: Step) -> State:
        batch, classes = step.batch, step.logits.shape[-1]
        means, counts = class_means(step.features, batch.y, batch.mask, classes)
        return {"means": {"gap": mean_gap(means, (counts > 0).to(means.dtype))}}

    def aggregate(server: State, uploads: Upload) -> State:
        new = base.aggregate(server, uploads)
        spoken = uploads["prototypes"].weight.sum(0)[:, None] > 0
        old = server["anchors"]["anchors"]
        moved = torch.where(spoken, rho * old + (1 - rho) * new["prototypes"], old)
        return new | {"anchors": {"anchors": moved}}

    def notes(server: State) -> list[str]:
        return [note.replace("fedproto", "fedsa", 1) for note in base.notes(server)]

    return replace(
        base,
        name="fedsa",
        init=init,
        client_init=client_init,
        client_update=client_update,
        send=send,
        loss=loss,
        aggregate=aggregate,
        notes=notes,
        combinable=False,
    )


def mean_gap(vectors: Tensor, known: Tensor) -> Tensor:
    """Return the mean distance of a known vector to the nearest other one; 0 if there is none."""
    itself = torch.eye(len(known), dtype=known.dtype, device=known.device)
    pairs = known[:, None] * known * (1 - itself)
    gaps = torch.where(pairs > 0, distances(vectors, vectors, "l2"), torch.inf).amin(-1)
    has_other = pairs.amax(-1)
    return torch.where(has_other > 0, gaps, 0).sum() / has_other.sum().clamp(min=1)


def draw_anchors(key: Tensor, like: Tensor) -> Tensor:
    """Return the anchors of a new federation; `like` is a tensor of their shape, (C, d)."""
    classes, dim = like.shape
    values = 3**0.5 * (2 * rng.uniform(rng.key(key, "anchors"), classes * dim) - 1)
    anchors = values.reshape(classes, dim)
    for layer in ("first", "second"):
        drawn = rng.uniform(rng.key(key, layer), dim * dim).reshape(dim, dim)
        anchors = anchors @ (dim**-0.5 * (2 * drawn - 1))  # a bias would not outlive BatchNorm
        spread = (anchors.var(0, correction=0) + _VARIANCE_FLOOR).sqrt()
        anchors = ((anchors - anchors.mean(0)) / spread).relu()
    return anchors.to(like)
