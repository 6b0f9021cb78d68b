"""The algorithms, one file each, and the few building blocks they share.

| | travels | client starts from | local loss | uploads | server makes | predicts by |
|---|---|---|---|---|---|---|
| local | nothing | own | CE | - | - | head |
| fedavg | all | global | CE | weights | mean by samples | head |
| fedprox | all | global | CE + μ/2 ||w − w_g||² | weights | mean by samples | head |
| fesem | all | its cluster's centre | CE | weights in its cluster's slot | mean per cluster | head |
| fedper | body | global body, own head | CE | body | mean by samples | head |
| fedrep | body | global body, own head | CE: head, then body | body | mean by samples | head |
| fedproto(-mh) | class means | own | CE + λ d(f(x), C_y) | class means | mean per class | nearest prototype, head |
"""

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from fedproto.config.options import words
from fedproto.core.tensors import make_upload, weighted_mean
from fedproto.core.types import Algorithm, Step, Task, Tree, Upload
from fedproto.errors import ConfigError


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the samples of a batch that are not padding."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def supervised(step: Step) -> Tree:
    """L_S: the cross-entropy of the head, mean over the batch."""
    # F.cross_entropy is the same, but vmap takes it apart in Python, at every step.
    losses = -F.log_softmax(step.logits, -1).gather(-1, step.batch.y[:, None])[:, 0]
    return {"supervised": masked_mean(losses, step.batch.mask)}


def by_head(step: Step) -> Tree:
    return {"head": step.logits}


def receive_all(server: Tree, classes: Tensor) -> Tree:
    return dict(server)


def overwrite(own: Tree, received: Tree) -> Tree:
    """The client's model with every received tensor in the place of its own."""
    return own | received


def travelling(params: Tree, shared: Callable[[str], bool]) -> Tree:
    """The tensors of a model that travel. BatchNorm's whole-number step counter never does."""
    return {name: value for name, value in params.items() if shared(name) and value.is_floating_point()}


def trainable(params: Tree) -> Tree:
    """Without BatchNorm's running statistics, which have no gradient."""
    return {name: value for name, value in params.items() if not name.endswith(("running_mean", "running_var"))}


def samples(step: Step) -> Tensor:
    """|D_i|: how many samples the client has."""
    return step.batch.mask.sum()


def sharing(name: str, shared: Callable[[str], bool]) -> Algorithm:
    """Average the parameters that `shared` names, weighted by samples: w ← Σ |D_i| w_i / Σ |D_i|."""

    def init(params: Tree, task: Task) -> Tree:
        return travelling(params, shared)

    def upload(step: Step) -> Upload:
        values = travelling(step.params, shared)
        return make_upload(values, samples(step)) if values else Upload({}, {})

    return Algorithm(
        name=name,
        shared=shared,
        init=init,
        send=receive_all,
        adopt=overwrite,
        loss=supervised,
        upload=upload,
        aggregate=weighted_mean,
        predict=by_head,
    )


def named_layers(layers: str) -> Callable[[str], bool]:
    """Whether a parameter belongs to one of the comma-separated layers: `head`, `fc1,fc2`, `body.conv1`."""
    wanted = words(layers)
    return lambda name: any(f".{layer}." in f".{name}." for layer in wanted)


def keeping(name: str, personal: str) -> Algorithm:
    """Average all parameters but those of the layers named in `personal`, which stay with each client."""
    is_personal = named_layers(personal)
    algorithm = sharing(name, lambda parameter: not is_personal(parameter))

    def init(params: Tree, task: Task) -> Tree:
        for layer in words(personal):
            if not any(map(named_layers(layer), params)):
                accepted = sorted({".".join(parameter.split(".")[:-1]) for parameter in params})
                raise ConfigError(f"personal layer {layer!r} is not in the model, whose layers are {accepted}")
        return algorithm.init(params, task)

    return replace(algorithm, init=init)
