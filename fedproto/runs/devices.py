"""The device, threads and precision that a run computes with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedproto.engines.distributed.torchrun import take_device
from fedproto.errors import ConfigError


def _machine(device: torch.device) -> dict[str, str]:
    """What computed a run: with other versions or another device its last digits differ."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
    }


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but this machine has none: accepted here are cpu and auto"
        )
    chosen = torch.device(
        "cuda"
        if name == "auto" and torch.cuda.is_available()
        else "cpu"
        if name == "auto"
        else name
    )
    if chosen.type == "cuda":
        take_device()
    return chosen


@contextmanager
def torch_settings(threads: int, precision: str) -> Iterator[None]:
    """Sums come out differently with another number of threads, or rounded products, so a run states its own."""
    before, products = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = (
            products,
            convolutions,
        )
