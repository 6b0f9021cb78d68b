import math

import torch
from torch import Tensor

from fedproto.config.options import NonNegativeInt, PositiveFloat, PositiveInt
from fedproto.core import rng
from fedproto.feature_maps import Compute, FeatureMap, Inputs, draw_normal, refuse_inputs


def random_fourier(
    *, values: PositiveInt = 512, bandwidth: PositiveFloat = 1.0, seed: NonNegativeInt = 0
) -> FeatureMap:
    """Random Fourier features of a table's rows (Rahimi and Recht 2007), and the row itself.

    cos(w·x + b), whose products approximate the kernel exp(−‖x − x'‖² / (2 bandwidth² columns)).
    Columns come as the data set encodes them (numbers by mean and standard deviation of the stored
    encoding, categories by 0 and 1), and nothing is measured here: who shares the encoding shares
    the features. The columns themselves are appended, for what is linear in them.
    """

    def build(inputs: Inputs) -> Compute:
        if inputs.words is not None:
            raise refuse_inputs("random-fourier", "tables", inputs)
        columns = math.prod(inputs.shape)
        scale = bandwidth * math.sqrt(columns)
        weight = draw_normal(seed, "random-fourier", values, columns) / scale
        shift = 2 * math.pi * rng.uniform(rng.key(seed, "random-fourier shift"), values)

        def compute(x: Tensor) -> Tensor:
            flat = x.flatten(1)
            waves = (flat @ weight.to(x).T + shift.to(x)).cos() * math.sqrt(2 / values)
            return torch.cat([waves, flat], 1)

        return compute

    return FeatureMap("random-fourier", lambda inputs: values + math.prod(inputs.shape), build)
