from fedproto.algorithms import sharing
from fedproto.core.types import Algorithm, everything


def fedavg() -> Algorithm:
    """Average the whole model: w ← Σ_i |D_i|/N · w_i (McMahan et al. 2017; FedProto, Eq. 1)."""
    return sharing("fedavg", shared=everything)
