import torch.nn.functional as F
from torch import Tensor

from fedproto.config.options import NonNegativeFloat, NonNegativeInt, PositiveInt
from fedproto.errors import ConfigError
from fedproto.feature_maps import (
    Compute,
    FeatureMap,
    Inputs,
    draw_normal,
    refuse_inputs,
    standardise,
)


def random_conv(
    *,
    filters: PositiveInt = 128,
    kernel: PositiveInt = 5,
    threshold: NonNegativeFloat = 0.25,
    pool: PositiveInt = 4,
    seed: NonNegativeInt = 0,
) -> FeatureMap:
    """Random filters over images: ReLU(conv(x) − threshold), averaged over pool × pool fields.

    The filters have mean 0 over their values and norm 1. Each image is first brought to mean 0
    and variance 1 over its own pixels and channels. So the threshold is in standard deviations
    of an image whatever the brightness, the contrast or the normalisation of a data set. There are
    filters · pool² values.
    """

    def build(inputs: Inputs) -> Compute:
        if not inputs.are_images:
            raise refuse_inputs("random-conv", "images", inputs)
        channels, height, width = inputs.shape
        if min(height, width) < kernel + pool - 1:
            raise ConfigError(
                f"feature map random-conv needs images of at least {kernel + pool - 1} pixels per "
                f"side, not {height} x {width}: lower kernel or pool, or use flat"
            )
        weight = draw_normal(seed, "random-conv", filters, channels, kernel, kernel)
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        weight = weight / weight.flatten(1).norm(dim=1)[:, None, None, None]

        def compute(x: Tensor) -> Tensor:
            response = F.conv2d(standardise(x), weight.to(x))
            return F.adaptive_avg_pool2d(F.relu(response - threshold), pool).flatten(1)

        return compute

    return FeatureMap("random-conv", lambda inputs: filters * pool * pool, build)
