"""Modules that return logits only, as those of torchvision, timm and transformers do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedproto.errors import ConfigError
from fedproto.models import Fit

#: Names of layers that an error lists.
MAX_NAMED_LAYERS = 5
#: How far logits may be apart that are computed in another order.
RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-4


class Wrapped(nn.Module):
    """A module that returned logits, as one that returns (features, logits).

    The features are what its last layer is given, projected to `dim` where the federation's
    prototypes have another size. `body` is the module without its last layer, and `head` is that
    layer, so that `personal=head`, `initial` and `freeze=body` mean the same as for other models.
    """

    project: nn.Linear | None

    def __init__(self, body: nn.Module, head_name: str, head: nn.Linear, tokens: bool) -> None:
        super().__init__()
        self.body = body
        self.register_module("project", None)
        self.head = head
        self.head_name = head_name
        self.tokens = tokens

    @property
    def name(self) -> str:
        """The class of the module that was wrapped."""
        return type(self.body).__name__

    @property
    def width(self) -> int:
        """The number of values that the last layer was given."""
        return (self.project or self.head).in_features

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (n, dim) and the logits (n, classes) of a batch."""
        features = self.embed(x)
        if self.project is not None:
            features = self.project(features)
        return features, self.head(features)

    def embed(self, x: Tensor) -> Tensor:
        """Return what the last layer was given, (n, width)."""
        return take_logits(self.body(x.long() if self.tokens else x))

    def fit(self, classes: int, dim: int | None) -> None:
        """Give the module a head for so many classes, and a projection to `dim` if it needs one.

        The head stays as it is if it has this many classes and needs no other inputs; otherwise
        a new one is drawn.
        """
        embedding = self.width if dim is None else dim
        if self.head.in_features != embedding:
            is_projected = embedding != self.width
            width = self.width
            self.project = _draw_like(self.head, width, embedding) if is_projected else None
        if (self.head.in_features, self.head.out_features) != (embedding, classes):
            self.head = _draw_like(self.head, embedding, classes)

    @torch.no_grad()
    def ends_in_head(self, inputs: Tensor) -> bool:
        """Return whether the module returned what its last layer made, and nothing else."""
        self.eval()
        _, logits = self(inputs)
        end = self.head if self.project is None else nn.Sequential(self.project, self.head)
        _replace_layer(self.body, self.head_name, end)
        try:
            whole = take_logits(self.body(inputs.long() if self.tokens else inputs))
        finally:
            _replace_layer(self.body, self.head_name, nn.Identity())
        if whole.shape != logits.shape:
            return False
        return torch.allclose(whole, logits, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)


def wrap(
    module: nn.Module,
    head: str,
    *,
    classes: int | None = None,
    dim: int | None = None,
    tokens: bool = False,
) -> Wrapped:
    """Return a module that returns logits as one that returns (features, logits).

    The features are the inputs of its last layer. A run gives it a head for the classes of the
    federation: the module's own where it has as many outputs, or else a new one. The module
    itself stays as it is.

    Args:
        module: returns logits (n, classes), an object or mapping with `logits`, or a tuple that
            begins with them.
        head: the last layer, an `nn.Linear`, by its path in the module: `"fc"`, `"classifier.3"`
            or `"heads.head"`.
        classes: the number of classes; None: the run decides.
        dim: the number of features, to which a layer `project` leads where the module has others;
            None: the run decides.
        tokens: whether inputs are numbers of words, which the module wants as whole numbers.

    Raises ConfigError where `head` is not such a layer.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"wrap takes a module, not {type(module).__name__}")
    if isinstance(module, Wrapped):
        raise ConfigError("the module is wrapped already")
    body = copy.deepcopy(module)
    layer = _find_head(body, head)
    _replace_layer(body, head, nn.Identity())
    wrapped = Wrapped(body, head, layer, tokens)
    wrapped.fit(classes or layer.out_features, dim)
    return wrapped.train(module.training)


def prepare_module(module: nn.Module, fit: Fit) -> nn.Module:
    """Return a module that is ready for a federation.

    A wrapped one gets a head and a projection that fit. Encoders of torch compute padded tokens,
    too: to skip them is an unfinished feature of torch, and changes nothing.
    """
    if isinstance(module, Wrapped):
        module.fit(fit.classes, fit.dim)
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False
    return module


def take_logits(output: Any) -> Tensor:
    """Return the logits of what a module returned."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise TypeError(f"the module returned {type(output).__name__}, which has no logits")


def _find_head(module: nn.Module, path: str) -> nn.Linear:
    """Return the layer at a path, or refuse what is not a linear layer."""
    layer: nn.Module | None
    try:
        layer = module.get_submodule(path) if path else None
    except AttributeError:
        layer = None
    if isinstance(layer, nn.Linear):
        return layer
    found = "has no layer" if layer is None else f"has {type(layer).__name__} as its layer"
    linear = [name for name, each in module.named_modules() if isinstance(each, nn.Linear) and name]
    last_first = linear[::-1][:MAX_NAMED_LAYERS]
    advice = "it has none"
    if last_first:
        advice = f"its linear layers, the last one first, are {', '.join(last_first)}"
    raise ConfigError(
        f"{type(module).__name__} {found} {path!r}: head must name its last layer, "
        f"an nn.Linear; {advice}"
    )


def _replace_layer(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer into the module in place of the one at a path."""
    parent, _, child = path.rpartition(".")
    setattr(module.get_submodule(parent), child, layer)


def _draw_like(layer: nn.Linear, inputs: int, outputs: int) -> nn.Linear:
    """Return a new layer on the device and in the type of another; drawn on the CPU."""
    drawn = nn.Linear(inputs, outputs, bias=layer.bias is not None)
    return drawn.to(layer.weight)
