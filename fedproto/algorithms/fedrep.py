from dataclasses import replace

from fedproto.algorithms import keeping, named_layers
from fedproto.config.options import PositiveInt
from fedproto.core.types import Algorithm, Phase


def fedrep(
    *,
    personal: str = "head",
    head_epochs: PositiveInt = 1,
    body_epochs: PositiveInt = 1,
) -> Algorithm:
    """Average a representation, refit the head on it (Collins et al. 2021, Algorithm 1).

    Each round: h_i ← SGD on the head with the body frozen, then φ_i ← SGD on the body with the
    head frozen; the server averages φ ← Σ_i |D_i|/N · φ_i. `personal` names the layers that count
    as the head.
    """
    is_head = named_layers(personal)
    head_phase = Phase(is_head, head_epochs)
    body_phase = Phase(lambda name: not is_head(name), body_epochs)
    return replace(keeping("fedrep", personal), phases=(head_phase, body_phase))
