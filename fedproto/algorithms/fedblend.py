from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedproto.algorithms import keeping, supervised
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

#: Among which clients choose.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


def fedblend(
    *,
    m: Fraction | Literal["auto"] = 0.1,
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

    With `m="auto"` each client starts with 0.1 and chooses after every round, among `SHARES`, the m
    for which the blend that it began the round with would have had the smallest cross-entropy on
    its validation rows. (Against its newly trained body, the mean of older ones would always lose.)

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
    share = 0.1 if m == "auto" else m

    def init(params: Tree, task: Task) -> State:
        body = bodies.init(params, task)
        if not body:
            raise ConfigError("fedblend averages bodies, so they cannot be frozen: use fedproto")
        return prototypes.init(params, task) | {"model": body}

    def declare(params: Tree, task: Task) -> dict[str, GroupLayout]:
        return prototypes.declare(params, task) | bodies.declare(params, task)

    def send(server: State, recipient: Recipient) -> State:
        return prototypes.send(server, recipient) | {"model": server["model"]}

    def client_init(params: Tree, task: Task) -> State:
        like = next(value for value in params.values() if value.is_floating_point())
        return {"blend": {"m": like.new_tensor(share)}, "before": dict(params)}

    def choose_share(step: Step) -> State:
        losses = []
        for candidate in SHARES:
            _, logits = step.forward(_blend(step.state["before"], step.received, candidate))
            losses.append(supervised(step._replace(logits=logits))["supervised"])
        table = torch.stack(losses)
        differ = table.max() - table.min() > 1e-6 * table.max()  # not in the first round
        best = step.lr.new_tensor(SHARES)[table.argmin()]
        chosen = torch.where(differ, best, step.state["blend"]["m"])
        return {"blend": {"m": chosen}, "before": dict(step.params)}

    def upload(step: Step) -> Upload:
        return prototypes.upload(step) | bodies.upload(step)

    def aggregate(server: State, uploads: Upload) -> State:
        state = prototypes.aggregate(server, uploads)
        return state | {"model": bodies.aggregate(server["model"], uploads)}

    algorithm = Algorithm(
        name="fedblend",
        shared=bodies.shared,
        init=init,
        declare=declare,
        send=send,
        adopt=lambda own, received: _blend(own, received, share),
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
    if m != "auto":
        return algorithm
    return replace(
        algorithm,
        client_init=client_init,
        client_adopt=lambda own, received, kept: _blend(own, received, kept["blend"]["m"]),
        client_validate=choose_share,
    )


def _blend(own: Tree, received: State, share: float | Tensor) -> Tree:
    """Return a client's model with its body moved towards the mean body by a share of the way."""
    mean = received["model"]
    return own | map_trees(lambda mean, own: (1 - share) * own + share * mean, mean, own)
