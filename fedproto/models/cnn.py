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
    """The paper's network for MNIST and FEMNIST: two convolutions and two fully connected layers.

    Embeds: conv 10 - pool - relu - conv `channels` - dropout - pool - relu - fc `width` - relu; decides: dropout - fc.
    """
    if len(fit.shape) != 3:
        raise ConfigError(
            f"model cnn takes images (channels, height, width), not inputs of shape {fit.shape}: use mlp"
        )
    flat = channels * _side(fit.shape[1], kernel) * _side(fit.shape[2], kernel)
    if flat <= 0:
        raise ConfigError(
            f"model cnn needs larger images than {fit.shape[1]}x{fit.shape[2]}: use mlp, or a smaller kernel"
        )
    layers = {
        "conv1": nn.Conv2d(fit.shape[0], 10, kernel),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(10, channels, 5),
        "dropout": nn.Dropout2d(dropout),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(flat, width),
        "relu3": nn.ReLU(),
    }
    return assemble(layers, width, {"dropout": nn.Dropout(dropout)}, "fc2", fit)


def _side(side: int, kernel: int) -> int:
    """What two convolutions without padding and two poolings leave of a side."""
    return max(0, ((side - kernel + 1) // 2 - 4) // 2)
