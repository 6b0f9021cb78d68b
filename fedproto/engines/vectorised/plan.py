"""How a vectorised engine works."""

from __future__ import annotations

from dataclasses import dataclass

from fedproto.engines.vectorised.state_store import Place


@dataclass(frozen=True)
class Plan:
    """How a vectorised engine works; its results depend on it only by the order of sums."""

    #: Clients trained at a time; None: as many as the device is good at.
    stack: int | None = None
    #: Where the clients' states are kept.
    place: Place = "auto"
    #: Fuse the kernels of a step: takes seconds once, is then up to twice as fast on a GPU.
    compile: bool = False
    #: Multiply in bfloat16.
    half: bool = False
    #: Train in stacks at all, or else one client after the other.
    stacked: bool = True
    #: Layers leave each client's values contiguous: slower, but some modules need it.
    tidy: bool = False
