"""A few gradient steps at the server, for algorithms whose server learns from uploads."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.tensors import divide_by_weight, move_index
from fedproto.core.types import Group, Tree


def list_single_values(group: Group, name: str) -> tuple[Tensor, Tensor]:
    """Return every client's value of every class it speaks for, (n, ...), and their classes, (n,).

    They are in the order of the clients, and then of the classes.
    """
    speakers, classes = (group.weight > 0).nonzero(as_tuple=True)
    sums = {name: group.sums[name][speakers, classes]}
    singles = Group(sums, group.weight[speakers, classes])
    return divide_by_weight(singles)[name], classes


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

    They stay on their device. The order of the samples in each epoch is drawn from `key`, so the
    result is a function of the arguments alone.

    compute_loss  (parameters, numbers of the samples in a batch) -> the batch's loss, ()
    """
    moving = {name: value.detach() for name, value in params.items()}
    if not samples:
        return moving
    device = next(iter(params.values())).device
    for epoch in range(epochs):
        order = rng.permutation(rng.key(key, "server training", epoch), samples)
        for rows in move_index(order, device).split(batch):
            gradients = _differentiate(compute_loss, moving, rows)
            for name, gradient in gradients.items():
                moving[name] = moving[name] - lr * gradient
    return moving


def _differentiate(
    compute_loss: Callable[[Tree, Tensor], Tensor], params: Tree, rows: Tensor
) -> Tree:
    """Return the gradient of a batch's loss with respect to each parameter."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = compute_loss(leaves, rows)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))
