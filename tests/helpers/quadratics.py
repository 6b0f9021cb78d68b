"""Objectives whose constants are known: quadratics, and embeddings that are linear."""

from dataclasses import replace

import torch
from helpers.tiny import build
from torch import Tensor, nn

from fedproto.core.types import Step, Tree
from fedproto.theory.objectives import LocalObjectives, Samples


class Point(nn.Module):
    """A model that is one point w, whatever the input; the loss is a function of both."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.w.expand(len(x), -1), x


class Linear(nn.Module):
    """f(Φ; x) = Φ x."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.zeros(size, inputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = x @ self.phi.T
        return features, features


def make_quadratics(matrices: Tensor, x: Tensor) -> tuple[LocalObjectives, Tree]:
    """Return ½ mean over x of (w − x)ᵀ A (w − x) for m clients, and each client's A.

    The matrix reaches the loss as what the server sends.

    matrices  (m, p, p)
    x         (m, n, p)
    """

    def loss(step: Step) -> Tree:
        gaps = step.params["w"] - step.batch.x
        values = 0.5 * torch.einsum("bi,ij,bj->b", gaps, step.received["matrix"], gaps)
        return {"supervised": (values * step.batch.mask).sum() / step.batch.mask.sum().clamp(min=1)}

    algorithm = replace(build("fedproto"), loss=loss)
    return make_objectives(Point(x.shape[-1]), x, algorithm, ("w",)), {"matrix": matrices}


def make_linear(x: Tensor, size: int) -> LocalObjectives:
    """Return clients with a linear embedding: its Lipschitz constant at x is ‖x‖."""
    return make_objectives(Linear(x.shape[-1], size), x, build("fedproto"), ("phi",))


def make_objectives(
    module: nn.Module, x: Tensor, algorithm: object, trained: tuple[str, ...]
) -> LocalObjectives:
    clients, rows = x.shape[:2]
    samples = Samples(x, torch.zeros(clients, rows, dtype=torch.int64), x.new_ones(clients, rows))
    return LocalObjectives(
        module=module,
        algorithm=algorithm,  # type: ignore[arg-type]
        trained=trained,
        embedding=trained,
        clients=torch.arange(clients),
        samples=samples,
        counts=torch.full((clients,), rows),
        dropped=(),
    )
