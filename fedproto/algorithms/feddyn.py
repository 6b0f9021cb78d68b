from dataclasses import replace

import torch

from fedproto.algorithms import supervised, trainable, travelling
from fedproto.algorithms.fedavg import fedavg
from fedproto.config.options import PositiveFloat
from fedproto.core.tensors import make_group, squared_distance, weighted_mean
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
        return {"model": model, "h": _zeros(model), "clients": clients}

    def send(server: State, recipient: Recipient) -> State:
        return dict(server["model"])

    def client_init(params: Tree, task: Task) -> State:
        return {"linear": _zeros(travelling(params, everything))}

    def client_update(step: Step) -> State:
        linear = {}
        for name, value in step.state["linear"].items():
            linear[name] = value - mu * (step.params[name] - step.received[name])
        return {"linear": linear}

    def loss(step: Step) -> Tree:
        distance = squared_distance(trainable(step.received), step.params)
        linear = step.state["linear"]
        products = [(value * step.params[name]).sum() for name, value in linear.items()]
        return supervised(step) | {"regulariser": mu / 2 * distance - torch.stack(products).sum()}

    def upload(step: Step) -> Upload:
        values = travelling(step.params, everything)
        return {"model": make_group(values, torch.ones_like(step.batch.mask.sum()))}

    def aggregate(server: State, uploads: Upload) -> State:
        mean = weighted_mean(server["model"], uploads["model"])
        share = uploads["model"].weight.sum() / server["clients"]
        h = {}
        for name, value in server["h"].items():
            h[name] = value - mu * share * (mean[name] - server["model"][name])
        moved = {name: mean[name] - value / mu for name, value in h.items()}
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


def _zeros(model: Tree) -> Tree:
    """Return zeros for every tensor of a model that is trained."""
    return {name: torch.zeros_like(value) for name, value in trainable(model).items()}
