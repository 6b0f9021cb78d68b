from pathlib import Path

import torch
from torch import Tensor, nn

from fedproto.config.options import File, PositiveInt
from fedproto.errors import ConfigError, unknown
from fedproto.models import Classifier, Fit, assemble, read_weights


def resnet18(
    fit: Fit,
    *,
    strides: tuple[PositiveInt, ...] = (2, 2),
    weights: File | None = None,
    fresh: str = "fc",
) -> Classifier:
    """ResNet18 (He et al. 2016), which embeds in 512 values.

    `strides` are those of conv1 and of the max-pool. `weights` names a file with torchvision's key
    names (.safetensors, or .pth as torchvision ships it); every layer is read from it except those
    in `fresh`. The paper left conv1 and bn1 random, too: `fresh="conv1,bn1,fc"`.
    """
    if len(fit.shape) != 3 or len(strides) != 2:
        raise ConfigError(
            "model resnet18 takes images and two strides, "
            f"not inputs of shape {fit.shape} and {strides}"
        )
    body: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(fit.shape[0], 64, 7, strides[0], 3, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, strides[1], 1),
        "layer1": nn.Sequential(Block(64, 64, 1), Block(64, 64, 1)),
        "layer2": nn.Sequential(Block(64, 128, 2), Block(128, 128, 1)),
        "layer3": nn.Sequential(Block(128, 256, 2), Block(256, 256, 1)),
        "layer4": nn.Sequential(Block(256, 512, 2), Block(512, 512, 1)),
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
    }
    model = assemble(body, 512, {}, "fc", fit)
    if weights is not None:
        fresh_layers = [layer.strip() for layer in fresh.split(",")]
        _load_weights(model, Path(weights), fresh_layers)
    return model


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


def _load_weights(model: Classifier, path: Path, fresh: list[str]) -> None:
    """Copy the file's tensors into the model; every layer that is not fresh must be there."""
    stored = read_weights(path)
    layers = {name.split(".")[1] for name in model.state_dict()}
    for layer in fresh:
        # Otherwise a typing error would load what was meant to stay random.
        if layer and layer not in layers:
            raise unknown("layer in fresh", layer, layers)
    for name, own in model.state_dict().items():
        key = name.partition(".")[2]  # without `body.` or `head.`
        layer = key.partition(".")[0]
        if layer in fresh or layer == "project" or not own.is_floating_point():
            continue
        where = f"weights {str(path)!r}"
        if key not in stored:
            raise ConfigError(
                f"{where} hold no tensor {key!r}; torchvision's resnet18 names are accepted"
            )
        found = tuple(stored[key].shape)
        wanted = tuple(own.shape)
        if found != wanted:
            raise ConfigError(f"{where}: {key} has shape {found}, the model wants {wanted}")
        own.copy_(stored[key])
