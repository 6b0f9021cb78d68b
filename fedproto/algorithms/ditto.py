from dataclasses import replace

from fedproto.algorithms import samples, supervised, trainable
from fedproto.algorithms.fedavg import fedavg
from fedproto.config.options import NonNegativeFloat
from fedproto.core.tensors import make_group, squared_distance
from fedproto.core.types import Algorithm, Phase, State, Step, Tree, Upload


def ditto(*, lam: NonNegativeFloat = 1.0) -> Algorithm:
    """Train a personal model beside FedAvg's, near it (Li et al. 2021, Algorithm 1).

    Each round, the client trains its own model v on min L_S(v) + λ/2 ||v − w_g||², then a copy of
    the global model it received on min L_S(w) from w = w_g, and uploads the copy:
    w_g ← Σ_i |D_i|/N · w_i. The client predicts with v. Both parts start from what was received,
    so their order does not matter; v comes first, so that its batches are those of `local`.
    """
    plain = fedavg()

    def loss(step: Step) -> Tree:
        distance = squared_distance(trainable(step.received), step.params)
        return supervised(step) | {"regulariser": lam / 2 * distance}

    def receive(kept: State, received: State) -> State:
        return {"global": received}

    def upload(step: Step) -> Upload:
        return {"model": make_group(step.state["global"], samples(step))}

    return replace(
        plain,
        name="ditto",
        adopt=lambda own, received: own,
        loss=loss,
        phases=(Phase(), Phase(model="global", loss=supervised)),
        client_init=lambda params, task: {"global": plain.init(params, task)},
        client_start=receive,
        upload=upload,
    )
