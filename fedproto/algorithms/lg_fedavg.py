from fedproto.algorithms import keeping
from fedproto.core.types import Algorithm


def lg_fedavg(*, personal: str = "body") -> Algorithm:
    """Average the head, keep the representation (Liang et al. 2020, "Think Locally, Act Globally").

    All layers train together; w_head ← Σ_i |D_i|/N · w_head,i: FedPer the other way round.
    `personal` names the layers that stay with the client, separated by commas.
    """
    return keeping("lg-fedavg", personal)
