"""The algorithms, one file each, and the few building blocks they share.

| | travels | client starts from | local loss | uploads | server makes | predicts by |
|---|---|---|---|---|---|---|
| local | nothing | own | CE | - | - | head |
| fedavg | all | global | CE | weights | mean by samples | head |
| fedprox | all | global | CE + μ/2 ||w − w_g||² | weights | mean by samples | head |
| moon | all | global | CE + μ contrast(z, z_g, z_previous) | weights | mean by samples | head |
| feddyn | all | global | CE − ⟨g_i, w⟩ + μ/2 ||w − w_g||² | weights | mean − h/μ | head |
| fesem | all | nearest centre | CE | weights, to one cluster | mean per cluster | head |
| fedavgm | all | global | CE | weights | mean by samples, with momentum | head |
| fedadam | all | global | CE | weights | Adam step towards the mean | head |
| scaffold | all, control variates | global | CE + ⟨c − c_i, w⟩ | weights, Δc_i | means | head |
| ditto | all | own; global | CE + λ/2 ||v − w_g||²; CE | global weights | mean by samples | head |
| fedper | body | global body, own head | CE | body | mean by samples | head |
| fedrep | body | global body, own head | CE: head, then body | body | mean by samples | head |
| fednh | body, class means | global body, fixed head | CE of cosines | both | means | cosines |
| fedgh | class means, head | own body, global head | CE | class means | trained head | head |
| fedtgp | class means | own | CE + λ d(f(x), P_y) | class means | trained prototypes | both |
| fedre | one mixed embedding, head | own body, global head | CE | mixture | trained head | head |
| fedorgp | class means | own | CE + λ (1 − cos(f(x), P_y)) | class means | trained axes | both |
| fedsa | class means, anchors | own | CE + pull and push by anchors | class means | both | both |
| protonorm | class means | own | CE + λ d(f(x), P_y) | class means | spread-out means | both |
| fedblend | body, class means | mixed body, own head | as fedproto | both | means | all three |
| lg-fedavg | head | own body, global head | CE | head | mean by samples | head |
| feddistill | class logits | own | CE + γ d(z(x), Z_y) | class logits | mean per class | head |
| fedproto(-mh) | class means | own | CE + λ d(f(x), C_y) | class means | mean per class | both |
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.config.options import words
from fedproto.core.tensors import make_group, map_trees, weighted_mean
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    everything,
    per_client,
)
from fedproto.errors import ConfigError


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the samples of a batch that are not padding."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def mean_over_known(values: Tensor, step: Step) -> Tensor:
    """Return the mean over the batch of one value per sample, which is 0 if its class is not known.

    The classes that are `known` are among what the client received.
    """
    is_known = step.received["known"][step.batch.y]
    return masked_mean(values * is_known, step.batch.mask)


def supervised(step: Step) -> Tree:
    """Return L_S: the cross-entropy of the head, as a mean over the batch."""
    # F.cross_entropy is the same, but vmap takes it apart in Python, at every step.
    log_probabilities = F.log_softmax(step.logits, -1)
    losses = -log_probabilities.gather(-1, step.batch.y[:, None])[:, 0]
    return {"supervised": masked_mean(losses, step.batch.mask)}


def by_head(step: Step) -> Tree:
    """Return the head's logits as the only score."""
    return {"head": step.logits}


def receive_all(server: State, recipient: Recipient) -> State:
    """Return all of the server's state, for every client."""
    return dict(server)


def overwrite(own: Tree, received: State) -> Tree:
    """Return the client's model with every received tensor in the place of its own."""
    return own | received


def travelling(params: Tree, shared: Callable[[str], bool]) -> Tree:
    """Return the tensors of a model that travel; BatchNorm's integer step counter never does."""
    floats = {name: value for name, value in params.items() if value.is_floating_point()}
    return {name: value for name, value in floats.items() if shared(name)}


def trainable(params: Tree) -> Tree:
    """Return a model without BatchNorm's running statistics, which have no gradient."""
    statistics = ("running_mean", "running_var")
    return {name: value for name, value in params.items() if not name.endswith(statistics)}


def make_zeros(params: Tree) -> Tree:
    """Return zeros for every tensor of a model that is trained and travels."""
    return map_trees(torch.zeros_like, trainable(travelling(params, everything)))


def samples(step: Step) -> Tensor:
    """Return |D_i|, the number of the client's samples."""
    return step.batch.mask.sum()


