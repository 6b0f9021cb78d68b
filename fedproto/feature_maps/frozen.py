import torch
from torch import Tensor
from torch.func import functional_call

from fedproto.config.options import File
from fedproto.errors import ConfigError
from fedproto.feature_maps import Compute, FeatureMap, Inputs, refuse_inputs, standardise
from fedproto.models import Fit
from fedproto.models.resnet18 import resnet18

#: Values that ResNet18 embeds in.
RESNET18_VALUES = 512


def frozen(*, weights: File | None = None) -> FeatureMap:
    """The 512 values of a ResNet18 whose weights, from a file, nobody trains.

    `weights` names a file with torchvision's key names, the same for all clients. Each image is
    brought to mean 0 and variance 1 over its own pixels and channels, and grey images are shown as
    three equal channels.
    """

    if weights is None:
        raise ConfigError("feature map frozen needs a file: frozen(weights=FILE)")

    def build(inputs: Inputs) -> Compute:
        if not inputs.are_images or inputs.shape[0] not in (1, 3):
            raise refuse_inputs("frozen", "images of 1 or 3 channels", inputs)
        shape = (3, *inputs.shape[1:])
        with torch.random.fork_rng(devices=[]):
            fit = Fit(shape, classes=1)
            module = resnet18(fit, weights=weights)
        state = {name: value.detach() for name, value in module.state_dict().items()}
        state = {name: value for name, value in state.items() if value.is_floating_point()}

        def compute(x: Tensor) -> Tensor:
            images = standardise(x).expand(-1, 3, -1, -1)
            module.eval()
            own_state = {name: value.to(x) for name, value in state.items()}
            features, _ = functional_call(module, own_state, (images,))
            return features

        return compute

    return FeatureMap("frozen", lambda inputs: RESNET18_VALUES, build)
