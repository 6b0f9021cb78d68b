"""Models whose body is not trained: features are computed once, and the rest is trained on them.

A client's inputs become the features of its body, and its module what comes after it, so that
engines, checkpoints and uploads know nothing of the body. `Member.frozen` holds what is needed to
put the model together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedproto.core.federation import Examples, Federation, FrozenBody, Member
from fedproto.core.local_training import EVALUATION_BATCH
from fedproto.core.types import Tree
from fedproto.errors import ConfigError
from fedproto.models import Classifier
from fedproto.models.shared.wrap import Wrapped, take_logits
from fedproto.runs.needed_rows import NeededRows

#: The layer that leads to `dim`, which is trained: the body came without it.
PROJECTION = "project"


class _Parts(NamedTuple):
    """A module in two parts; the names of parameters are those of the whole module."""

    body: nn.Module  # inputs -> features
    rest: nn.Module  # features -> (features, logits)


def freeze_bodies(federation: Federation) -> Federation:
    """Return the federation with features for inputs, and modules without their bodies.

    Bodies run in eval mode: BatchNorm uses its running statistics, and dropout drops nothing.
    Raises ConfigError where inputs change from epoch to epoch, or a model has no body.
    """
    parts_of: dict[nn.Module, _Parts] = {}
    split_states: dict[int, tuple[Tree, Tree]] = {}  # by the identity of an initial state
    pools = _FeaturePools(federation.members)
    members = []
    for member in federation.members:
        _refuse_augmentation(member)
        if member.module not in parts_of:
            parts_of[member.module] = _take_apart(member)
        parts = parts_of[member.module]
        if id(member.initial) not in split_states:
            split_states[id(member.initial)] = _split_state(member.initial, parts.rest)
        frozen, trained = split_states[id(member.initial)]
        validation = member.validation
        if validation is not None:
            validation = pools.embed(validation, parts.body, frozen)
        layers = {name for name, _ in parts.rest.named_modules()}
        dropped = [each for each in member.dropped if each.name.rpartition(".")[0] in layers]
        members.append(
            replace(
                member,
                module=parts.rest,
                dropped=tuple(dropped),
                initial=trained,
                train=pools.embed(member.train, parts.body, frozen),
                test=pools.embed(member.test, parts.body, frozen),
                validation=validation,
                frozen=FrozenBody(member.module, frozen, member.input_shape),
            )
        )
    return replace(federation, members=tuple(members))


class _FeaturePools:
    """The features of pools of inputs; members that share inputs and a body share features."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._needed = NeededRows(members)
        self._features: dict[tuple[int, int], Tensor] = {}

    def embed(self, examples: Examples, body: nn.Module, state: Tree) -> Examples:
        """Return examples whose inputs are the features that a body with this state gives."""
        key = (id(examples.x), id(state))
        if key not in self._features:
            compute = partial(_compute_features, body, state)
            self._features[key] = self._needed.compute(compute, examples.x)
        return Examples(self._features[key], examples.y, examples.rows, examples.fixed)


def _refuse_augmentation(member: Member) -> None:
    if member.border is not None:
        raise ConfigError(
            f"freeze=body computes features once, but the training images of {member.dataset} are "
            "cropped and mirrored anew in every epoch: turn augmentation off, or leave freeze out"
        )


def _take_apart(member: Member) -> _Parts:
    """Return the body of a member's module and what comes after it."""
    module = member.module
    if isinstance(module, Wrapped):
        rest = Wrapped(nn.Identity(), "", module.head, tokens=False)
        rest.project = module.project
        return _Parts(_WrappedBody(module.body, module.tokens), rest)
    if isinstance(module, Classifier):
        frozen, trained = _split_layers(module.body)
        return _Parts(_ClassifierBody(frozen), Classifier(trained, module.head))
    raise ConfigError(
        f"freeze=body is for models with a body and a head, and client {member.name}'s "
        f"{member.model} is none: pass fedproto.wrap(module, head=...), or a "
        "fedproto.models.Classifier"
    )


def _split_layers(body: nn.Module) -> tuple[nn.Module, nn.Sequential]:
    """Return the layers of a body that are frozen, and its projection, which is trained."""
    trained = nn.Sequential()
    if not isinstance(body, nn.Sequential) or PROJECTION not in body._modules:
        return body, trained
    frozen = nn.Sequential()
    for name, layer in body.named_children():
        (trained if name == PROJECTION else frozen).add_module(name, layer)
    return frozen, trained


class _ClassifierBody(nn.Module):
    """The body of a `Classifier`, under the names that the whole module has."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class _WrappedBody(_ClassifierBody):
    """The body of a wrapped module, whose logits are the features."""

    def __init__(self, body: nn.Module, tokens: bool) -> None:
        super().__init__(body)
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        return take_logits(self.body(x.long() if self.tokens else x))


def _split_state(state: Tree, rest: nn.Module) -> tuple[Tree, Tree]:
    """Return the frozen and the trained part of a state."""
    names = _names_of(rest)
    frozen = {name: value for name, value in state.items() if name not in names}
    trained = {name: value for name, value in state.items() if name in names}
    return frozen, trained


def _names_of(module: nn.Module) -> set[str]:
    named: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return {name for name, _ in named}


@torch.no_grad()
def _compute_features(body: nn.Module, state: Tree, x: Tensor) -> Tensor:
    """Return the features of all inputs of a pool, in eval mode."""
    body.eval()
    features = [functional_call(body, state, (part,)) for part in x.split(EVALUATION_BATCH)]
    return torch.cat(features) if features else x