def path_length(step: Step) -> Tensor:
    """Return how far local training moves a model along a constant gradient of length 1: ().

    That is lr · Σ_{k=1..K} (1 − β^k) / (1 − β) for K steps of SGD with momentum β; K · lr
    without momentum. Of Adam's steps it says nothing.
    """
    momentum = step.momentum.double().clamp(max=0.9999)
    steps = step.steps.clamp(min=1)
    rest = 1 - momentum
    speeds = (steps - momentum * (1 - momentum**steps) / rest) / rest
    return step.lr * speeds.to(step.lr.dtype)


def sharing(name: str, shared: Callable[[str], bool]) -> Algorithm:
    """Return an algorithm that averages some parameters: w ← Σ |D_i| w_i / Σ |D_i|.

    `shared` says of a parameter's name whether it is averaged; the others stay with the client.
    """

    def init(params: Tree, task: Task) -> State:
        return travelling(params, shared)

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return per_client(travelling(params, shared))

    def upload(step: Step) -> Upload:
        values = travelling(step.params, shared)
        return {"model": make_group(values, samples(step))} if values else {}

    def aggregate(server: State, uploads: Upload) -> State:
        return weighted_mean(server, uploads["model"])

    return Algorithm(
        name=name,
        shared=shared,
        init=init,
        declare=declare,
        send=receive_all,
        adopt=overwrite,
        loss=supervised,
        upload=upload,
        aggregate=aggregate,
        predict=by_head,
    )


def named_layers(layers: str) -> Callable[[str], bool]:
    """Return a function that says whether a parameter belongs to one of the layers.

    `layers` are separated by commas: `head`, `fc1,fc2`, `body.conv1`.

    >>> is_head = named_layers("head")
    >>> is_head("head.fc3.weight"), is_head("body.conv1.weight")
    (True, False)
    """
    wanted = words(layers)

    def is_named(parameter: str) -> bool:
        return any(f".{layer}." in f".{parameter}." for layer in wanted)

    return is_named


def find_linear_head(params: Tree, algorithm: str) -> Tree:
    """Return the weight, and the bias if there is one, of a model's head: `head.*`.

    Raises ConfigError unless the head is one linear layer; `algorithm` names who needs that.
    """
    head = travelling(params, named_layers("head"))
    if sorted(value.dim() for value in head.values()) not in ([2], [1, 2]):
        found = f"this one has {sorted(head)}" if head else "this one has no `head`"
        raise ConfigError(f"{algorithm} needs a model whose head is one linear layer; {found}")
    return head


def keeping(name: str, personal: str) -> Algorithm:
    """Return an algorithm that averages all parameters but those of the `personal` layers."""
    is_personal = named_layers(personal)
    algorithm = sharing(name, lambda parameter: not is_personal(parameter))

    def init(params: Tree, task: Task) -> State:
        for layer in words(personal):
            if not any(map(named_layers(layer), params)):
                accepted = sorted({parameter.rpartition(".")[0] for parameter in params})
                problem = f"personal layer {layer!r} is not in the model"
                raise ConfigError(f"{problem}, whose layers are {accepted}")
        return algorithm.init(params, task)

    return replace(algorithm, init=init)


def optimising(
    name: str,
    start: Callable[[Tree], State],
    move: Callable[[State, Tree], tuple[Tree, State]],
) -> Algorithm:
    """Return FedAvg whose server moves by an optimiser (Reddi et al. 2021, Algorithm 2).

    FedAvg's step, Δ = Σ |D_i| w_i / Σ |D_i| − w, stands in for minus the gradient. BatchNorm's
    running statistics are no weights: they are averaged.

    start  weights -> what the optimiser keeps at first, as trees by name
    move   (what it keeps, Δ) -> by how much the weights move, and what it keeps from now on
    """
    averaging = sharing(name, everything)

    def init(params: Tree, task: Task) -> State:
        model = averaging.init(params, task)
        return {"model": model} | start(trainable(model))

    def send(server: State, recipient: Recipient) -> State:
        return dict(server["model"])

    def aggregate(server: State, uploads: Upload) -> State:
        model = server["model"]
        means = weighted_mean(model, uploads["model"])
        changes = map_trees(lambda old, new: new - old, trainable(model), means)
        moves, kept = move(server, changes)
        moved = map_trees(lambda move, old: old + move, moves, model)
        return {"model": means | moved} | kept

    return replace(averaging, init=init, send=send, aggregate=aggregate)
