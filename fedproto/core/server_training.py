"""A few gradient steps at the server, for algorithms whose server learns from uploads.

They are done on the CPU, also beside a GPU: a step over some class means takes less time there
than a GPU takes to start one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.tensors import divide_by_weight
from fedproto.core.types import Group, Tree

#: Where servers train: what they train on must be there.
TRAINING_DEVICE = torch.device("cpu")


def list_single_values(group: Group, name: str) -> tuple[Tensor, Tensor]:
    """Return every client's value of every class it speaks for, (n, ...), and their classes, (n,).

    They are in the order of the clients, and then of the classes, and where servers train.
    """
    speakers, classes = (group.weight > 0).nonzero(as_tuple=True)
    sums = {name: group.sums[name][speakers, classes]}
    singles = Group(sums, group.weight[speakers, classes])
    values = divide_by_weight(singles)[name]
    return values.to(TRAINING_DEVICE), classes.to(TRAINING_DEVICE)


def train_on_server(
    params: Tree,
    compute_loss: Callable[[Tree, Tensor], Tensor],
    samples: int,
    *,
    key: Tensor,
    epochs: int,
    batch: int,
    lr: float,
) -> Tree:
    """Return parameters after epochs of plain SGD over some samples.

    They are returned on the device that they came from. The order of the samples in each epoch is
    drawn from `key`, so the result is a function of the arguments alone.

    compute_loss  (parameters, numbers of the samples in a batch) -> the batch's loss, (); both are
                  on TRAINING_DEVICE
    """
    if not samples:
        return {name: value.detach() for name, value in params.items()}
    moving = {name: value.detach().to(TRAINING_DEVICE) for name, value in params.items()}
    key = key.to(TRAINING_DEVICE)
    for epoch in range(epochs):
        order = rng.permutation(rng.key(key, "server training", epoch), samples)
        for rows in order.split(batch):
            gradients = _differentiate(compute_loss, moving, rows)
            for name, gradient in gradients.items():
                moving[name] = moving[name] - lr * gradient
    return {name: value.to(params[name].device) for name, value in moving.items()}


def _differentiate(
    compute_loss: Callable[[Tree, Tensor], Tensor], params: Tree, rows: Tensor
) -> Tree:
    """Return the gradient of a batch's loss with respect to each parameter."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = compute_loss(leaves, rows)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))
