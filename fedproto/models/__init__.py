"""The models, one file each. A model is an ordinary module that returns (features, logits).

A model of ours is a `body`, which embeds, and a `head`, which decides. Its layers have names, so
that `personal=fc1,fc2` can say which of them stay local. A user's own model needs only the forward.
"""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedproto.core.types import Tree
from fedproto.errors import ConfigError

#: Mixes of architectures by name; clients are dealt to them in equal blocks, in order.
PRESETS = {
    "cnn-mh": "cnn(channels=18),cnn(channels=20),cnn(channels=22)",
    "resnet18-mh": 'resnet18(strides="1,4"),resnet18(strides="2,2")',
    "mlp-mh": "mlp(hidden=50),mlp(hidden=100),mlp(hidden=200)",
}
BODY_PREFIX = "body."


class Fit(NamedTuple):
    """What a model must fit."""

    #: Shape of one input.
    shape: tuple[int, ...]
    #: Number of classes.
    classes: int
    #: Values of a prototype; None: as many as the model embeds in by itself.
    dim: int | None = None


class Classifier(nn.Module):
    """logits = head(features), features = body(x): F = g ∘ f in the paper's words."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (n, dim) and the logits (n, classes) of a batch."""
        features = self.body(x)
        return features, self.head(features)


def assemble(
    body_layers: dict[str, nn.Module],
    width: int,
    head_layers: dict[str, nn.Module],
    output_name: str,
    fit: Fit,
) -> Classifier:
    """Return a model of named layers whose head ends in a linear layer called `output_name`.

    `body_layers` embed in `width` values. If the federation's prototypes have another size, a
    linear layer `project` follows.
    """
    dim = fit.dim or width
    body = OrderedDict(body_layers)
    if dim != width:
        body["project"] = nn.Linear(width, dim)
    head = OrderedDict(head_layers)
    head[output_name] = nn.Linear(dim, fit.classes)
    return Classifier(nn.Sequential(body), nn.Sequential(head))


# --- weights from files


def load_body(initial: Tree, path: Path) -> Tree:
    """Return a model's initial state with the tensors of its body from a file.

    Their names are those of the model, with or without `body.`. The head stays as it is, because
    its rows belong to the classes of the client that trained it.
    """
    stored = read_weights(path)
    names = [name for name in initial if name.startswith(BODY_PREFIX)]
    where = f"weights {str(path)!r}"
    if not names:
        raise ConfigError(f"{where} are for a model with a `body`, and this one has none")
    # Names and shapes of all tensors first: a file for another model is refused for that reason.
    found = {name: _find_tensor(stored, name, initial[name], where) for name in names}
    loaded = {}
    for name, value in found.items():
        loaded[name] = _convert_tensor(value, name, initial[name], where)
    return initial | loaded


def _find_tensor(stored: Tree, name: str, own: Tensor, where: str) -> Tensor:
    """Return the stored tensor for the model's tensor `own`; it must have the same shape."""
    value = stored.get(name)
    if value is None:
        value = stored.get(name.removeprefix(BODY_PREFIX))
    wanted = f"{where} do not fit the model: its {name} {tuple(own.shape)}"
    if value is None:
        raise ConfigError(f"{wanted} are missing there")
    if value.shape != own.shape:
        raise ConfigError(f"{wanted} have shape {tuple(value.shape)} there")
    return value


def _convert_tensor(value: Tensor, name: str, own: Tensor, where: str) -> Tensor:
    """Return a stored tensor with the type and device of `own`; all its values must be finite."""
    refusal = ConfigError(f"{where} have {name} with values that are not finite numbers")
    # Casting would lose a part of these.
    if value.is_complex() or value.is_quantized or value.is_sparse:
        raise refusal
    converted = value.to(own)
    if not torch.isfinite(converted).all():
        raise refusal
    return converted


def read_weights(path: Path) -> Tree:
    """Read the named tensors of a .safetensors or .pth file; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            stored = load_file(path)
        else:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        return {name: value for name, value in stored.items() if isinstance(value, Tensor)}
    except OSError as error:
        raise ConfigError(f"weights {str(path)!r} cannot be read: {error}") from error
    except Exception as error:
        # A damaged file can fail in any way, and torch's own message advises to run its code.
        raise ConfigError(
            f"weights {str(path)!r} are not a .safetensors or .pth file of named tensors"
        ) from error
