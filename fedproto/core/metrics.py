"""Numbers over clients."""

from __future__ import annotations

from fedproto.core.types import Tree


def summary(clients: Tree) -> dict[str, dict[str, float]]:
    """Mean and (population) standard deviation over clients of each accuracy."""
    return {key: {"mean": float(v.mean()), "std": float(v.std(correction=0))} for key, v in clients.items()}
