"""Builds a model from its configured text and its stored weights.

Weights may come from strangers: they are compared with the model in name, shape and type before
they are loaded, and nothing but the model's own code, which must be trusted, is executed.
"""

from __future__ import annotations

import copy
import typing
from typing import Any

import torch
from torch import nn

from fedproto.config import plugins
from fedproto.config.choices import parse_choice
from fedproto.config.options import FilePath, Part, options_of, parse
from fedproto.core import rng
from fedproto.core.tensors import FLOATS, find_mismatch
from fedproto.core.types import Tree
from fedproto.errors import ConfigError, DataError, FedProtoError
from fedproto.models import Fit
from fedproto.models.shared.wrap import prepare_module


def build_model(text: str, fit: Fit, state: Tree) -> nn.Module:
    """Return the model in eval mode with these weights, in their floating-point type.

    `text` is a model's name and options, such as `cnn(channels=18)`. Perhaps the run did not ask
    for a `dim`. Our own models are the same without it, but a plug-in may add a projection, so
    both are tried.
    """
    part = _parse_one_model(text)
    dtype = _find_dtype(state)
    mismatches = []
    for asked in (fit, fit._replace(dim=None)):
        module = _draw_model(part, asked).to(dtype).eval()
        mismatch = find_mismatch(_select_stored(module, state), state)
        if mismatch is None:
            module.load_state_dict(state, strict=False)
            return module
        mismatches.append(mismatch)
    raise DataError(f"the weights are not those of {part}: {mismatches[0]}")


def load_into_copy(module: nn.Module, state: Tree, fit: Fit | None = None) -> nn.Module:
    """Return a copy of the module on the CPU, in eval mode, with these weights.

    `fit` is what a wrapped module must fit, which has a head for other classes before a run.
    Raises DataError if the weights are not those of such a module.
    """
    loaded = copy.deepcopy(module)
    if fit is not None:
        with rng.preserve_torch_generators(torch.device("cpu")):
            loaded = prepare_module(loaded, fit)
    loaded = loaded.cpu().to(_find_dtype(state)).eval()
    mismatch = find_mismatch(_select_stored(loaded, state), state)
    if mismatch is not None:
        raise DataError(f"the weights are not those of the module: {mismatch}")
    loaded.load_state_dict(state, strict=False)
    return loaded


def _select_stored(module: nn.Module, state: Tree) -> Tree:
    """Return the module's state without the further names of layers that it holds twice.

    A run stores such a layer under its first name only; an exported folder stores all names.
    """
    first_names = {name for name, _ in module.named_parameters()}
    first_names |= {name for name, _ in module.named_buffers()}
    wanted = module.state_dict()
    return {name: wanted[name] for name in wanted if name in first_names or name in state}


def _parse_one_model(text: str) -> Part:
    """Return the only model that a text names."""
    parts = parse(text, "model")
    if len(parts) != 1 or parts[0].count is not None:
        raise ConfigError(f"{text!r} names several models, but a client has one")
    return parts[0]


def _draw_model(part: Part, fit: Fit) -> nn.Module:
    """Build a model whose weights do not matter, without changing torch's random generator."""
    with rng.preserve_torch_generators(torch.device("cpu")):
        try:
            return prepare_module(plugins.build("model", part, fit), fit)
        except FedProtoError:
            raise
        # A layer may be larger than the memory, and a plug-in may raise anything.
        except Exception as error:
            reason = first_line(error)
            raise ConfigError(f"{part} refuses inputs of shape {fit.shape}: {reason}") from error


def _find_dtype(state: Tree) -> torch.dtype:
    """Return the floating-point type of the weights; refused if no model is trained in it."""
    found = torch.float32
    for name, value in reversed(state.items()):
        if not value.is_floating_point():
            continue
        if value.dtype not in FLOATS:
            raise DataError(
                f"the weights have {name} of type {value.dtype}, in which no model is trained"
            )
        found = value.dtype
    return found


def drop_file_options(text: str) -> str:
    """Return a model's text without the options that name files: its weights are stored anyway."""
    part = _parse_one_model(text)
    known_options = options_of(plugins.find("model", part.name))
    kept = dict(part.options)
    for name, option in known_options.items():
        if _names_a_file(option.kind):
            kept.pop(name, None)
    return str(Part(part.name, kept))


def names_files(kind: str, text: str) -> bool:
    """Return whether a plug-in's text sets an option that names a file."""
    part = parse_choice(kind, text)
    known_options = options_of(plugins.find(kind, part.name))
    return any(
        _names_a_file(option.kind) and part.options.get(name) is not None
        for name, option in known_options.items()
    )


def _names_a_file(kind: Any) -> bool:
    if isinstance(kind, FilePath):
        return True
    return any(_names_a_file(inner) for inner in typing.get_args(kind))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's first cause: exporters wrap it in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".!")
