"""The nouns of the package; an algorithm is a frozen value of small functions over them.

Shapes in comments: b samples in a batch, C classes of the federation, d values of an embedding,
m speakers (clients whose uploads arrived).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedproto.errors import ConfigError

if TYPE_CHECKING:
    from fedproto.core.summation import Summation

#: Named tensors, such as a model's parameters and buffers.
Tree = dict[str, Tensor]
#: Tensors by name, or trees of them by name: `{"model": {...}, "control": {...}}`. What a server
#: keeps, what it sends, and what a client keeps beside its model have this form.
State = dict[str, Any]
_EMPTY: State = {}  # never changed


class Batch(NamedTuple):
    """Samples of one client as its model takes them, and possibly padding."""

    x: Tensor  # (b, ...) float32, normalised; images are (b, channels, height, width)
    y: Tensor  # (b,) integers, 0 .. C-1: places in the federation's list of classes
    #: (b,) 1 = a sample, 0 = padding that must change nothing. With `class_weights` a loss sees the
    #: samples' weights instead of ones; their sum is still the number of samples.
    mask: Tensor
    #: (b, D) each: features of the samples that never change, by who uses them; see
    #: core/closed_form.py. In `upload_once`, `client_validate` and `predict`, if there are any.
    fixed: Tree = _EMPTY


def refuse_forward(params: Tree) -> tuple[Tensor, Tensor]:
    """Raise TypeError: other models are run in a loss or in `client_validate`, nowhere else."""
    raise TypeError("step.forward can be called in a loss or in client_validate only")


class Step(NamedTuple):
    """What a loss, an upload or a prediction is computed from.

    A loss sees a batch; `upload` and `client_update` see all training samples of the client, whose
    features and logits are empty if the algorithm collects nothing. `client_validate` sees all
    validation samples of the client. In other functions than a loss and `client_validate` the batch
    has no x. In training `received` has the client's own classes, in evaluation all classes.
    """

    params: Tree  # the parameters and buffers that are trained, by their names in the model
    features: Tensor  # (b, d) embeddings h = f(φ; x)
    logits: Tensor  # (b, C)
    batch: Batch
    received: State  # what the server sent
    state: State = _EMPTY  # what the client keeps beside its model; see `client_init`
    #: forward(other parameters) -> features and logits of this batch: in a loss in training mode,
    #: in `client_validate` in eval mode. Names that are not given are the client's own.
    forward: Callable[[Tree], tuple[Tensor, Tensor]] = refuse_forward
    lr: Tensor = torch.tensor(0.0)  # () of this round
    steps: Tensor = torch.tensor(0)  # () local steps done so far in this round
    key: Tensor = torch.tensor(0)  # () of (seed, round, client); see core/rng.py
    number: Tensor = torch.tensor(0)  # () the client's number
    momentum: Tensor = torch.tensor(0.0)  # () of the client's SGD


class Group(NamedTuple):
    """A weighted sum, or those of several clients with a leading axis over them.

    The server adds the groups of all clients and only then divides.
    """

    sums: Tree  # weight × value, by name
    #: () one per client, (C,) one per class or (K,) one per cluster; 0 = the client has no value.
    #: Its shape is a prefix of that of every sum and count.
    weight: Tensor
    counts: Tree = _EMPTY  # further counts, such as Eq. 6's number of holders


#: What a client sends: groups by name, each with a weight of its own.
Upload = dict[str, Group]


class SentOnce(NamedTuple):
    """The groups that clients send once, of all clients whose groups have arrived."""

    groups: Upload  # with a leading axis over these clients, in the order of their numbers
    clients: Tensor  # (m,) their numbers; none if all have left
    round: int  # in which the latest of them came, or left


@dataclass(frozen=True)
class GroupLayout:
    """What a group looks like, before anybody has sent one."""

    shapes: Mapping[str, tuple[int, ...]]  # of the sums, without the axis of `rows`
    per: Literal["client", "class", "cluster"] = "client"
    rows: int = 0  # the length of the weight; 0: one per client
    counts: tuple[str, ...] = ()
    #: Whether the values are a new version of what the client received under the same names, or
    #: under these names in a tree that is called as the group. Then transforms work on the change,
    #: and so do asynchronous rounds.
    relative: bool = False
    #: Whether clients of all architectures send the group alike, although it is not per class.
    across: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of one client's weight: () if it has one weight for all, else one per row."""
        return () if self.per == "client" else (self.rows,)

    def tensor_shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors of the group with this name, by their flat names."""
        rows = self.weight_shape
        shapes: dict[str, tuple[int, ...]] = {f"{group}/weight": rows}
        for name, shape in self.shapes.items():
            shapes[f"{group}/sums/{name}"] = rows + shape
        for name in self.counts:
            shapes[f"{group}/counts/{name}"] = rows
        return shapes


def per_client(values: Tree, relative: bool = True) -> dict[str, GroupLayout]:
    """Return the layout of an upload that is one group, `model`, with one weight per client."""
    if not values:
        return {}
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    return {"model": GroupLayout(shapes, relative=relative)}


def per_class(
    task: Task, counts: tuple[str, ...] = (), **shapes: tuple[int, ...]
) -> dict[str, GroupLayout]:
    """Return the layout of an upload that is one group, `prototypes`, with one weight per class.

    shapes  of one class's values, by name
    """
    return {"prototypes": GroupLayout(shapes, "class", task.classes, counts)}


class Recipient(NamedTuple):
    """Whom a server sends something."""

    number: Tensor  # () the client's number
    classes: Tensor  # (C,) 1 for the classes it is sent something of
    #: The name of its architecture; empty if weights are shared by all clients or by none.
    architecture: str = ""
    #: () the last round in which the client's upload arrived, and so in which it surely received
    #: something; 0 if there was none, and for an evaluation.
    heard: Tensor = torch.tensor(0)


#: `in_dims` of `vmap` for recipients of one architecture, with a leading axis over them.
OVER_RECIPIENTS: Any = Recipient(0, 0, None, 0)  # type: ignore[arg-type]


class Task(NamedTuple):
    """What all members of a federation agree on, and all a server must know at the start."""

    classes: int
    dim: int  # values of a prototype
    clients: int
    seed: int
    fixed: int = 0  # values of the fixed features of an input; 0: there are none
    #: Clients of all architectures, where `clients` are those of one; 0: there is only one.
    everybody: int = 0

    @property
    def numbers(self) -> int:
        """How many numbers of clients there are: 0 .. numbers − 1."""
        return self.everybody or self.clients


def everything(name: str) -> bool:
    """Return True for every parameter."""
    return True


def nothing(name: str) -> bool:
    """Return False for every parameter."""
    return False


def keep_nothing(params: Tree, task: Task) -> State:
    """Return the state of a client that keeps nothing beside its model."""
    return {}


def keep_state(state: State, received: State) -> State:
    """Return what a client keeps, as it is."""
    return state


def same_state(step: Step) -> State:
    """Return what a client keeps, as it is after local training."""
    return step.state


@dataclass(frozen=True)
class Phase:
    """A part of local training that changes only the parameters that `trains` names.

    FedRep has two: the head, then the body. Ditto's first one trains a tree of the client's state.
    """

    trains: Callable[[str], bool] = everything
    epochs: int | None = None  # None: the run's `epochs`, or its `local_steps`
    loss: Callable[[Step], Tree] | None = None  # None: the algorithm's
    model: str = ""  # the tree of the client's state that is trained in place of its model


@dataclass(frozen=True)
class Algorithm:
    """What travels, what the client minimises, and what the server makes of it.

    All but `init`, `declare`, `aggregate`, `aggregate_once` and `notes` are run for many clients at
    once by `torch.func.vmap`: they must not branch on the values of tensors. An algorithm in which
    one of them does, other than `send`, is left to the reference engine.

    name       as in `--algorithm`
    shared     which parameters and buffers travel, by name; none if only prototypes do
    init       (initial parameters, task) -> the server's state
    declare    (initial parameters, task) -> the layout of each group of an upload
    send       (server's state, recipient) -> what the client receives. A key `known`, if present,
               marks which rows of the other tensors beside it travel.
    adopt      (own parameters, received) -> the parameters the client trains from, and is
               evaluated with
    loss       step -> named terms, whose sum is minimised
    phases     the parts of local training, in order
    collects   which features `upload` sees, over all the client's samples: none, those of an
               eval-mode pass after training, or those that passed during the last epoch
    upload     step -> the groups of sums this client sends
    upload_once
               step -> the groups of `once` that are costly, so that they are computed only while
               somebody's have not arrived. The step is over all training samples, without features
               and logits
    aggregate  (server's state, uploads) -> its new state. The groups have a leading axis over the
               clients of the round that sent one, with `remembers` over all that ever did
    aggregate_once
               (server's state, `SentOnce`) -> its new state, in rounds in which a group of `once`
               has come or gone, after `aggregate`. If there is such a function, `aggregate` does
               not see these groups; else it sees those of all clients in every round
    predict    step -> named scores (b, C), larger is likelier

    A client may keep trees of tensors beside its model (SCAFFOLD's control variates); they are
    stacked, checkpointed and deployed like the model:

    client_init    (initial parameters, task) -> what it keeps
    client_start   (what it keeps, received) -> the same, at the start of a round
    client_adopt   (own parameters, received, what it keeps) -> the parameters, in place of `adopt`,
                   for clients that adopt by what they keep; None: `adopt` does
    client_update  step, after local training -> what it keeps from now on; `step.state` is as
                   local training left it, also for `upload`
    client_validate
                   step over the client's validation rows in eval mode, after `client_update` ->
                   what it keeps from now on: what the client chooses by its own validation rows.
                   Not called for a client without such rows; None: nothing is chosen

    additive   aggregate(uploads) equals aggregate(their sum). Then uploads are summed before
               `aggregate` sees them, with a leading axis of 1; a median, a trimmed mean or clipping
               per client needs additive=False
    remembers  absent clients still count with their latest upload (this needs single uploads, so
               such an algorithm is never additive)
    once       the groups that a client sends only until one has arrived. The server remembers them,
               so such an algorithm is additive only if it has `aggregate_once`
    combinable whether `aggregate` only divides sums by weights, so that a combiner such as a median
               may replace the sum
    silence    () -> the upload that `aggregate` is given in a round in which no upload arrived;
               None: the server keeps its state then
    repeatable whether `aggregate` makes the same of the same uploads; not if it draws noise that
               protects somebody
    sends_all  clients train with the rows of all classes, not only with those of their own
    mixed      the default models are the data set's mix of architectures
    uses_fixed whether batches need the features of the run's feature map, in `fixed`
    keeps_once_singly
               whether `aggregate_once` needs the groups of single clients, and not only their sum
    common     where clients of several architectures share weights, each architecture has a server
               state of its own, but for these entries: what is made of class-level groups, which
               all architectures share
    notes      server's state -> sentences for the user to read after this round
    metrics    server's state -> numbers for this round's line of metrics.jsonl
    privacy    how its uploads are protected, a privacy.planning.PrivacyPlan; None: they are not
    """

    name: str
    init: Callable[[Tree, Task], State]
    adopt: Callable[[Tree, State], Tree]
    loss: Callable[[Step], Tree]
    upload: Callable[[Step], Upload]
    aggregate: Callable[[State, Upload], State]
    predict: Callable[[Step], Tree]
    send: Callable[[State, Recipient], State]
    declare: Callable[[Tree, Task], dict[str, GroupLayout]]
    shared: Callable[[str], bool] = nothing
    phases: tuple[Phase, ...] = (Phase(),)
    collects: Literal["nothing", "after", "during"] = "nothing"
    client_init: Callable[[Tree, Task], State] = keep_nothing
    client_start: Callable[[State, State], State] = keep_state
    client_adopt: Callable[[Tree, State, State], Tree] | None = None
    client_update: Callable[[Step], State] = same_state
    client_validate: Callable[[Step], State] | None = None
    upload_once: Callable[[Step], Upload] | None = None
    aggregate_once: Callable[[State, SentOnce], State] | None = None
    additive: bool = True
    remembers: bool = False
    once: tuple[str, ...] = ()
    combinable: bool = True
    silence: Callable[[], Upload] | None = None
    repeatable: bool = True
    sends_all: bool = False
    mixed: bool = False
    uses_fixed: bool = False
    keeps_once_singly: bool = False
    common: tuple[str, ...] = ()
    notes: Callable[[State], list[str]] = lambda server: []
    metrics: Callable[[State], dict[str, float]] = lambda server: {}
    privacy: Any = None
    #: What travels of an upload, if that is not the upload itself; see core/transform_chains.py.
    encode: Callable[[Upload, Step], Upload] | None = None
    decode: Callable[[Upload, State], Upload] | None = None
    #: Raises ValueError if what travelled cannot be decoded; for uploads from other machines.
    check: Callable[[Upload], None] | None = None
    #: What adds the uploads of a round, if the server must not see single ones.
    summation: Summation | None = None

    def __post_init__(self) -> None:
        remembers_once = bool(self.once) and self.aggregate_once is None
        if self.additive and (self.remembers or remembers_once):
            raise ConfigError(
                f"algorithm {self.name} cannot be both additive and remembers: latest uploads "
                "must be kept singly"
            )

    @property
    def keeps_state(self) -> bool:
        """Whether a client keeps anything beside its model."""
        return self.client_init is not keep_nothing

    def start_from(self, own: Tree, received: State, kept: State) -> Tree:
        """Return the parameters that a client trains from, and is evaluated with."""
        if self.client_adopt is None:
            return self.adopt(own, received)
        return self.client_adopt(own, received, kept)
