"""The nouns of the package. An algorithm is a frozen value of small functions over them; there is no base class.

Shapes in comments: b samples in a batch, C classes of the federation, d values of an embedding, m speakers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Tree = dict[str, Tensor]


class Batch(NamedTuple):
    x: Tensor  # (b, ...)
    y: Tensor  # (b,) whole numbers, 0 .. C-1
    mask: Tensor  # (b,) 1 = a sample, 0 = padding that must change nothing


class Step(NamedTuple):
    """All that a loss, an upload or a prediction may look at."""

    params: Tree  # the client's parameters and buffers
    features: Tensor  # (b, d) embeddings h = f(φ; x)
    logits: Tensor  # (b, C)
    batch: Batch
    received: Tree  # what the server sent


class Upload(NamedTuple):
    """A pair of sums. The server adds the pairs of all clients and only then divides.

    sums:    weight × value.
    weights: `weight`, whose shape is a prefix of that of every sum (one per client, per class or per cluster);
             0 = nothing to say. It may hold further counts, such as Eq. 6's number of holders.
    """

    sums: Tree
    weights: Tree


class Task(NamedTuple):
    """What every member of a federation must agree on, and all a server needs to know at the start."""

    classes: int
    dim: int  # values of a prototype
    clients: int
    seed: int


def everything(name: str) -> bool:
    return True


def nothing(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Phase:
    """A stretch of local training in which only the parameters named by `trains` move; FedRep has two."""

    trains: Callable[[str], bool] = everything
    epochs: int | None = None  # None: the run's `epochs`


@dataclass(frozen=True)
class Algorithm:
    """What travels, what the client minimises, and what the server makes of it.

    `send`, `adopt`, `loss`, `upload` and `predict` are run for many clients at once by `torch.func.vmap`: they must not
    branch on the values of tensors. A method that does is left to the reference engine, but for `send`.

    name       as in `--algorithm`
    shared     which parameters and buffers travel, by name; none where only prototypes do
    init       (initial parameters, task) -> the server's state
    send       (server's state, the client's classes as a 0/1 vector) -> what the client receives. A key `known`,
               if present, marks which rows of the other tensors travel.
    adopt      (own parameters, received) -> the parameters the client trains from, and is scored with
    loss       step -> named terms, whose sum is minimised
    phases     the stretches of local training, in order
    collects   which features `upload` sees, over all the client's samples: none, those of an eval-mode pass
               after training, or those that passed during the last epoch
    upload     step -> the pair of sums this client sends
    aggregate  (server's state, uploads with a leading axis over speakers) -> the server's new state
    predict    step -> named scores (b, C), larger is likelier
    additive   aggregate(uploads) equals aggregate(their sum): needed by secure aggregation, noise and all-reduce
    remembers  absent members still count with their last upload (needs single uploads, so never additive)
    mixed      the default models are the data set's mix of architectures
    notes      server's state -> sentences a person should read after this round
    """

    name: str
    init: Callable[[Tree, Task], Tree]
    adopt: Callable[[Tree, Tree], Tree]
    loss: Callable[[Step], Tree]
    upload: Callable[[Step], Upload]
    aggregate: Callable[[Tree, Upload], Tree]
    predict: Callable[[Step], Tree]
    send: Callable[[Tree, Tensor], Tree]
    shared: Callable[[str], bool] = nothing
    phases: tuple[Phase, ...] = (Phase(),)
    collects: Literal["nothing", "after", "during"] = "nothing"
    additive: bool = True
    remembers: bool = False
    mixed: bool = False
    notes: Callable[[Tree], list[str]] = lambda server: []
