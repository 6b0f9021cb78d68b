"""A function of tensors that changes them in place, run as it is on a CPU, captured once and replayed on a GPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedproto.core.rng import preserve_torch_generators
from fedproto.core.types import Tree
from fedproto.engines.vectorised.layers import fusing

InPlace = Callable[[Tree], None]
STEP = "step"  # the name of the tensor that counts a function's calls


class Replay:
    """Calls `function`, always with the same tensors. On a GPU its kernels are recorded at the first call.

    A step of a small model is a hundred kernels of microseconds; launched from Python each costs more than it works.
    With `compile` the kernels are fused first, which takes seconds once and pays in long runs.
    """

    def __init__(self, function: InPlace, compile: bool, pool: Any = None) -> None:
        self.function, self.compile, self.pool = function, compile, pool
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tensors: Tree) -> None:
        if next(iter(tensors.values())).device.type != "cuda":
            self.function(tensors)
            return
        if self.graph is None:
            self.graph = self._capture(tensors)
        self.graph.replay()

    def _capture(self, tensors: Tree) -> torch.cuda.CUDAGraph:
        """Warming up and compiling work on copies, and draw nothing: both would be steps that nobody asked for."""
        aside = {name: value.clone() for name, value in tensors.items()}
        device = next(iter(tensors.values())).device
        with preserve_torch_generators(device):
            function = self._warmed_up(aside)
        del aside
        graph = torch.cuda.CUDAGraph()
        with _no_collector(), torch.cuda.graph(graph, pool=self.pool):
            function(tensors)
        return graph

    def _warmed_up(self, aside: Tree) -> InPlace:
        function = fused(self.function, rewound(aside)) if self.compile else self.function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(rewound(aside))
        torch.cuda.current_stream().wait_stream(stream)
        return function


def rewound(tensors: Tree) -> Tree:
    """At the first step again: a function that counts steps must not run past the last one."""
    tensors[STEP].zero_()
    return tensors


@contextmanager
def _no_collector() -> Iterator[None]:
    """Nothing may be freed while kernels are recorded; the graph of a run before could be, by Python's collector."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def fused(function: Callable[[Tree], Any], example: Tree) -> Callable[[Tree], Any]:
    """The function, its backward pass and its updates as one program, compiled by inductor.

    It is traced down to torch's own operations first, vmap and gradients included, which is all a compiler must know.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(example)

    def flat(*values: torch.Tensor) -> Any:
        return function(dict(zip(names, values, strict=True)))

    with fusing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = make_fx(flat)(*(value.clone() for value in example.values()))
    compiled = torch.compile(
        program, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False}
    )

    def call(tensors: Tree) -> Any:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on other precisions
            return compiled(*(tensors[name] for name in names))

    return call
