"""Forward passes of a stack of clients in eval mode, over as many examples as fit at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedproto.core.tensors import move_index
from fedproto.core.types import Tree
from fedproto.engines.gpu.graphs import compile_function
from fedproto.engines.vectorised.architecture_groups import Data
from fedproto.engines.vectorised.attention import plain_attention
from fedproto.engines.vectorised.memory import values_per_pass
from fedproto.engines.vectorised.recordings import RecordedFunctions

#: The name of the inputs beside the names of a state, which never begin with a dot.
_INPUTS = ".inputs"
#: Axes of images: number, channel, row, column.
IMAGES_NDIM = 4


class Outputs(NamedTuple):
    """What the modules make of some columns of the clients' examples."""

    features: Tensor  # (m, columns, d)
    logits: Tensor  # (m, columns, C)
    columns: slice  # of Data.rows


class ForwardPasses:
    """Runs a stack's module in eval mode; compiled for each shape of inputs, if steps are."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, compile: bool, half: bool) -> None:
        self.module = module
        self.dtype = dtype  # of features and logits
        self.compile = compile
        self.half = half
        self.compiled: dict[tuple[int, ...], Callable[[Tree], tuple[Tensor, Tensor]]] = {}
        self.recordings = RecordedFunctions(module)  # on a CPU

    def clear(self) -> None:
        """Free what was compiled or recorded."""
        self.compiled.clear()
        self.recordings.clear()

    def run(self, state: Tree, data: Data, positions: Tensor) -> Iterator[Outputs]:
        """Yield features and logits of the clients' examples, some columns of them at a time.

        state      a row per client
        positions  (m,) the clients' positions in the architecture group
        """
        rows = data.rows[move_index(positions, data.x.device)]
        examples = rows.shape[1]
        values = rows.numel() * data.x[0].numel()
        passes = math.ceil(values / values_per_pass(data.x.device, data.x.ndim == IMAGES_NDIM))
        width = math.ceil(examples / passes)
        for start in range(0, examples, width):
            columns = slice(start, min(start + width, examples))
            x = data.x[rows[:, columns]]
            features, logits = self._run_once(state | {_INPUTS: x})
            yield Outputs(features, logits, columns)

    @torch.no_grad()
    def run_client(self, state: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits of one client's inputs; for use within `vmap`."""
        self.module.eval()
        width = max(1, values_per_pass(x.device, x.ndim == IMAGES_NDIM) // max(1, x[0].numel()))
        all_features = []
        all_logits = []
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
            for inputs in x.split(width):
                features, logits = functional_call(self.module, state, (inputs,))
                all_features.append(features.to(self.dtype))
                all_logits.append(logits.to(self.dtype))
        return torch.cat(all_features), torch.cat(all_logits)

    @torch.no_grad()
    def _run_once(self, tensors: Tree) -> tuple[Tensor, Tensor]:
        """Return features and logits of the clients' inputs, which are beside their states."""
        if tensors[_INPUTS].device.type == "cpu":
            return self.recordings.find("forward", self._run_plainly, tensors)(tensors)
        if not self.compile:
            return self._run_plainly(tensors)
        shape = tuple(tensors[_INPUTS].shape)
        if shape not in self.compiled:
            self.compiled[shape] = compile_function(self._run_plainly, tensors)
        return self.compiled[shape](tensors)

    def _run_plainly(self, tensors: Tree) -> tuple[Tensor, Tensor]:
        def run_one(state: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
            return functional_call(self.module, state, (x,))

        state = dict(tensors)
        x = state.pop(_INPUTS)
        self.module.eval()
        precision = torch.autocast(x.device.type, torch.bfloat16, enabled=self.half)
        with precision, plain_attention(x.device):
            features, logits = vmap(run_one)(state, x)
        return features.to(self.dtype), logits.to(self.dtype)
