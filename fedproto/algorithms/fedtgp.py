import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms.fedproto import fedproto
from fedproto.config.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedproto.core import rng
from fedproto.core.prototypes import class_means, distances
from fedproto.core.server_training import list_single_values, train_on_server
from fedproto.core.types import Algorithm, State, Task, Tree, Upload


def fedtgp(
    *,
    lam: NonNegativeFloat = 1.0,
    threshold: NonNegativeFloat = 100.0,
    server_epochs: NonNegativeInt = 100,
    server_lr: PositiveFloat = 0.01,
    server_batch: PositiveInt = 10,
) -> Algorithm:
    """FedProto whose server trains the global prototypes (Zhang et al. 2024, Algorithm 1).

    Clients train and upload as in FedProto: min L_S + λ mse(f(φ; x), P̂^(y)). The server's
    prototypes are P̂^(c) = F(e_c), e_c trainable and F two linear layers with a ReLU between. It
    does SGD on the clients' single prototypes C_i^(j) with the adaptive-margin contrastive loss,
    Eq. 9 and 10, d the Euclidean distance:

    −log(e^−(d(C_i^(j), P̂^(j)) + δ) / (e^−(d(C_i^(j), P̂^(j)) + δ) + Σ_{c≠j} e^−d(C_i^(j), P̂^(c)))),

    where δ = min(the largest distance between two classes' means of the C_i^(j), τ = `threshold`).
    The authors' code differs from Eq. 9: each class has the distance to the class nearest to it,
    and the largest of these counts. The paper's λ of 0.1 belongs to the Euclidean distance; with
    mse, as here, the authors' scripts have 10. Their server's learning rate is the clients'.
    """

    def prepare(prototypes: Tensor, classes: Tensor, class_count: int) -> ServerLoss:
        margin = adaptive_margin(prototypes, classes, class_count, threshold)
        return lambda generator, rows: margin_loss(
            generator, prototypes[rows], classes[rows], margin
        )

    base = fedproto(lam=lam, absent="drop")
    return training_prototypes("fedtgp", base, prepare, server_epochs, server_lr, server_batch)


#: (generator, numbers of prototypes) -> the loss of a batch of these prototypes, ().
ServerLoss = Callable[[Tree, Tensor], Tensor]


def training_prototypes(
    name: str,
    base: Algorithm,
    prepare: Callable[[Tensor, Tensor, int], ServerLoss],
    epochs: int,
    lr: float,
    batch: int,
) -> Algorithm:
    """Return FedProto whose prototypes come from a generator that its server trains.

    prepare  (clients' single prototypes (n, d), their classes (n,), number of all classes) -> the
             loss that is minimised
    """

    def init(params: Tree, task: Task) -> State:
        server = base.init(params, task)
        seed = rng.key(task.seed, name)
        generator = _draw_generator(seed, server["prototypes"])
        return server | {"generator": generator, "seed": seed, "round": torch.tensor(0)}

    def aggregate(server: State, uploads: Upload) -> State:
        group = uploads["prototypes"]
        prototypes, classes = list_single_values(group, "prototypes")
        generator = train_on_server(
            server["generator"],
            prepare(prototypes, classes, len(server["known"])),
            len(prototypes),
            key=rng.key(server["seed"], "round", server["round"]),
            epochs=epochs,
            batch=batch,
            lr=lr,
        )
        return server | {
            "prototypes": generate(generator),
            "known": torch.where(group.weight.sum(0) > 0, 1, server["known"]),
            "generator": generator,
            "round": server["round"] + 1,
        }

    def notes(server: State) -> list[str]:
        return [note.replace("fedproto", name, 1) for note in base.notes(server)]

    return replace(
        base,
        name=name,
        init=init,
        aggregate=aggregate,
        notes=notes,
        additive=False,
        combinable=False,
    )


def generate(generator: Tree) -> Tensor:
    """Return P̂, (C, d), of a generator."""
    hidden = F.linear(generator["embedding"], generator["weight1"], generator["bias1"]).relu()
    return F.linear(hidden, generator["weight2"], generator["bias2"])


def adaptive_margin(
    prototypes: Tensor, classes: Tensor, class_count: int, threshold: float
) -> Tensor:
    """Return δ, Eq. 9, of clients' prototypes (n, d); 0 if they are of one class."""
    ones = torch.ones_like(prototypes[:, 0])
    centres, counts = class_means(prototypes, classes, ones, class_count)
    present = centres[counts > 0]
    gaps = distances(present, present, "l2").flatten()
    return torch.cat([gaps, gaps.new_zeros(1)]).max().clamp(max=threshold)


def margin_loss(generator: Tree, prototypes: Tensor, classes: Tensor, margin: Tensor) -> Tensor:
    """Return the mean of Eq. 10 over clients' prototypes (n, d)."""
    gaps = distances(prototypes, generate(generator), "l2")
    own = F.one_hot(classes, gaps.shape[1])
    return F.cross_entropy(-(gaps + margin * own), classes)


def _draw_generator(key: Tensor, like: Tensor) -> Tree:
    """Return initial e, of mean 0 and variance 1, and the layers of F with torch's usual bounds.

    All values are drawn uniformly; `like` is a tensor of the prototypes' shape.
    """
    classes, dim = like.shape

    def draw(name: str, bound: float, *shape: int) -> Tensor:
        values = rng.uniform(rng.key(key, name), math.prod(shape))
        return (bound * (2 * values - 1)).reshape(shape).to(like)

    return {
        "embedding": draw("embedding", 3**0.5, classes, dim),
        "weight1": draw("weight1", dim**-0.5, dim, dim),
        "bias1": draw("bias1", dim**-0.5, dim),
        "weight2": draw("weight2", dim**-0.5, dim, dim),
        "bias2": draw("bias2", dim**-0.5, dim),
    }
