from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms.fedgh import fedgh, linear_logits
from fedproto.config.options import NonNegativeInt, PositiveFloat, PositiveInt
from fedproto.core import rng
from fedproto.core.prototypes import class_means
from fedproto.core.server_training import TRAINING_DEVICE, train_on_server
from fedproto.core.tensors import divide_by_weight, make_group
from fedproto.core.types import Algorithm, GroupLayout, State, Step, Task, Tree, Upload


def fedre(
    *,
    server_epochs: NonNegativeInt = 1,
    server_lr: PositiveFloat = 0.01,
    server_batch: PositiveInt = 10,
) -> Algorithm:
    """A global head, trained on one mixed embedding per client (Yao et al. 2025, arXiv 2511.22265).

    A client takes the global head g, trains body and head, min L_S, draws a weight for each of its
    classes, a_j uniform in [0, 1) divided by their sum, anew in every round, and uploads the
    mixture r_i = Σ_j a_j C_i^(j) of its class means with the vector a_i, and nothing else. The
    server does SGD on

    Σ over the clients of a batch of CE(g(r_i), a_i) = −Σ_i Σ_j a_ij log softmax(g(r_i))_j.

    Nobody learns the means of single classes, nor how many samples a client has. As in the authors'
    code, class means are mixed, and the losses of a batch are added, not averaged.
    """
    base = fedgh(server_epochs=server_epochs, server_lr=server_lr, server_batch=server_batch)

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return {"mixture": GroupLayout({"embedding": (task.dim,), "labels": (task.classes,)})}

    def upload(step: Step) -> Upload:
        batch = step.batch
        classes = step.logits.shape[-1]
        means, counts = class_means(step.features, batch.y, batch.mask, classes)
        is_held = (counts > 0).to(means.dtype)
        drawn = rng.uniform(rng.fold(step.key, "mixture"), classes).to(means.dtype) * is_held
        weights = drawn / drawn.sum().clamp(min=1e-12)
        has_samples = is_held.amax()
        mixture = {"embedding": weights @ means, "labels": weights}
        return {"mixture": make_group(mixture, has_samples)}

    def aggregate(server: State, uploads: Upload) -> State:
        group = uploads["mixture"]
        values = divide_by_weight(group)
        speakers = group.weight > 0
        embeddings = values["embedding"][speakers].to(TRAINING_DEVICE)
        labels = values["labels"][speakers].to(TRAINING_DEVICE)
        head = train_on_server(
            server["head"],
            lambda head, rows: mixture_loss(head, embeddings[rows], labels[rows]),
            len(embeddings),
            key=rng.key(server["seed"], "round", server["round"]),
            epochs=server_epochs,
            batch=server_batch,
            lr=server_lr,
        )
        return server | {"head": head, "round": server["round"] + 1}

    return replace(base, name="fedre", declare=declare, upload=upload, aggregate=aggregate)


def mixture_loss(head: Tree, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over mixed embeddings (n, d) of the cross-entropy with labels (n, C)."""
    return -(labels * F.log_softmax(linear_logits(head, embeddings), -1)).sum()
