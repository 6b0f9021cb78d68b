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

from fedproto.core import rng
from fedproto.core.types import Tree

KEEP = "keep"
AT_ONCE = 2**24  # numbers drawn at a time: each is eight bytes, several times over, and ends up as one


class HandedDropout(nn.Module):
    """Multiplies by `keep`, 0 or 1 for each value (or channel) of each sample, and by 1/(1 − p)."""

    keep: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.p = float(layer.p)  # type: ignore[arg-type]
        self.scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        self.layer = layer  # without draws, as when somebody calls the module himself, it does what it always did
        self.register_buffer(KEEP, None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep is None:
            return self.layer(x)
        return x * self.keep * self.scale


class Dropped(NamedTuple):
    """A dropout layer: its buffer's name in the module, the shape it draws for one sample, and its p."""

    name: str
    shape: tuple[int, ...]
    p: float


#: How many of a sample's axes are drawn for; the rest, a channel's pixels, share one draw.
_DRAWN_AXES = {nn.Dropout: None, nn.Dropout1d: 1, nn.Dropout2d: 1, nn.Dropout3d: 1}


def hand_in_dropout(module: nn.Module, sample: Tensor) -> tuple[nn.Module, tuple[Dropped, ...]]:
    """A copy of the module whose dropout layers take their draws from a buffer, and what each of them draws.

    `sample` is a batch of one input. Layers that are used twice in a forward pass, or whose first axis is not that of
    the samples, stay torch's.
    """
    shapes = _shapes_at_dropout(module, sample)
    module = copy.deepcopy(module)
    dropped = []
    for name, shape in shapes.items():
        parent, _, child = name.rpartition(".")
        layer = HandedDropout(module.get_submodule(name))
        setattr(module.get_submodule(parent), child, layer)
        dropped.append(Dropped(f"{name}.{KEEP}", shape, layer.p))
    return module, tuple(dropped)


def _shapes_at_dropout(module: nn.Module, sample: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape for which each dropout layer that runs exactly once draws, for one sample."""
    if not any(type(layer) in _DRAWN_AXES for layer in module.modules()):
        return {}
    found = [_seen_at_dropout(copy.deepcopy(module), sample.expand(size, *sample.shape[1:])) for size in (2, 3)]
    once = [{name: shapes[0] for name, shapes in seen.items() if len(shapes) == 1} for seen in found]
    return {
        name: _drawn(module.get_submodule(name), shape[1:])
        for name, shape in once[0].items()
        if shape[0] == 2 and once[1].get(name) == (3, *shape[1:])  # of the samples, by chance in neither
    }


@torch.no_grad()
def _seen_at_dropout(module: nn.Module, batch: Tensor) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that pass each dropout layer in training."""
    seen: dict[str, list[tuple[int, ...]]] = {}
    for name, layer in module.named_modules():
        if type(layer) in _DRAWN_AXES and name:
            layer.register_forward_hook(
                lambda layer, args, out, name=name: seen.setdefault(name, []).append(tuple(out.shape))
            )
    with rng.preserve_torch_generators(batch.device):
        module.train()(batch)
    return seen


def _drawn(layer: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    axes = _DRAWN_AXES[type(layer)]  # type: ignore[index]
    return tuple(shape) if axes is None else (*shape[:axes], *(1 for _ in shape[axes:]))


def draw(layers: tuple[Dropped, ...], keys: Tensor, count: int) -> Tree:
    """For each layer what it keeps of each of `count` samples: (…, count, *shape), with the axes of `keys` in front."""
    sizes = [math.prod(layer.shape) for layer in layers]
    if not layers:
        return {}
    some = max(1, AT_ONCE // (sum(sizes) * keys.numel()))
    kept: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
    for start in range(0, count, some):
        samples = min(some, count - start)
        draws = rng.uniform(keys, samples * sum(sizes), start * sum(sizes)).unflatten(-1, (samples, sum(sizes)))
        for layer, piece in zip(layers, draws.split(sizes, dim=-1), strict=True):
            kept[layer.name].append((piece >= layer.p).unflatten(-1, layer.shape))
    return {name: torch.cat(pieces, keys.dim()) for name, pieces in kept.items()}
