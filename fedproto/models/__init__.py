"""The models, one file each. A model is an ordinary module whose forward gives (features, logits).

A model of ours is a `body`, which embeds, and a `head`, which decides; its layers are named, so that
`personal=fc1,fc2` can say which of them stay local. A model of a user's own needs only the forward.
"""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedproto.core.types import Tree
from fedproto.errors import ConfigError

#: Mixes of architectures by name: the clients are dealt to them in equal blocks, in order.
PRESETS = {
    "cnn-mh": "cnn(channels=18),cnn(channels=20),cnn(channels=22)",
    "resnet18-mh": 'resnet18(strides="1,4"),resnet18(strides="2,2")',
    "mlp-mh": "mlp(hidden=50),mlp(hidden=100),mlp(hidden=200)",
}


class Fit(NamedTuple):
    """What a model must fit: the shape of one input, the number of classes, and the size of the prototypes."""

    shape: tuple[int, ...]
    classes: int
    dim: int | None = None  # None: the model's own


class Classifier(nn.Module):
    """logits = head(features), features = body(x): F = g ∘ f in the paper's words."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, self.head(features)


def assemble(
    layers: dict[str, nn.Module], width: int, last: dict[str, nn.Module], name: str, fit: Fit
) -> Classifier:
    """Body and head from named layers; where the federation's prototypes are not of size `width`, the body projects."""
    dim = fit.dim or width
    body: dict[str, nn.Module] = dict(layers)
    if dim != width:
        body["project"] = nn.Linear(width, dim)
    head: dict[str, nn.Module] = last | {name: nn.Linear(dim, fit.classes)}
    return Classifier(nn.Sequential(OrderedDict(body)), nn.Sequential(OrderedDict(head)))


def with_body(initial: Tree, path: Path) -> Tree:
    """A model's initial state with its body's tensors out of a file; names as in the model, or without `body.`.

    The head stays as drawn: its rows belong to the classes of those who trained it.
    """
    stored, body = read_weights(path), [name for name in initial if name.startswith("body.")]
    if not body:
        raise ConfigError(
            f"weights {str(path)!r} are for a model with a `body`, and this one has none"
        )
    found = {name: stored.get(name, stored.get(name.removeprefix("body."))) for name in body}
    for name, value in found.items():
        if value is None or value.shape != initial[name].shape:
            what = "are missing" if value is None else f"have shape {tuple(value.shape)}"
            wanted = tuple(initial[name].shape)
            raise ConfigError(
                f"weights {str(path)!r} do not fit the model: its {name} {wanted} {what} there"
            )
    taken = {
        name: value.to(initial[name])
        for name, value in found.items()
        if value is not None and _is_real(value)
    }
    for name in found:
        if name not in taken or not torch.isfinite(taken[name]).all():
            raise ConfigError(
                f"weights {str(path)!r} have {name} with values that are not finite numbers"
            )
    return initial | taken


def _is_real(value: Tensor) -> bool:
    """Whether these are numbers that can be cast without losing a part of them."""
    return not (value.is_complex() or value.is_quantized or value.is_sparse)


def read_weights(path: Path) -> Tree:
    try:
        safe = path.suffix == ".safetensors"
        stored = (
            load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        )
        return {name: value for name, value in stored.items() if isinstance(value, Tensor)}
    except OSError as error:
        raise ConfigError(f"weights {str(path)!r} cannot be read: {error}") from error
    except Exception as error:  # a damaged file can fail in any way, and torch's own message advises to run its code
        raise ConfigError(
            f"weights {str(path)!r} are no .safetensors or .pth file of named tensors"
        ) from error
