"""Attention in a stack of clients: the forms of it that `vmap` can run.

On a CPU, torch computes attention by one fused operation, or a whole encoder layer by another, and
`vmap` would call these for one client after the other, with a warning. The plain form, products and
a softmax, is the same up to rounding and runs for all clients at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def plain_attention(device: torch.device) -> Iterator[None]:
    """Compute attention inside the block in forms that can be run for many clients at once."""
    had_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        if device.type == "cpu":
            with sdpa_kernel(SDPBackend.MATH):
                yield
        else:  # a GPU's own kernels can be run for many clients
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(had_fast_path)
