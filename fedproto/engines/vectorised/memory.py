"""How much memory a device has, and how much of it training takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedproto.core.dropout import Dropped

#: Input values per forward pass in evaluation: with more of them a CPU's caches are too small, and
#: a GPU's memory may be.
MAX_VALUES_PER_PASS = {"cpu": 2**20, "cuda": 2**26}
#: The same for images on a CPU: a convolution writes each out many times, which caches shall hold.
MAX_IMAGE_VALUES_PER_CPU_PASS = 2**17
#: A GPU's memory that is granted per input value: a convolution writes it out up to 200 times.
GPU_BYTES_PER_INPUT_VALUE = 2**11
#: Processes that share each GPU, this one included.
_sharing_processes = 1


def share_gpu(processes: int) -> None:
    """Leave room for so many processes, this one included, on each GPU from now on.

    Each is granted an equal part: two that both find the GPU empty would plan to fill it.
    """
    global _sharing_processes
    _sharing_processes = processes


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that this process may take; None for a CPU, which its caches limit.

    They are free now, and of a GPU that is shared they are at most an equal part.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return min(free, total // _sharing_processes)


def free_host_memory() -> int:
    """Return the bytes of main memory that are free now; a huge number where it is unknown."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        kilobytes = int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):  # not Linux: assume that there is enough
        return 2**62
    return kilobytes * 1024


def training_memory(
    model_bytes: int,
    input_bytes: int,
    batch: int,
    dropped: Sequence[Dropped],
    samples: int,
) -> int:
    """Return the bytes of a GPU's memory that one client in training is granted.

    model_bytes  of its parameters and buffers
    input_bytes  of one input
    samples      per epoch, of the client with the most; with `local_steps`, of all its epochs
    """
    model_copies = 6 * model_bytes  # with gradients, momentum and copies
    activations = 1000 * batch * input_bytes
    draws_per_sample = sum(math.prod(layer.shape) for layer in dropped)
    dropout_draws = 3 * draws_per_sample * samples  # of this round and of the next
    return 2 * (model_copies + activations + dropout_draws)


def values_per_pass(device: torch.device, are_images: bool = False) -> int:
    """Return how many input values one forward pass in evaluation may take.

    It depends on the device and on who shares it, not on what is free there, so that results can
    be repeated.
    """
    most = MAX_VALUES_PER_PASS[device.type]
    if device.type != "cuda":
        return MAX_IMAGE_VALUES_PER_CPU_PASS if are_images else most
    memory = torch.cuda.get_device_properties(device).total_memory // _sharing_processes
    return min(most, memory // GPU_BYTES_PER_INPUT_VALUE)
