"""Builds the clients' modules: each architecture once, with the weights its clients start from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core import rng
from fedproto.core.dropout import Dropped, hand_in_dropout
from fedproto.core.federation import Examples, Member
from fedproto.core.types import Tree
from fedproto.errors import ConfigError, FedProtoError
from fedproto.models import Fit, load_body
from fedproto.models.shared.wrap import Wrapped, prepare_module


def draw_model(model: Part, fit: Fit, seed: int, *client: int) -> nn.Module:
    """Build a model with drawn initial weights.

    They depend on the seed and the architecture, or with `client` on the client, too. The state of
    torch's own generators stays as it was.
    """
    with _seeded_draws(seed, *client):
        try:
            return prepare_module(plugins.build("model", model, fit), fit)
        except FedProtoError:
            raise
        except Exception as error:
            # A layer larger than the memory, or anything that a model from outside may raise.
            lines = str(error).splitlines() or [type(error).__name__]
            raise ConfigError(f"model {model} cannot be built: {lines[0]}") from error


@contextmanager
def _seeded_draws(seed: int, *client: int) -> Iterator[None]:
    """Draw initial weights that depend on the seed, and with `client` on the client."""
    with rng.preserve_torch_generators(torch.device("cpu")):
        rng.seed_torch_generators(int(rng.key(seed, "initial weights", *client)))
        yield


def copy_state(module: nn.Module) -> Tree:
    """Return copies of the module's parameters and buffers by name.

    A layer that the module holds twice appears once, under its first name.
    """
    first_names = {name for name, _ in module.named_parameters()}
    first_names |= {name for name, _ in module.named_buffers()}
    state: Tree = {}
    for name, value in module.state_dict().items():
        if name in first_names:
            state[name] = value.detach().clone()
    return state


class ClientModule(NamedTuple):
    """What a client needs of its architecture."""

    module: nn.Module  # shared by all clients of the architecture
    dropped: tuple[Dropped, ...]  # its dropout layers, whose draws are handed in
    initial: Tree  # the state the client starts from


class ModuleBuilder:
    """Builds each architecture once.

    Its clients share the module and, unless `start` is own, the initial weights. An architecture
    is the text of a model, or a module from Python, with the shape of its inputs.

    Args:
        dim: the size that all embeddings must have; None: any, if all agree.
        classes: the number of classes of the federation, and so of logits.
        seed: of the run.
        device, dtype: where modules live and what they compute in.
        start: `shared`, or `own` for weights that each client draws for itself.
        weights: a file with the weights of all bodies, instead of drawn ones.
    """

    def __init__(
        self,
        dim: int | None,
        classes: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        start: str,
        weights: Path | None,
    ) -> None:
        self.dim = dim
        self.classes = classes
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self.start = start
        self.weights = weights
        self._built: dict[Any, ClientModule] = {}
        self._dims: dict[nn.Module, int] = {}
        self._projecting: set[nn.Module] = set()  # the modules whose embedding follows `dim`

    def build(
        self, model: Part | nn.Module, examples: Examples, client: int, name: str
    ) -> ClientModule:
        """Return a client's module and initial state; the client has a number and a name.

        A new architecture is tried on some of the client's examples; ConfigError says what is
        wrong with it.
        """
        shape = tuple(examples.x.shape[1:])
        identity = str(model) if isinstance(model, Part) else id(model)
        architecture = (identity, shape)
        if architecture not in self._built:
            self._built[architecture] = self._build_architecture(model, examples, name)
        built = self._built[architecture]
        if self.start == "own" and isinstance(model, Part):
            own = self._draw(model, shape, client).to(self.device, self.dtype)
            return built._replace(initial=self._initial_state(own))
        return built

    def agree_on_dim(self, members: Sequence[Member]) -> int:
        """Return the size of the embedding, which must be the same for all members."""
        first = members[0]
        first_dim = self._dims[first.module]
        for member in members:
            dim = self._dims[member.module]
            if self.dim is not None and dim != self.dim:
                raise ConfigError(
                    f"dim is {self.dim}, but client {member.name}'s {member.model} embeds in {dim} "
                    "values: a model of your own must project to `dim` itself"
                )
            if dim != first_dim:
                raise ConfigError(
                    f"client {first.name}'s {first.model} embeds in {first_dim} values but client "
                    f"{member.name}'s {member.model} in {dim}: {self._advise_dim(first, member)}"
                )
        return first_dim

    def _advise_dim(self, first: Member, other: Member) -> str:
        """Say how the embeddings of two members can get one length.

        Models that come with the package project to `dim`; a user's own give what they give.
        """
        own = [member for member in (first, other) if member.module not in self._projecting]
        if not own:
            return "set dim, and models project to it"
        if len(own) == 2:
            return "all embeddings must have one length, and models of your own are not projected"
        built_in = other if own[0] is first else first
        return f"set dim to {self._dims[own[0].module]}, and {built_in.model} projects to it"

    def _build_architecture(
        self, model: Part | nn.Module, examples: Examples, client: str
    ) -> ClientModule:
        if isinstance(model, Part):
            module = self._draw(model, tuple(examples.x.shape[1:]))
        else:
            module = copy.deepcopy(model)  # the user's own keeps its type, device and mode
            with _seeded_draws(self.seed):
                module = prepare_module(module, self._fit(tuple(examples.x.shape[1:])))
        module = module.to(self.device, self.dtype)
        _separate_repeated_layers(module, set())
        dim = self._probe_dim(module, examples, client)
        initial = self._initial_state(module)
        one_input = examples.x[examples.rows[:1]]
        with _explain_training_errors(client):
            module, dropped = hand_in_dropout(module, one_input)
        self._dims[module] = dim
        is_built_in = isinstance(model, Part) and not plugins.is_outside("model", model.name)
        if is_built_in or isinstance(module, Wrapped):
            self._projecting.add(module)
        return ClientModule(module, dropped, initial)

    def _draw(self, model: Part, shape: tuple[int, ...], *client: int) -> nn.Module:
        return draw_model(model, self._fit(shape), self.seed, *client)

    def _fit(self, shape: tuple[int, ...]) -> Fit:
        return Fit(shape, self.classes, self.dim)

    def _initial_state(self, module: nn.Module) -> Tree:
        """Return the module's state, with the body of the file of weights if there is one."""
        state = copy_state(module)
        return state if self.weights is None else load_body(state, self.weights)

    def _probe_dim(self, module: nn.Module, examples: Examples, client: str) -> int:
        """Return the size of the module's embedding, or refuse one that breaks the contract."""
        inputs = examples.x[examples.rows[:2]]
        try:
            with torch.no_grad():
                outputs = module.eval()(inputs)
            if _has_logits_only(outputs):
                raise TypeError(
                    "it returns logits only; if it ends in a linear layer, such as `fc`, "
                    'pass fedproto.wrap(module, head="fc")'
                )
            features, logits = outputs
            _refuse_odd_outputs(features, logits, len(inputs))
            dim = features.shape[1]
            classes = logits.shape[1]
            if isinstance(module, Wrapped) and not module.ends_in_head(inputs):
                raise ValueError(
                    f"{module.name} does not return what its layer {module.head_name!r} makes; "
                    "wrap needs the last layer, whose outputs are the logits"
                )
        except Exception as error:
            shape = tuple(inputs.shape[1:])
            raise ConfigError(
                f"client {client}'s model must take a batch of inputs of shape {shape} and return "
                f"(features, logits), one row per sample: {error}"
            ) from error
        if classes != self.classes:
            raise ConfigError(
                f"client {client}'s model gives {classes} logits for {self.classes} classes"
            )
        return dim


