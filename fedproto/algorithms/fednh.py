import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms import (
    find_linear_head,
    named_layers,
    receive_all,
    samples,
    supervised,
    travelling,
)
from fedproto.config.options import Fraction, PositiveFloat
from fedproto.core import rng
from fedproto.core.directions import spread_directions
from fedproto.core.prototypes import class_means
from fedproto.core.tensors import make_group, weighted_mean
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Phase,
    State,
    Step,
    Task,
    Tree,
    Upload,
    per_class,
    per_client,
)
from fedproto.errors import ConfigError


def fednh(*, rho: Fraction = 0.9, scale: PositiveFloat = 10.0) -> Algorithm:
    """One body, and class prototypes on a sphere as its fixed head (Dai et al. 2023, Algorithm 1).

    Logits are s · cos(f(φ; x), W_c). The prototypes W_c start spread out over the unit sphere and
    are not trained: clients train the body alone, min CE, and upload it with r_i^(c), the
    normalised mean of the normalised embeddings of each of their classes. Server:

    φ ← Σ_i |D_i|/N · φ_i,  W_c ← normalised ρ W_c + (1 − ρ) Σ_i |D_ic|/N_c · r_i^(c).

    `scale` is s, a constant here so that the body alone is trained; the authors' code trains it
    from 1, or fixes it at 30. Their code also averages bodies without weights and normalises the
    mean of the r_i^(c) before it moves W_c. The model's own head, one linear layer, becomes s W
    without a bias, which ranks the classes in the same order.
    """
    is_head = named_layers("head")

    def is_body(name: str) -> bool:
        return not is_head(name)

    def init(params: Tree, task: Task) -> State:
        head = find_linear_head(params, "fednh")
        body = travelling(params, is_body)
        if not body:
            raise ConfigError("fednh trains the body alone, so it cannot be frozen")
        directions = spread_directions(rng.key(task.seed, "fednh"), task.classes, task.dim)
        like = next(iter(head.values()))
        return {"model": body, "head": {"prototypes": directions.to(like)}}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return per_client(travelling(params, is_body)) | per_class(task, prototypes=(task.dim,))

    def adopt(own: Tree, received: State) -> Tree:
        weight = scale * received["head"]["prototypes"]
        head = {}
        for name, value in own.items():
            if is_head(name):
                head[name] = weight if value.dim() == 2 else torch.zeros_like(value)
        return own | received["model"] | head

    def loss(step: Step) -> Tree:
        return supervised(step._replace(logits=cosine_logits(step)))

    def upload(step: Step) -> Upload:
        batch = step.batch
        classes = len(step.received["head"]["prototypes"])
        directions = F.normalize(step.features, dim=-1)
        means, counts = class_means(directions, batch.y, batch.mask, classes)
        return {
            "model": make_group(travelling(step.params, is_body), samples(step)),
            "prototypes": make_group({"prototypes": F.normalize(means, dim=-1)}, counts),
        }

    def aggregate(server: State, uploads: Upload) -> State:
        old = server["head"]["prototypes"]
        mean = weighted_mean(server["head"], uploads["prototypes"])["prototypes"]
        prototypes = F.normalize(rho * old + (1 - rho) * mean, dim=-1)
        body = weighted_mean(server["model"], uploads["model"])
        return {"model": body, "head": {"prototypes": prototypes}}

    def cosine_logits(step: Step) -> Tensor:
        return scale * F.normalize(step.features, dim=-1) @ step.received["head"]["prototypes"].T

    return Algorithm(
        name="fednh",
        shared=is_body,
        init=init,
        declare=declare,
        send=receive_all,
        adopt=adopt,
        loss=loss,
        phases=(Phase(trains=is_body),),
        collects="after",
        upload=upload,
        aggregate=aggregate,
        predict=lambda step: {"head": cosine_logits(step)},
    )
