from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms import by_head, mean_over_known, supervised
from fedproto.config.options import NonNegativeFloat
from fedproto.core.prototypes import class_means
from fedproto.core.tensors import make_group, weighted_mean
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
)


def feddistill(
    *, gamma: NonNegativeFloat = 1.0, distil: Literal["mse", "cross-entropy"] = "mse"
) -> Algorithm:
    """Exchange the mean logits of each class (Jeong et al. 2018; Seo et al. 2020, Algorithm 1).

    Client: min L_S + γ · mean over the batch of d(z(x), Z̄^(y)), where z are the logits and d is
    their mean squared difference (`mse`) or, as in the papers, the cross-entropy of softmax(z)
    under softmax(Z̄^(y)); 0 for a class that has no mean yet. It uploads Z_i^(j), the mean of the
    logits of its samples of class j as they passed in the last epoch.

    Server: Z̄^(j) is the plain mean of Z_i^(j) over the clients that have the class. The papers
    leave a client's own logits out of what it receives; here they are in it, as in later code.
    """
    measure = {"mse": _squared_difference, "cross-entropy": _cross_entropy}[distil]

    def init(params: Tree, task: Task) -> State:
        like = next(value for value in params.values() if value.is_floating_point())
        means = like.new_zeros(task.classes, task.classes)
        return {"logits": means, "known": like.new_zeros(task.classes)}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return {"logits": GroupLayout({"logits": (task.classes,)}, "class", task.classes)}

    def send(server: State, recipient: Recipient) -> State:
        return {"logits": server["logits"], "known": server["known"] * recipient.classes}

    def loss(step: Step) -> Tree:
        distances = measure(step.logits, step.received["logits"][step.batch.y])
        return supervised(step) | {"regulariser": gamma * mean_over_known(distances, step)}

    def upload(step: Step) -> Upload:
        classes = len(step.received["known"])
        means, counts = class_means(step.logits, step.batch.y, step.batch.mask, classes)
        return {"logits": make_group({"logits": means}, (counts > 0).to(counts.dtype))}

    def aggregate(server: State, uploads: Upload) -> State:
        group = uploads["logits"]
        known = torch.where(group.weight.sum(0) > 0, 1, server["known"])
        return weighted_mean(server, group) | {"known": known}

    return Algorithm(
        name="feddistill",
        init=init,
        declare=declare,
        send=send,
        adopt=lambda own, received: own,
        loss=loss,
        collects="during",
        upload=upload,
        aggregate=aggregate,
        predict=by_head,
    )


def _squared_difference(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets).square().mean(-1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(F.softmax(targets, -1) * F.log_softmax(logits, -1)).sum(-1)
