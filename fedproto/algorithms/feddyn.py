from dataclasses import replace

import torch
from torch import Tensor

from fedproto.algorithms import make_zeros, supervised, trainable, travelling
from fedproto.algorithms.fedavg import fedavg
from fedproto.config.options import PositiveFloat
from fedproto.core.tensors import (
    inner_product,
    make_group,
    map_trees,
    squared_distance,
    weighted_mean,
)
from fedproto.core.types import (
    Algorithm,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    everything,
)


def feddyn(*, mu: PositiveFloat = 0.1) -> Algorithm:
    """FedAvg whose clients' losses are corrected until their minima agree (Acar et al. 2021).

    Algorithm 1; μ is its α. With w_g the model that a client receives, it keeps a linear term g_i,
    0 at first:

    min L_S(w) − ⟨g_i, w⟩ + μ/2 ||w − w_g||², then g_i ← g_i − μ (w_i − w_g).

    Server, for the cohort P, of m clients in all: h ← h − μ/m Σ_{i in P} (w_i − w_g), which is the
    mean of all g_i, and w_g ← mean over P of w_i, minus h/μ. All clients count equally. The
    authors' code also clips gradients (`clip_norm`), divides a client's α by its number of samples
    relative to the mean, and measures the mean of all clients' models; here w_g is measured.
    """

    def init(params: Tree, task: Task) -> State:
        model = travelling(params, everything)
        clients = next(iter(model.values())).new_tensor(task.clients)
        return {"model": model, "h": make_zeros(model), "clients": clients}

    def send(server: State, recipient: Recipient) -> State:
        return dict(server["model"])

    def client_init(params: Tree, task: Task) -> State:
        return {"linear": make_zeros(params)}

    def client_update(step: Step) -> State:
        def follow(linear: Tensor, new: Tensor, old: Tensor) -> Tensor:
            return linear - mu * (new - old)

        return {"linear": map_trees(follow, step.state["linear"], step.params, step.received)}

    def loss(step: Step) -> Tree:
        distance = squared_distance(trainable(step.received), step.params)
        product = inner_product(step.state["linear"], step.params)
        return supervised(step) | {"regulariser": mu / 2 * distance - product}

    def upload(step: Step) -> Upload:
        values = travelling(step.params, everything)
        return {"model": make_group(values, torch.ones_like(step.batch.mask.sum()))}

    def aggregate(server: State, uploads: Upload) -> State:
        mean = weighted_mean(server["model"], uploads["model"])
        share = uploads["model"].weight.sum() / server["clients"]

        def follow(h: Tensor, new: Tensor, old: Tensor) -> Tensor:
            return h - mu * share * (new - old)

        h = map_trees(follow, server["h"], mean, server["model"])
        moved = map_trees(lambda value, new: new - value / mu, h, mean)
        return {"model": mean | moved, "h": h, "clients": server["clients"]}

    return replace(
        fedavg(),
        name="feddyn",
        init=init,
        send=send,
        client_init=client_init,
        client_update=client_update,
        loss=loss,
        upload=upload,
        aggregate=aggregate,
    )
