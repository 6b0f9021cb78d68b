"""What our GPU kernels are written with: Triton, where there is one, and their place among torch's operations."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

triton: Any = None
tl: Any = None
if importlib.util.find_spec("triton") is not None:  # it is not there on machines without a GPU
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
if TYPE_CHECKING:
    Value: TypeAlias = Any  # what a kernel works on
    constexpr: TypeAlias = Any  # what is known when it is compiled
elif triton is not None:
    Value, constexpr = tl.tensor, tl.constexpr
else:
    Value = constexpr = Any


def jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


def operation(name: str, schema: str, kernel: Any, plain: Any, fake: Any) -> Any:
    """An operation that a tracer records and a compiler leaves alone: on CUDA, on a CPU, and of shapes only."""
    made = torch.library.custom_op(
        f"fedproto::{name}", kernel, mutates_args=(), device_types="cuda", schema=schema
    )
    made.register_kernel("cpu")(plain)
    made.register_fake(fake)
    return made
