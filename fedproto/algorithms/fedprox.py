from dataclasses import replace

from fedproto.algorithms import supervised, trainable
from fedproto.algorithms.fedavg import fedavg
from fedproto.config.options import NonNegativeFloat
from fedproto.core.tensors import squared_distance
from fedproto.core.types import Algorithm, Step, Tree


def fedprox(*, mu: NonNegativeFloat = 0.1) -> Algorithm:
    """FedAvg that holds each client near the global model (Li et al. 2020, Eq. 2).

    min L_S(w) + μ/2 ||w − w_g||².
    """

    def loss(step: Step) -> Tree:
        distance = squared_distance(trainable(step.received), step.params)
        return supervised(step) | {"regulariser": mu / 2 * distance}

    return replace(fedavg(), name="fedprox", loss=loss)
