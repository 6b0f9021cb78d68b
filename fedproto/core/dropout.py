"""Dropout whose draws are handed in and depend on (seed, round, client, sample), not on call order.

torch's own layers ask a generator, whose answer depends on earlier calls: a client in a stack of a
thousand would see other draws than alone. Here a module's dropout layers are replaced by ones that
read what to keep from a buffer, which `torch.func.functional_call` fills for each batch. Dropout
that a module calls as a function stays torch's.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedproto.core import rng
from fedproto.core.types import Tree

KEEP = "keep"
DRAWS_AT_ONCE = 2**24  # a draw takes several times eight bytes; what is kept of it, one byte


class HandedDropout(nn.Module):
    """Multiplies by `keep`, 0 or 1 for each value (or channel) of each sample, and by 1/(1 − p)."""

    keep: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.p = float(layer.p)  # type: ignore[arg-type]
        self.scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        self.layer = layer  # used if no draws are handed in, as when the module is called directly
        self.register_buffer(KEEP, None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep is None:
            return self.layer(x)
        return x * self.keep * self.scale


class Dropped(NamedTuple):
    """A dropout layer of a module, whose draws are handed in."""

    name: str  # of its buffer in the module
    shape: tuple[int, ...]  # of the draws for one sample
    p: float  # the probability that a value is dropped


#: How many axes of a sample have draws of their own; along the others, the pixels of a channel,
#: one draw is shared. None: all axes.
_DRAWN_AXES = {nn.Dropout: None, nn.Dropout1d: 1, nn.Dropout2d: 1, nn.Dropout3d: 1}


def hand_in_dropout(module: nn.Module, sample: Tensor) -> tuple[nn.Module, tuple[Dropped, ...]]:
    """Return a copy of the module whose dropout layers read their draws from buffers; and these.

    `sample` is a batch of one input. Layers that are used twice in a forward pass, or whose first
    axis is not that of the samples, stay torch's.
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
    """Return the shape of one sample's draws at each dropout layer that can be replaced.

    The layer runs exactly once, and its first axis is that of the samples: batches of two and of
    three samples tell.
    """
    if not any(type(layer) in _DRAWN_AXES for layer in module.modules()):
        return {}
    of_two = _shapes_seen_once(module, sample.expand(2, *sample.shape[1:]))
    of_three = _shapes_seen_once(module, sample.expand(3, *sample.shape[1:]))
    shapes = {}
    for name, (samples, *rest) in of_two.items():
        if samples == 2 and of_three.get(name) == (3, *rest):
            shapes[name] = _draw_shape(module.get_submodule(name), tuple(rest))
    return shapes


def _shapes_seen_once(module: nn.Module, batch: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shape that passes each dropout layer that runs exactly once."""
    seen = _seen_at_dropout(copy.deepcopy(module), batch)
    return {name: shapes[0] for name, shapes in seen.items() if len(shapes) == 1}


@torch.no_grad()
def _seen_at_dropout(module: nn.Module, batch: Tensor) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes that pass each dropout layer in training, in the order of the pass."""
    seen: dict[str, list[tuple[int, ...]]] = {}

    def record(name: str, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.setdefault(name, []).append(tuple(out.shape))

    for name, layer in module.named_modules():
        if type(layer) in _DRAWN_AXES and name:
            layer.register_forward_hook(partial(record, name))
    with rng.preserve_torch_generators(batch.device):
        module.train()(batch)
    return seen


def _draw_shape(layer: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a layer's draws for a sample of the given shape."""
    axes = _DRAWN_AXES[type(layer)]  # type: ignore[index]
    if axes is None:
        return shape
    shared_axes = len(shape[axes:])
    return shape[:axes] + (1,) * shared_axes


def draw(layers: tuple[Dropped, ...], keys: Tensor, count: int) -> Tree:
    """Return what each layer keeps of each of `count` samples, as booleans.

    Each is (…, count, *shape), with the axes of `keys` in front.
    """
    if not layers:
        return {}
    sizes = [math.prod(layer.shape) for layer in layers]
    per_sample = sum(sizes)
    samples_at_once = max(1, DRAWS_AT_ONCE // (per_sample * keys.numel()))
    kept: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
    for start in range(0, count, samples_at_once):
        samples = min(samples_at_once, count - start)
        draws = rng.uniform(keys, samples * per_sample, start * per_sample)
        draws = draws.unflatten(-1, (samples, per_sample))
        for layer, piece in zip(layers, draws.split(sizes, dim=-1), strict=True):
            kept[layer.name].append((piece >= layer.p).unflatten(-1, layer.shape))
    return {name: torch.cat(pieces, keys.dim()) for name, pieces in kept.items()}
