import math

from torch import nn

from fedproto.config.options import PositiveInt
from fedproto.models import Classifier, Fit, assemble


def mlp(fit: Fit, *, hidden: PositiveInt = 100, width: PositiveInt = 50) -> Classifier:
    """Two hidden layers over inputs of any shape, flattened.

    Body: fc `hidden` - relu - fc `width` - relu. Head: fc.
    """
    body = {
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(math.prod(fit.shape), hidden),
        "relu1": nn.ReLU(),
        "fc2": nn.Linear(hidden, width),
        "relu2": nn.ReLU(),
    }
    return assemble(body, width, {}, "fc3", fit)
