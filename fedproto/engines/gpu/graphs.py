"""Functions that change tensors in place: run directly on a CPU, recorded and replayed on a GPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedproto.core.rng import preserve_torch_generators
from fedproto.core.types import Tree
from fedproto.engines.vectorised.layer_support import fusing

InPlaceFunction = Callable[[Tree], None]
#: The name of the tensor in which a function counts its calls.
STEP = "step"
WARM_UP_CALLS = 2


class Replay:
    """Calls a function, always with the same tensors; on a GPU, records it at the first call.

    A step of a small model is a hundred kernels of microseconds each; launching one from Python
    takes longer than running it. With `compile` the kernels are fused first, which takes seconds
    once and pays off in long runs.
    """

    def __init__(self, function: InPlaceFunction, compile: bool, pool: Any = None) -> None:
        self.function = function
        self.compile = compile
        self.pool = pool  # the memory that several graphs share
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tensors: Tree) -> None:
        if _device_of(tensors).type != "cuda":
            self.function(tensors)
            return
        if self.graph is None:
            self.graph = self._capture(tensors)
        self.graph.replay()

    def _capture(self, tensors: Tree) -> torch.cuda.CUDAGraph:
        """Return the function's recorded kernels.

        Warming up and compiling work on copies and leave torch's generators as they were, or they
        would be additional steps.
        """
        copies = {name: value.clone() for name, value in tensors.items()}
        with preserve_torch_generators(_device_of(tensors)):
            function = self._warm_up(copies)
        del copies
        graph = torch.cuda.CUDAGraph()
        with _pause_garbage_collection(), torch.cuda.graph(graph, pool=self.pool):
            function(tensors)
        return graph

    def _warm_up(self, copies: Tree) -> InPlaceFunction:
        """Return the function, compiled if it is to be, after some calls."""
        function = self.function
        if self.compile:
            function = compile_function(self.function, rewind(copies))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                function(rewind(copies))
        torch.cuda.current_stream().wait_stream(stream)
        return function


def rewind(tensors: Tree) -> Tree:
    """Return the same tensors, set back to the first step.

    A function that counts its steps must not run past the last one.
    """
    tensors[STEP].zero_()
    return tensors


def _device_of(tensors: Tree) -> torch.device:
    return next(iter(tensors.values())).device


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage within the block.

    Nothing may be freed on the GPU while kernels are recorded, such as the graph of an earlier run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compile_function(function: Callable[[Tree], Any], example: Tree) -> Callable[[Tree], Any]:
    """Return the function as one program, compiled by inductor, for tensors like the example.

    The function is traced down to torch's own operations first, including vmap, gradients and
    updates, so the compiler needs to know nothing else.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(example)

    def call_with_values(*values: torch.Tensor) -> Any:
        return function(dict(zip(names, values, strict=True)))

    copies = [value.clone() for value in example.values()]
    with fusing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = make_fx(call_with_values)(*copies)
    del copies
    compiled = torch.compile(
        program, fullgraph=True, dynamic=False, options={"triton.cudagraphs": False}
    )

    def call_compiled(tensors: Tree) -> Any:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on other precisions
            values = [tensors[name] for name in names]
            return compiled(*values)

    return call_compiled
