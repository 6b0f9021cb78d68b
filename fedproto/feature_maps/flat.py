import math

from fedproto.feature_maps import Compute, FeatureMap, Inputs


def flat() -> FeatureMap:
    """The input itself, as one row of values."""

    def build(inputs: Inputs) -> Compute:
        return lambda x: x.flatten(1)

    return FeatureMap("flat", lambda inputs: math.prod(inputs.shape), build)
