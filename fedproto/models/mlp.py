import math

from torch import nn

from fedproto.config.options import PositiveInt
from fedproto.models import Classifier, Fit, assemble


def mlp(fit: Fit, *, hidden: PositiveInt = 100, width: PositiveInt = 50) -> Classifier:
    """Inputs of any shape, flattened. Embeds: fc `hidden` - relu - fc `width` - relu; decides: fc."""
    layers = {
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(math.prod(fit.shape), hidden),
        "relu1": nn.ReLU(),
        "fc2": nn.Linear(hidden, width),
        "relu2": nn.ReLU(),
    }
    return assemble(layers, width, {}, "fc3", fit)
