"""The nouns of the package; an algorithm is a frozen value of small functions over them.

Shapes in comments: b samples in a batch, C classes of the federation, d values of an embedding,
m speakers (clients whose uploads arrived).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fedproto.errors import ConfigError

#: Named tensors, such as a model's parameters and buffers.
Tree = dict[str, Tensor]


class Batch(NamedTuple):
    """Samples of one client as its model takes them, and possibly padding."""

    x: Tensor  # (b, ...) float32, normalised; images are (b, channels, height, width)
    y: Tensor  # (b,) integers, 0 .. C-1: places in the federation's list of classes
    #: (b,) 1 = a sample, 0 = padding that must change nothing. With `class_weights` a loss sees the
    #: samples' weights instead of ones; their sum is still the number of samples.
    mask: Tensor


class Step(NamedTuple):
    """What a loss, an upload or a prediction is computed from.

    A loss sees a batch; `upload` sees all training samples of the client, whose features and logits
    are empty if the algorithm collects nothing. In `upload` and `predict` the batch has no x. In
    training `received` has the client's own classes, in evaluation all classes.
    """

    params: Tree  # the client's parameters and buffers
    features: Tensor  # (b, d) embeddings h = f(φ; x)
    logits: Tensor  # (b, C)
    batch: Batch
    received: Tree  # what the server sent


class Upload(NamedTuple):
    """A pair of sums. The server adds the pairs of all clients and only then divides.

    sums     weight × value, by name
    weights  `weight`, whose shape is a prefix of that of every sum (one per client, per class or
             per cluster); 0 where the client has no value. There may be further counts, such as
             Eq. 6's number of holders.
    """

    sums: Tree
    weights: Tree


class Task(NamedTuple):
    """What all members of a federation agree on, and all a server must know at the start."""

    classes: int
    dim: int  # values of a prototype
    clients: int
    seed: int


def everything(name: str) -> bool:
    """Return True for every parameter."""
    return True


def nothing(name: str) -> bool:
    """Return False for every parameter."""
    return False


@dataclass(frozen=True)
class Phase:
    """A part of local training that changes only the parameters that `trains` names.

    FedRep has two: the head, then the body.
    """

    trains: Callable[[str], bool] = everything
    epochs: int | None = None  # None: the run's `epochs`


@dataclass(frozen=True)
class Algorithm:
    """What travels, what the client minimises, and what the server makes of it.

    `send`, `adopt`, `loss`, `upload` and `predict` are run for many clients at once by
    `torch.func.vmap`: they must not branch on the values of tensors. An algorithm in which one of
    them does, other than `send`, is left to the reference engine.

    name       as in `--algorithm`
    shared     which parameters and buffers travel, by name; none if only prototypes do
    init       (initial parameters, task) -> the server's state
    send       (server's state, the client's classes as a 0/1 vector) -> what the client receives.
               A key `known`, if present, marks which rows of the other tensors travel.
    adopt      (own parameters, received) -> the parameters the client trains from, and is
               evaluated with
    loss       step -> named terms, whose sum is minimised
    phases     the parts of local training, in order
    collects   which features `upload` sees, over all the client's samples: none, those of an
               eval-mode pass after training, or those that passed during the last epoch
    upload     step -> the pair of sums this client sends
    aggregate  (server's state, uploads) -> its new state. Uploads have a leading axis over the
               clients of the round that sent one, with `remembers` over all that ever did
    predict    step -> named scores (b, C), larger is likelier
    additive   aggregate(uploads) equals aggregate(their sum). Then uploads are summed before
               `aggregate` sees them, with a leading axis of 1; a median, a trimmed mean or clipping
               per client needs additive=False
    remembers  absent clients still count with their latest upload (this needs single uploads, so
               such an algorithm is never additive)
    mixed      the default models are the data set's mix of architectures
    notes      server's state -> sentences for the user to read after this round
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

    def __post_init__(self) -> None:
        if self.additive and self.remembers:
            raise ConfigError(
                f"algorithm {self.name} cannot be both additive and remembers: latest uploads "
                "must be kept singly"
            )
