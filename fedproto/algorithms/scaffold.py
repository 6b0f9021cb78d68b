from dataclasses import replace

import torch
from torch import Tensor

from fedproto.algorithms import make_zeros, overwrite, path_length, supervised, trainable
from fedproto.algorithms.fedavg import fedavg
from fedproto.config.options import PositiveFloat
from fedproto.core.tensors import inner_product, make_group, map_trees, weighted_mean
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    per_client,
)


def scaffold(*, server_lr: PositiveFloat = 1.0) -> Algorithm:
    """FedAvg with gradients corrected for the drift of clients (Karimireddy et al. 2020, Alg. 1).

    Client: min L_S(w) + ⟨c − c_i, w − w_g⟩ from w = w_g, so each step follows ∇L_S(w) − c_i + c.
    After K steps c_i⁺ = c_i − c + (w_g − w) / (K · lr), the paper's option II; with momentum,
    K · lr is the length of K steps along a constant gradient. It uploads w and Δc_i = c_i⁺ − c_i.

    Server: w_g moves by `server_lr` times FedAvg's step; c ← c + 1/N Σ_i Δc_i over the clients
    that spoke, of N. All variates start at 0; BatchNorm's running statistics have none. FedAvg's
    step weights clients by their samples, the paper's does not.
    """
    averaging = fedavg()

    def init(params: Tree, task: Task) -> State:
        trees = {"model": averaging.init(params, task), "control": make_zeros(params)}
        return trees | {"clients": torch.tensor(task.clients)}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        control = per_client(make_zeros(params), relative=False)["model"]
        return averaging.declare(params, task) | {"control": control}

    def send(server: State, recipient: Recipient) -> State:
        return {"model": server["model"], "control": server["control"]}

    def way_back(step: Step) -> Tree:  # w_g − w
        return map_trees(torch.sub, trainable(step.received["model"]), step.params)

    def loss(step: Step) -> Tree:
        correction = map_trees(torch.sub, step.state["control"], step.received["control"])
        return supervised(step) | {"regulariser": inner_product(correction, way_back(step))}

    def change_of_control(step: Step) -> Tree:
        length = path_length(step)
        control = step.received["control"]
        return map_trees(lambda back, c: back / length - c, way_back(step), control)

    def client_update(step: Step) -> State:
        return {"control": map_trees(torch.add, step.state["control"], change_of_control(step))}

    def upload(step: Step) -> Upload:
        one = torch.ones_like(step.lr)
        return averaging.upload(step) | {"control": make_group(change_of_control(step), one)}

    def aggregate(server: State, uploads: Upload) -> State:
        def move(old: Tensor, mean: Tensor) -> Tensor:
            return torch.lerp(old, mean, server_lr)

        def follow(control: Tensor, changes: Tensor) -> Tensor:
            return control + changes.sum(0) / server["clients"]

        means = weighted_mean(server["model"], uploads["model"])
        moved = map_trees(move, trainable(server["model"]), means)
        control = map_trees(follow, server["control"], uploads["control"].sums)
        return server | {"model": means | moved, "control": control}

    return replace(
        averaging,
        name="scaffold",
        init=init,
        declare=declare,
        send=send,
        adopt=lambda own, received: overwrite(own, received["model"]),
        loss=loss,
        client_init=lambda params, task: {"control": make_zeros(params)},
        client_update=client_update,
        upload=upload,
        aggregate=aggregate,
    )
