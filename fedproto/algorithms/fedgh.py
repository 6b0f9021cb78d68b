import torch
import torch.nn.functional as F
from torch import Tensor

from fedproto.algorithms import (
    by_head,
    find_linear_head,
    named_layers,
    overwrite,
    supervised,
)
from fedproto.config.options import NonNegativeInt, PositiveFloat, PositiveInt
from fedproto.core import rng
from fedproto.core.prototypes import class_means
from fedproto.core.server_training import list_single_values, train_on_server
from fedproto.core.tensors import make_group
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
    per_class,
)


def fedgh(
    *,
    server_epochs: NonNegativeInt = 1,
    server_lr: PositiveFloat = 0.01,
    server_batch: PositiveInt = 10,
) -> Algorithm:
    """A global head, trained at the server on the clients' class means (Yi et al. 2023, Alg. 1).

    A client takes the global head g, trains body and head, min L_S, and uploads C_i^(j), the mean
    embedding of each of its classes. The server then does SGD on

    min over g of the mean over clients i and their classes j of CE(g(C_i^(j)), j),

    for some epochs over the single means of this round. Bodies stay with their clients and may
    differ; the head is one linear layer over `dim` values. The authors' code takes the means
    one by one, in the order of the clients; here they are shuffled into batches, as in HtFLlib,
    whose scripts have our epochs and learning rate. Clients are scored with the server's new head,
    in the authors' code with the head that they trained themselves.
    """

    def init(params: Tree, task: Task) -> State:
        head = find_linear_head(params, "fedgh")
        seed = rng.key(task.seed, "fedgh")
        return {"head": head, "seed": seed, "round": torch.tensor(0)}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return per_class(task, prototypes=(task.dim,))

    def send(server: State, recipient: Recipient) -> State:
        return dict(server["head"])

    def upload(step: Step) -> Upload:
        batch = step.batch
        means, counts = class_means(step.features, batch.y, batch.mask, step.logits.shape[-1])
        return {"prototypes": make_group({"prototypes": means}, counts)}

    def aggregate(server: State, uploads: Upload) -> State:
        prototypes, classes = list_single_values(uploads["prototypes"], "prototypes")
        head = train_on_server(
            server["head"],
            lambda head, rows: head_loss(head, prototypes[rows], classes[rows]),
            len(prototypes),
            key=rng.key(server["seed"], "round", server["round"]),
            epochs=server_epochs,
            batch=server_batch,
            lr=server_lr,
        )
        return {"head": head, "seed": server["seed"], "round": server["round"] + 1}

    return Algorithm(
        name="fedgh",
        shared=named_layers("head"),
        init=init,
        declare=declare,
        send=send,
        adopt=overwrite,
        loss=supervised,
        collects="after",
        upload=upload,
        aggregate=aggregate,
        predict=by_head,
        additive=False,
        combinable=False,
    )


def head_loss(head: Tree, prototypes: Tensor, classes: Tensor) -> Tensor:
    """Return the mean cross-entropy of a linear head on prototypes (n, d) of these classes."""
    return F.cross_entropy(linear_logits(head, prototypes), classes)


def linear_logits(head: Tree, embeddings: Tensor) -> Tensor:
    """Return the logits, (n, C), that a linear head gives embeddings (n, d)."""
    (weight,) = [value for value in head.values() if value.dim() == 2]
    bias = next((value for value in head.values() if value.dim() == 1), None)
    return F.linear(embeddings, weight, bias)
