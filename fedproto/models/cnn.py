from torch import nn

from fedproto.config.options import Fraction, PositiveInt
from fedproto.errors import ConfigError
from fedproto.models import Classifier, Fit, assemble


def cnn(
    fit: Fit,
    *,
    channels: PositiveInt = 20,
    width: PositiveInt = 50,
    kernel: PositiveInt = 5,
    dropout: Fraction = 0.5,
) -> Classifier:
    """The paper's network for MNIST and FEMNIST: two convolutions, two fully connected layers.

    Body: conv 10 - pool - relu - conv `channels` - dropout - pool - relu - fc `width` - relu.
    Head: dropout - fc.
    """
    if len(fit.shape) != 3:
        raise ConfigError(
            "model cnn takes images (channels, height, width), "
            f"not inputs of shape {fit.shape}: use mlp"
        )
    input_channels, height, columns = fit.shape
    pixels = _remaining_side(height, kernel) * _remaining_side(columns, kernel)
    if pixels == 0:
        raise ConfigError(
            f"model cnn needs larger images than {height}x{columns}: use mlp, or a smaller kernel"
        )
    body = {
        "conv1": nn.Conv2d(input_channels, 10, kernel),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(10, channels, 5),
        "dropout": nn.Dropout2d(dropout),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(channels * pixels, width),
        "relu3": nn.ReLU(),
    }
    return assemble(body, width, {"dropout": nn.Dropout(dropout)}, "fc2", fit)


def _remaining_side(side: int, kernel: int) -> int:
    """Return what two convolutions without padding and two poolings leave of a side."""
    after_first = (side - kernel + 1) // 2
    after_second = (after_first - 4) // 2
    return max(0, after_second)
