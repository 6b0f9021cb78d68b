from typing import Literal

from fedproto.algorithms import keeping
from fedproto.algorithms.fedproto import fedproto
from fedproto.config.options import Fraction, NonNegativeFloat, PositiveFloat
from fedproto.core.tensors import map_trees
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    State,
    Step,
    Task,
    Tree,
    Upload,
)
from fedproto.errors import ConfigError


def fedblend(
    *,
    m: Fraction = 0.1,
    lam: NonNegativeFloat = 1.0,
    contrast: NonNegativeFloat = 1.0,
    tau: PositiveFloat = 0.3,
    weighting: Literal["samples", "uniform", "eq6"] = "samples",
    absent: Literal["remember", "drop"] = "drop",
    personal: str = "head",
) -> Algorithm:
    """Exchange class means across all architectures, and softly averaged bodies within each.

    FedProto with its contrast, whose clients also upload their body φ_i, all but the `personal`
    layers. At the start of a round, and to be evaluated, φ_i ← (1 − m) φ_i + m φ̄ with
    φ̄ = Σ_k |D_k| φ_k / Σ_k |D_k| over the clients of the same architecture. m = 0 is FedProto with
    the contrast, m = 1 is FedPer with prototypes.

    When averaging helps: let φ_i = φ* + δ_i + ε_i, where δ_i is what suits client i's own data
    (variance β over the clients) and ε_i what its few samples got wrong (variance σ). With n
    clients the blend's expected squared distance from φ* + δ_i is σ − (1 − 1/n) (2mσ − m²(σ + β)),
    which is smallest for m = σ / (σ + β), whatever n is: average much where samples are few and
    clients alike, little where their data differ. Weights can be averaged at all only while the
    clients' bodies agree on what a unit means; prototypes, which draw all embeddings of a class to
    one place, see to that.
    """
    prototypes = fedproto(lam=lam, contrast=contrast, tau=tau, weighting=weighting, absent=absent)
    bodies = keeping("fedblend", personal)

    def init(params: Tree, task: Task) -> State:
        body = bodies.init(params, task)
        if not body:
            raise ConfigError("fedblend averages bodies, so they cannot be frozen: use fedproto")
        return prototypes.init(params, task) | {"model": body}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return prototypes.declare(params, task) | bodies.declare(params, task)

    def send(server: State, recipient: Recipient) -> State:
        return prototypes.send(server, recipient) | {"model": server["model"]}

    def adopt(own: Tree, received: State) -> Tree:
        mean = received["model"]
        return own | map_trees(lambda mean, own: (1 - m) * own + m * mean, mean, own)

    def upload(step: Step) -> Upload:
        return prototypes.upload(step) | bodies.upload(step)

    def aggregate(server: State, uploads: Upload) -> State:
        state = prototypes.aggregate(server, uploads)
        return state | {"model": bodies.aggregate(server["model"], uploads)}

    return Algorithm(
        name="fedblend",
        shared=bodies.shared,
        init=init,
        declare=declare,
        send=send,
        adopt=adopt,
        loss=prototypes.loss,
        collects=prototypes.collects,
        upload=upload,
        aggregate=aggregate,
        predict=prototypes.predict,
        additive=prototypes.additive,
        remembers=prototypes.remembers,
        sends_all=prototypes.sends_all,
        common=("prototypes", "known"),
        notes=prototypes.notes,
    )
