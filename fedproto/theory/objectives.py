"""The local objectives of all clients of one architecture, as functions of stacked parameters.

The proof's L is the client's whole objective, L_S + λ L_R, over all of its training rows, with
dropout off. Trees of parameters have a leading axis over the rows of a stack; a row belongs to the
client at the same place of `who`, so that several replays of a client are several rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedproto.core.batches import has_batch_norm, list_trained_names
from fedproto.core.dropout import Dropped
from fedproto.core.federation import Federation, Member
from fedproto.core.types import Algorithm, Batch, Phase, State, Step, Tree, Upload
from fedproto.engines.vectorised.layers import make_stackable
from fedproto.errors import ConfigError

#: Examples of a client that pass the module at a time.
COLUMNS = 64


class Samples(NamedTuple):
    """A batch for each row of a stack; padding has mask 0."""

    x: Tensor  # (k, b, ...)
    y: Tensor  # (k, b)
    mask: Tensor  # (k, b)


class Outputs(NamedTuple):
    """What the modules make of all training rows, in eval mode."""

    features: Tensor  # (k, n, d)
    logits: Tensor  # (k, n, C)


@dataclass(frozen=True)
class LocalObjectives:
    """The objectives of the clients of one architecture."""

    module: nn.Module  # with layers for a stack
    algorithm: Algorithm
    trained: tuple[str, ...]  # the parameters that SGD moves
    embedding: tuple[str, ...]  # those among them that the embedding depends on, φ
    clients: Tensor  # (m,) the numbers of the clients
    samples: Samples  # of all training rows: (m, n)
    counts: Tensor  # (m,) the number of training rows
    dropped: tuple[Dropped, ...]

    @classmethod
    def build(cls, members: Sequence[Member], algorithm: Algorithm) -> LocalObjectives:
        """Return the objectives of members that share a module.

        Raises ConfigError where a loss is not a mean over samples, as with BatchNorm.
        """
        first = members[0]
        if has_batch_norm(first.module):
            raise ConfigError(
                f"model {first.model} has BatchNorm, so its loss is not a mean over samples, and a "
                "batch's gradient is not an unbiased one: the theory is about other models"
            )
        module, _ = make_stackable(first.module)
        trained = tuple(list_trained_names(first.module, Phase()))
        embedding = tuple(name for name in trained if not name.startswith("head."))
        return cls(
            module=module,
            algorithm=algorithm,
            trained=trained,
            embedding=embedding or trained,
            clients=torch.tensor([member.id for member in members]),
            samples=_pad_rows(members),
            counts=torch.tensor([len(member.train) for member in members]),
            dropped=first.dropped,
        )

    def __len__(self) -> int:
        return len(self.clients)

    # --- losses

    def terms(
        self, params: Tree, received: State, samples: Samples, keep: Tree | None = None
    ) -> Tree:
        """Return each term of the loss for each row of a stack: (k,) each.

        keep  what dropout layers keep in training mode, (k, b, ...) each; None: eval mode
        """
        self.module.train(keep is not None)

        def run_one(
            params: Tree, received: State, x: Tensor, y: Tensor, mask: Tensor, keep: Tree
        ) -> Tree:
            features, logits = functional_call(self.module, params | keep, (x,))
            step = Step(params, features, logits, Batch(x, y, mask), received)
            return self.algorithm.loss(step)

        return vmap(run_one)(params, received, *samples, keep or {})

    def gradient(
        self, params: Tree, received: State, samples: Samples, keep: Tree | None = None
    ) -> Tree:
        """Return the gradient of each row's loss, of the trained parameters only."""
        leaves, whole = self._make_leaves(params)
        loss = add_terms(self.terms(whole, received, samples, keep)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))

    def full_gradient(self, params: Tree, received: State, who: Tensor) -> Tree:
        """Return ∇L of each row of a stack, over all training rows of its client."""
        total: Tree = {}
        for samples in self.iterate_columns(who):
            share = samples.mask.sum(1) / self.counts[who]
            gradient = self.gradient(params, received, samples)
            for name, value in gradient.items():
                weighted = value * share.to(value.dtype).reshape(-1, *[1] * (value.dim() - 1))
                total[name] = total[name] + weighted if name in total else weighted
        return total

    def linearise_gradient(
        self, params: Tree, received: State, samples: Samples
    ) -> Callable[[Tree], Tree]:
        """Return the product of each row's Hessian with a tree of vectors, as a function."""
        leaves, whole = self._make_leaves(params)
        loss = add_terms(self.terms(whole, received, samples)).sum()
        places = list(leaves.values())
        gradients = torch.autograd.grad(loss, places, create_graph=True, materialize_grads=True)

        def multiply(vectors: Tree) -> Tree:
            products = [
                (gradient * vectors[name]).sum()
                for name, gradient in zip(leaves, gradients, strict=True)
            ]
            total = torch.stack(products).sum()
            found = torch.autograd.grad(total, places, retain_graph=True, materialize_grads=True)
            return dict(zip(leaves, found, strict=True))

        return multiply

    # --- embeddings

    @torch.no_grad()
    def outputs(self, params: Tree, who: Tensor) -> Outputs:
        """Return features and logits of all training rows of each row's client."""
        self.module.eval()

        def run_one(params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
            return functional_call(self.module, params, (x,))

        all_features = []
        all_logits = []
        for samples in self.iterate_columns(who):
            features, logits = vmap(run_one)(params, samples.x)
            all_features.append(features)
            all_logits.append(logits)
        return Outputs(torch.cat(all_features, 1), torch.cat(all_logits, 1))

    def terms_of_outputs(self, params: Tree, outputs: Outputs, received: State) -> Tree:
        """Return each term of the whole objective of every client, (m,), from its outputs.

        The algorithm's loss must not run the model again.
        """

        def run_one(params, features, logits, y, mask, received):  # type: ignore[no-untyped-def]
            step = Step(params, features, logits, Batch(features, y, mask), received)
            return self.algorithm.loss(step)

        y, mask = self.samples.y, self.samples.mask
        return vmap(run_one)(params, *outputs, y, mask, received)

    def upload(self, params: Tree, outputs: Outputs, received: State) -> Upload:
        """Return what every client uploads, with a leading axis over the clients."""

        def run_one(params, features, logits, y, mask, received):  # type: ignore[no-untyped-def]
            step = Step(params, features, logits, Batch(features, y, mask), received)
            return self.algorithm.upload(step)

        y, mask = self.samples.y, self.samples.mask
        return vmap(run_one)(params, *outputs, y, mask, received)

    def linearise_embedding(
        self, params: Tree, x: Tensor
    ) -> tuple[Callable[[Tree], Tensor], Callable[[Tensor], Tree], int]:
        """Return v -> J v, u -> Jᵀ u, and the embedding's size, where J = ∂f(φ; x)/∂φ.

        x  (k, ...) one input for each row of the stack
        """
        self.module.eval()

        def run_one(params: Tree, x: Tensor) -> Tensor:
            features, _ = functional_call(self.module, params, (x[None],))
            return features[0]

        leaves, whole = self._make_leaves(params, self.embedding)
        places = list(leaves.values())
        features = vmap(run_one)(whole, x)
        point = torch.zeros_like(features, requires_grad=True)
        pulled = torch.autograd.grad((features * point).sum(), places, create_graph=True)

        def push(vectors: Tree) -> Tensor:
            products = [
                (each * vectors[name]).sum() for name, each in zip(leaves, pulled, strict=True)
            ]
            total = torch.stack(products).sum()
            return torch.autograd.grad(total, point, retain_graph=True)[0]

        def pull(directions: Tensor) -> Tree:
            total = (features * directions).sum()
            found = torch.autograd.grad(total, places, retain_graph=True)
            return dict(zip(leaves, found, strict=True))

        return push, pull, features.shape[-1]

    # --- rows

    def iterate_columns(self, who: Tensor) -> Iterator[Samples]:
        """Yield all training rows of the clients `who`, some columns of them at a time."""
        for start in range(0, self.samples.y.shape[1], COLUMNS):
            columns = slice(start, start + COLUMNS)
            yield Samples(*(part[who, columns] for part in self.samples))

    def take(self, who: Tensor, places: Tensor) -> Samples:
        """Return some training rows of each client.

        who     (k,)
        places  (k, b) among each client's training rows
        """
        x = self.samples.x[who[:, None], places]
        y = self.samples.y[who[:, None], places]
        return Samples(x, y, x.new_ones(y.shape))

    def spread_places(self, count: int) -> Tensor:
        """Return the places of `count` rows spread over each client's rows: (m, count).

        A client with fewer rows has some of them twice.
        """
        fractions = (torch.arange(count) + 0.5) / count
        return (fractions * self.counts[:, None]).long()

    def _make_leaves(self, params: Tree, names: Sequence[str] | None = None) -> tuple[Tree, Tree]:
        """Return copies that gradients are taken of, and all parameters with them."""
        leaves = {}
        for name in names or self.trained:
            leaves[name] = params[name].detach().clone().requires_grad_()
        return leaves, params | leaves


def add_terms(terms: Tree) -> Tensor:
    """Return the sum of the terms of a loss."""
    return torch.stack(list(terms.values())).sum(0)


def group_by_module(federation: Federation, algorithm: Algorithm) -> list[LocalObjectives]:
    """Return the objectives of a federation's clients, one stack per architecture."""
    groups: dict[int, list[Member]] = {}
    for member in federation.members:
        groups.setdefault(id(member.module), []).append(member)
    return [LocalObjectives.build(members, algorithm) for members in groups.values()]


def stack_states(states: Sequence[Tree]) -> Tree:
    """Return trees of equal names as one with a leading axis."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def _pad_rows(members: Sequence[Member]) -> Samples:
    """Return all training rows of each client, padded to the largest client's."""
    longest = max(len(member.train) for member in members)
    xs = []
    ys = []
    masks = []
    for member in members:
        rows = member.train.rows
        padding = rows[:1].expand(longest - len(rows))
        padded = torch.cat([rows, padding])
        x = member.train.x[padded]
        xs.append(x)
        ys.append(member.train.y[padded])
        masks.append((torch.arange(longest) < len(rows)).to(x.dtype))
    return Samples(torch.stack(xs), torch.stack(ys), torch.stack(masks))
