"""The device, threads and precision that a run computes with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedproto.engines.distributed.torchrun import take_device
from fedproto.errors import ConfigError


def device_of(name: str) -> torch.device:
    """Return the device that the setting `device` (auto, cpu or cuda) means on this machine."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "device is cuda, but this machine has none: accepted here are cpu and auto"
        )
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        take_device()
    return device


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return what a run was computed with; other versions or devices change the last digits."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
    return {
        "device": name,
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
    }


@contextmanager
def torch_settings(threads: int, precision: str) -> Iterator[None]:
    """Set torch's number of threads and its use of TF32, and put back the old values at the end.

    Sums depend on the number of threads and on rounded products, so a run states its own.
    """
    threads_before = torch.get_num_threads()
    products_before = torch.backends.cuda.matmul.allow_tf32
    convolutions_before = torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.backends.cuda.matmul.allow_tf32 = products_before
        torch.backends.cudnn.allow_tf32 = convolutions_before