def _has_logits_only(outputs: Any) -> bool:
    """Return whether a module gave one tensor, or an object or mapping with `logits`."""
    if isinstance(outputs, Mapping):
        return "logits" in outputs
    return isinstance(outputs, Tensor) or hasattr(outputs, "logits")


def _refuse_odd_outputs(features: Tensor, logits: Tensor, samples: int) -> None:
    """Raise where a model's outputs are not two matrices of floats with one row per sample."""
    feature_rows, _ = features.shape
    logit_rows, _ = logits.shape
    if feature_rows != samples or logit_rows != samples:
        raise ValueError(f"{feature_rows} and {logit_rows} rows came back for {samples} samples")
    if not (features.is_floating_point() and logits.is_floating_point()):
        raise TypeError(f"features are {features.dtype} and logits {logits.dtype}")


@contextmanager
def _explain_training_errors(client: str) -> Iterator[None]:
    """Turn anything that a model may raise into one sentence."""
    try:
        yield
    except FedProtoError:
        raise
    except Exception as error:
        raise ConfigError(
            f"client {client}'s model cannot be trained: {type(error).__name__}: {error}"
        ) from error


def _separate_repeated_layers(parent: nn.Module, seen: set[int]) -> None:
    """Turn a layer that is there twice into two layers with the same parameters.

    `functional_call` would put back its parameters twice, the second time those it had put in.
    """
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        if id(child) in seen:
            child = _copy_layer(child)
            setattr(parent, name, child)
        seen.add(id(child))
        _separate_repeated_layers(child, seen)


def _copy_layer(layer: nn.Module) -> nn.Module:
    """Return a second layer that holds the same parameters, buffers and children."""
    twin = copy.copy(layer)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(twin)[name] = dict(vars(layer)[name])
    return twin
