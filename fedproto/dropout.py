"""Dropout whose draws are handed in, so that they depend on (seed, round, client, sample) and not on call order.

torch's own layers ask a generator, whose answer depends on who asked before: a client in a stack of a thousand would
see other draws than alone. Here a module's dropout layers are replaced by ones that read what to keep from a buffer,
which `torch.func.functional_call` fills for each batch. Dropout that a module calls as a function stays torch's.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedproto import randomness
from fedproto.types import Tree

KEEP = "keep"


class HandedDropout(nn.Module):
    """Multiplies by `keep`: 0, or 1/(1 − p), for each value (or channel) of each sample."""

    keep: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.p = float(layer.p)  # type: ignore[arg-type]
        self.layer = layer  # without draws, as when somebody calls the module himself, it does what it always did
        self.register_buffer(KEEP, None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep is None:
            return self.layer(x)
        return x * self.keep


class Dropped(NamedTuple):
    """A dropout layer: its buffer's name in the module, the shape it draws for one sample, and its p."""

    name: str
    shape: tuple[int, ...]
    p: float


#: How many of a sample's axes are drawn for; the rest, a channel's pixels, share one draw.
_DRAWN_AXES = {nn.Dropout: None, nn.Dropout1d: 1, nn.Dropout2d: 1, nn.Dropout3d: 1}


def hand_in_dropout(module: nn.Module, sample: Tensor) -> tuple[nn.Module, tuple[Dropped, ...]]:
    """A copy of the module whose dropout layers take their draws from a buffer, and what each of them draws.

    `sample` is a batch of one input. Layers that are used twice in a forward pass stay torch's.
    """
    module = copy.deepcopy(module)
    shapes = _shapes_at_dropout(module, sample)
    dropped = []
    for name, shape in shapes.items():
        parent, _, child = name.rpartition(".")
        layer = HandedDropout(module.get_submodule(name))
        setattr(module.get_submodule(parent), child, layer)
        dropped.append(Dropped(f"{name}.{KEEP}", shape, layer.p))
    return module, tuple(dropped)


def _shapes_at_dropout(module: nn.Module, sample: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape for which each dropout layer that runs exactly once draws."""
    seen: dict[str, list[tuple[int, ...]]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda layer, args, out, name=name: seen.setdefault(name, []).append(_drawn(layer, out.shape[1:]))
        )
        for name, layer in module.named_modules()
        if type(layer) in _DRAWN_AXES and name
    ]
    with torch.no_grad():
        module.eval()(sample)
    for hook in hooks:
        hook.remove()
    return {name: shapes[0] for name, shapes in seen.items() if len(shapes) == 1}


def _drawn(layer: nn.Module, shape: torch.Size) -> tuple[int, ...]:
    axes = _DRAWN_AXES[type(layer)]  # type: ignore[index]
    return tuple(shape) if axes is None else (*shape[:axes], *(1 for _ in shape[axes:]))


def draw(layers: tuple[Dropped, ...], keys: Tensor, count: int, dtype: torch.dtype) -> Tree:
    """For each layer what it keeps of each of `count` samples: (…, count, *shape), with the axes of `keys` in front."""
    sizes = [math.prod(layer.shape) for layer in layers]
    if not layers:
        return {}
    draws = randomness.uniform(keys, count * sum(sizes)).unflatten(-1, (count, sum(sizes)))
    pieces = draws.split(sizes, dim=-1)
    return {
        layer.name: _scaled(piece >= layer.p, layer.p, dtype).unflatten(-1, layer.shape)
        for layer, piece in zip(layers, pieces, strict=True)
    }


def _scaled(kept: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return kept.to(dtype) * (1 / (1 - p) if p < 1 else 0)
