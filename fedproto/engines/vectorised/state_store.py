"""The states of an architecture group's clients between rounds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedproto.core.tensors import move_index
from fedproto.core.types import Tree
from fedproto.engines.vectorised import memory
from fedproto.errors import ConfigError

Place = Literal["auto", "device", "host", "disk"]


class Store:
    """Keeps the clients' states, one row per client.

    They are on the device or, where they do not fit, in host memory or on disk.
    """

    #: The fraction of the free memory that states may take; the rest is for training.
    SPARE = 0.75

    def __init__(
        self, initial: Sequence[Tree], device: torch.device, place: Place = "auto"
    ) -> None:
        self.device = device
        first = initial[0]
        bytes_needed = len(initial) * sum(value.nbytes for value in first.values())
        self.place = _choose_place(bytes_needed, device) if place == "auto" else place
        self.values = {name: self._allocate(value, len(initial)) for name, value in first.items()}
        for name, rows in self.values.items():
            if all(state[name] is first[name] for state in initial):
                rows[:] = first[name].to(rows.device)
            else:
                for row, state in zip(rows, initial, strict=True):
                    row.copy_(state[name])

    def _allocate(self, like: Tensor, clients: int) -> Tensor:
        """Return an uninitialised tensor with one row, of the shape of `like`, per client."""
        shape = (clients, *like.shape)
        if self.place == "device":
            return torch.empty(shape, dtype=like.dtype, device=self.device)
        if self.place == "host":
            return torch.empty(shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")
        size = clients * like.numel()
        # The file loses its name at the end of the block; the mapping keeps its contents.
        with tempfile.NamedTemporaryFile(prefix="fedproto-states-") as file:
            _reserve_disk(file.fileno(), size * like.element_size())
            mapped = torch.from_file(file.name, shared=True, size=size, dtype=like.dtype)
            return mapped.reshape(shape)

    def take(self, positions: Tensor) -> Tree:
        """Return copies of the states of some clients, on the device."""
        states = {}
        for name, value in self.values.items():
            rows = value[move_index(positions, value.device)]
            states[name] = rows.to(self.device, non_blocking=True)
        return states

    def put(self, positions: Tensor, states: Tree) -> None:
        """Replace the states of some clients."""
        for name, value in self.values.items():
            rows = move_index(positions, value.device)
            value.index_copy_(0, rows, states[name].to(value.device))


def _choose_place(bytes_needed: int, device: torch.device) -> Place:
    """Return the nearest place with enough free memory."""
    if device.type == "cuda":
        free = memory.free_memory(device) or 0
        if bytes_needed < Store.SPARE * free:
            return "device"
    if bytes_needed < Store.SPARE * memory.free_host_memory():
        return "host" if device.type == "cuda" else "device"
    return "disk"


def _reserve_disk(file: int, size: int) -> None:
    """Reserve a file's bytes on the disk; raise ConfigError if it is full.

    A mapping that finds the disk full later kills the process without a message.
    """
    try:
        os.posix_fallocate(file, 0, max(1, size))
    except OSError as error:
        folder = tempfile.gettempdir()
        raise ConfigError(
            f"the clients' models need {size / 1e9:.1f} GB, which neither memory nor {folder} has "
            f"({error.strerror}): set TMPDIR to a folder on a larger disk, or train fewer clients"
        ) from error
