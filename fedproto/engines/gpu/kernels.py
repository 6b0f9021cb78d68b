"""Triton, where it is installed, and how a kernel becomes one of torch's operations."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

triton: Any = None
tl: Any = None
if importlib.util.find_spec("triton") is not None:  # machines without a GPU may not have it
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
if TYPE_CHECKING:
    Value: TypeAlias = Any  # what a kernel works on
    constexpr: TypeAlias = Any  # what is known when a kernel is compiled
elif triton is not None:
    Value = tl.tensor
    constexpr = tl.constexpr
else:
    Value = constexpr = Any


def jit(function: Callable[..., Any]) -> Any:
    """Return a function as a Triton kernel, or unchanged where there is no Triton."""
    return function if triton is None else triton.jit(function)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up.

    >>> ceil_div(7, 3)
    3
    """
    return -(-a // b)


def next_power_of_two(a: int) -> int:
    """Return the smallest power of two that is not less than a positive number.

    >>> next_power_of_two(5), next_power_of_two(8)
    (8, 8)
    """
    return 1 << (a - 1).bit_length()


def operation(name: str, schema: str, kernel: Any, plain: Any, fake: Any) -> Any:
    """Return an operation that a tracer records and a compiler leaves alone.

    schema  its arguments and results, as in torch.library
    kernel  computes it on CUDA
    plain   computes it on a CPU, for tests
    fake    returns empty tensors of the right shapes, for tracing
    """
    made = torch.library.custom_op(
        f"fedproto::{name}", kernel, mutates_args=(), device_types="cuda", schema=schema
    )
    made.register_kernel("cpu")(plain)
    made.register_fake(fake)
    return made
