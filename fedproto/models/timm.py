"""Backbones of the optional package `timm`, from a folder or from the hub's local cache."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedproto.config.options import PositiveInt
from fedproto.errors import ConfigError, MissingExtra, need
from fedproto.models import Fit, read_weights
from fedproto.models.shared.hub_cache import find_model_folder, list_weights, read_model_config
from fedproto.models.shared.image_inputs import ImageInputs, check_channels
from fedproto.models.shared.wrap import Wrapped, wrap

EXTRA = "'.[timm]'"
#: What a folder's config.json may say about its architecture, beside its name.
KNOWN_ARGUMENTS = ("img_size", "in_chans", "global_pool")


def timm(
    fit: Fit,
    name: str,
    *,
    pretrained: bool = True,
    input_size: PositiveInt | None = None,
    head: str | None = None,
) -> Wrapped:
    """A model of the package timm: its name, such as resnet18.a1_in1k, or a folder.

    Weights come from the hub's local cache, or from the folder, as a .safetensors file; nothing is
    downloaded. `pretrained=false` draws them from the seed instead. Images are scaled to
    `input_size`, or to the one size that the model takes; grey ones get three channels. `head` is
    the path of the last layer, which timm knows as a rule; the features are what this layer is
    given.
    """
    package = _import_timm()
    where = f"model timm:{name}"
    if len(fit.shape) != 3:
        raise ConfigError(
            f"{where} takes images (channels, height, width), not inputs of shape {fit.shape}"
        )
    folder = Path(name) if Path(name).is_dir() else None
    backbone = _build(package, name, folder, where)
    if pretrained:
        _load_weights(backbone, folder or _find_in_cache(backbone, name), where)
    channels = int(getattr(backbone, "in_chans", 0) or backbone.pretrained_cfg["input_size"][0])
    check_channels(where, fit.shape, channels)
    module = ImageInputs(backbone, channels, _image_size(backbone, input_size))
    return wrap(module, head=f"backbone.{head or _find_head(backbone, where)}")


def _import_timm() -> ModuleType:
    """Import the optional package, or say in one sentence what is missing."""
    try:
        return need("timm", EXTRA, "model timm")
    except RuntimeError as error:  # of torchvision, where it was built for another torch
        raise MissingExtra(
            "model timm needs the torchvision that belongs to the installed torch: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _build(package: ModuleType, name: str, folder: Path | None, where: str) -> Any:
    """Return the model with drawn weights, by its name or by what its folder says."""
    arguments: dict[str, Any] = {}
    architecture = name
    if folder is not None:
        config = read_model_config(folder, "timm")
        architecture = str(config.get("architecture"))
        arguments = _read_arguments(config, where)
    if not package.is_model(architecture):
        raise ConfigError(
            f"{where}: timm has no model {architecture!r}, and there is no such folder"
        )
    try:
        return package.create_model(architecture, pretrained=False, **arguments)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(f"{where} cannot be built: {lines[0]}") from error


def _read_arguments(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what a folder's config.json says about its architecture, or refuse it."""
    arguments = {}
    stated = config.get("model_args") or {}
    for key, value in stated.items():
        if key not in KNOWN_ARGUMENTS:
            accepted = ", ".join(KNOWN_ARGUMENTS)
            raise ConfigError(f"{where}: config.json has {key!r} in model_args, not {accepted}")
        arguments[key] = value
    if config.get("num_classes"):
        arguments["num_classes"] = config["num_classes"]
    return arguments


def _find_in_cache(backbone: Any, name: str) -> Path:
    """Return the folder in the hub's cache that holds the weights of a model."""
    hub_name = backbone.pretrained_cfg.get("hf_hub_id")
    if not hub_name:
        raise ConfigError(
            f"model timm:{name} has no weights on the hub: name a folder, or set pretrained=false"
        )
    return find_model_folder(hub_name, "timm", EXTRA)


def _load_weights(backbone: nn.Module, folder: Path, where: str) -> None:
    """Load the weights of a folder: all tensors, with the names that timm gives them."""
    tensors: dict[str, Any] = {}
    for path in list_weights(folder, "timm"):
        tensors |= read_weights(path)
    try:
        backbone.load_state_dict(tensors)
    except RuntimeError as error:
        first = " ".join(str(error).split())
        raise ConfigError(f"{where}: the weights in {folder} do not fit: {first}") from error
    for name, value in backbone.named_parameters():
        if not value.isfinite().all():
            raise ConfigError(f"{where} has {name} with values that are not finite")


def _image_size(backbone: Any, size: int | None) -> tuple[int, int] | None:
    """Return (height, width) of the images that the model works on; None: any."""
    if size is not None:
        return (size, size)
    if not backbone.pretrained_cfg.get("fixed_input_size"):
        return None
    patches = getattr(backbone, "patch_embed", None)
    height, width = getattr(patches, "img_size", None) or backbone.pretrained_cfg["input_size"][1:]
    return (int(height), int(width))


def _find_head(backbone: Any, where: str) -> str:
    """Return the path of the layer that timm calls the classifier."""
    classifier = backbone.get_classifier()
    for path, layer in backbone.named_modules():
        if layer is classifier and isinstance(layer, nn.Linear):
            return path
    raise ConfigError(f"{where} has no linear layer at its end: name one with head=PATH")
