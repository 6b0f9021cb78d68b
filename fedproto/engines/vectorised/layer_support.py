"""What the layers for a stack of clients share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
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

    @classmethod
    def call(cls, *args: Any) -> Any:
        """Return what `apply` returns, within `vmap` or without; faster in a stack.

        `apply` reaches `vmap` through torch's machinery for any nest of transformations, which
        takes longer than a small layer. Within a single vmap, which is what a stack of clients is,
        the arguments are unwrapped and the vmap is left here.
        """
        level = _functorch.maybe_current_level()
        is_stacked = [_is_stacked(argument) for argument in args]
        if _fusing or level != 1 or not any(is_stacked):
            return cls.apply(*args)
        values = list(args)
        axes: list[int | None] = [None] * len(args)
        clients = 0
        for place, argument in enumerate(args):
            if is_stacked[place]:
                axis = _functorch.maybe_get_bdim(argument)
                values[place] = _functorch.get_unwrapped(argument)
                axes[place] = axis
                clients = values[place].shape[axis]
        with temporarily_pop_interpreter_stack():
            out, axis = cls.vmap(StackInfo(clients), tuple(axes), *values)
        return _functorch._add_batch_dim(out, axis, level)


class StackInfo(NamedTuple):
    """What `vmap` of a function is told of the stack, as torch tells it."""

    batch_size: int  # clients


def _is_stacked(argument: Any) -> bool:
    """Return whether an argument is a tensor with a hidden axis of clients."""
    return isinstance(argument, Tensor) and _functorch.is_batchedtensor(argument)
