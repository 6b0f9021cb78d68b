import math

from torch import Tensor

from fedproto.config.options import NonNegativeInt, PositiveInt
from fedproto.feature_maps import Compute, FeatureMap, Inputs, draw_normal
from fedproto.feature_maps.auto import auto


def random_projection(*, values: PositiveInt = 64, seed: NonNegativeInt = 0) -> FeatureMap:
    """The features of `auto` in `values` random directions: fewer sums to send and to protect.

    φ' = R (φ − mean of φ's own values), where R has standard normal entries / √values, so that
    lengths and angles stay about the same (Johnson and Lindenstrauss). What all features of an
    input have in common is taken away first: it tells classes apart badly, and where features are
    clipped for privacy it would use up most of the norm.
    """
    base = auto()

    def build(inputs: Inputs) -> Compute:
        compute_base = base.build(inputs)
        width = base.count(inputs)
        matrix = draw_normal(seed, "random-projection", width, values) / math.sqrt(values)

        def compute(x: Tensor) -> Tensor:
            features = compute_base(x)
            return (features - features.mean(1, keepdim=True)) @ matrix.to(features)

        return compute

    return FeatureMap("random-projection", lambda inputs: values, build)
