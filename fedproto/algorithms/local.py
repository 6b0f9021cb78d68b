from fedproto.algorithms import sharing
from fedproto.core.types import Algorithm, nothing


def local() -> Algorithm:
    """Each client trains alone; nothing travels.

    min over w_i of L_S(F_i(w_i; x), y), Eq. 2 of the FedProto paper.
    """
    return sharing("local", shared=nothing)
