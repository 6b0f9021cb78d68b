from fedproto.algorithms import keeping
from fedproto.core.types import Algorithm


def fedper(*, personal: str = "head") -> Algorithm:
    """Average the base layers, keep the personal ones (Arivazhagan et al. 2019, Alg. 1 and 2).

    All layers train together; w_base ← Σ_i |D_i|/N · w_base,i. `personal` names the layers that
    stay with the client, separated by commas; `fc1,fc2` gives the traffic of the FedProto paper's
    table on MNIST.
    """
    return keeping("fedper", personal)
