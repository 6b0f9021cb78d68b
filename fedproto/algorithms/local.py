from fedproto.algorithms import sharing
from fedproto.core.types import Algorithm, nothing


def local() -> Algorithm:
    """Each client trains alone, Eq. 2 of the FedProto paper: min over w_i of L_S(F_i(w_i; x), y); nothing travels."""
    return sharing("local", shared=nothing)
