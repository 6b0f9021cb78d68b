"""What the layers for a stack of clients share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Function

_fusing = False


@contextmanager
def fusing() -> Iterator[None]:
    """Mark that a step is being traced for a compiler.

    A compiler fuses many small additions into one loop, so some layers then take another form.
    """
    global _fusing
    _fusing = True
    try:
        yield
    finally:
        _fusing = False


def is_fusing() -> bool:
    """Return whether a step is being traced for a compiler."""
    return _fusing


def on_gpu(x: Tensor) -> bool:
    """Return whether layers take their form for a GPU."""
    return x.is_cuda


class StackedFunction(Function):
    """A function that tells vmap how to compute it for a stack.

    It needs no backward pass, because what its `vmap` calls is differentiated.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass
