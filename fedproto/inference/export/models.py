"""A model built again of its name and its weights, as it will be where an exported folder is read."""

from __future__ import annotations

import math
import typing
from typing import Any

import torch
from torch import Tensor, nn

from fedproto.config import plugins
from fedproto.config.options import FilePath, Part, options_of, parse
from fedproto.core import rng
from fedproto.core.tensors import FLOATS, find_mismatch
from fedproto.core.types import Tree
from fedproto.errors import ConfigError, DataError, FedProtoError
from fedproto.inference.trained_client import Trained
from fedproto.models import Fit


def _one_part(text: str) -> Part:
    parts = parse(text, "model")
    if len(parts) != 1 or parts[0].count is not None:
        raise ConfigError(f"{text!r} names several models, and a member has one")
    return parts[0]


def built(model: str, fit: Fit, state: Tree) -> nn.Module:
    """The architecture with these weights, in eval mode; of the type that the weights have.

    `dim` was perhaps not asked for when the model was trained; ours do not care, but one from outside may project then.
    """
    part, misfits = _one_part(model), []
    for asked in (fit, fit._replace(dim=None)):
        module = _drawn(part, asked).to(_dtype(state)).eval()
        odd = find_mismatch(module.state_dict(), state)
        if odd is None:
            module.load_state_dict(state)
            return module
        misfits.append(odd)
    raise DataError(f"the weights are not those of {part}: {misfits[0]}")


def _drawn(part: Part, fit: Fit) -> nn.Module:
    """A model with weights of no meaning, whose drawing leaves torch's generator as it was."""
    with rng.preserve_torch_generators(torch.device("cpu")):
        try:
            return plugins.build("model", part, fit)
        except FedProtoError:
            raise
        except (
            Exception
        ) as error:  # a layer larger than the memory, or whatever a model from outside may raise
            raise ConfigError(
                f"{part} refuses inputs of shape {fit.shape}: {first_line(error)}"
            ) from error


def _dtype(state: Tree) -> torch.dtype:
    """The type of the weights, which must be one that models are trained with."""
    for name, value in state.items():
        if value.is_floating_point() and value.dtype not in FLOATS:
            raise DataError(
                f"the weights have {name} of type {value.dtype}, in which no model is trained"
            )
    return next(
        (value.dtype for value in state.values() if value.is_floating_point()), torch.float32
    )


def tried(member: Trained) -> tuple[Tensor, Tensor]:
    """Features and logits of two inputs that any model takes: between 0 and 1, so that they are ids of words, too."""
    shape = member.preprocessing.shape
    try:
        return member.see_prepared(torch.linspace(0, 1, 2 * math.prod(shape)).reshape(2, *shape))
    except Exception as error:  # of any kind: the model may be from outside
        raise DataError(
            f"the model fails on inputs of shape {shape}: {first_line(error)}"
        ) from error


def close(a: Tensor, b: Tensor) -> bool:
    """Up to the order of sums, which may change with the way that weights lie in memory."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def without_files(text: str) -> str:
    """The text of a model less the options that name files: its weights are exported, and need no others."""
    part = _one_part(text)
    options = options_of(plugins.find("model", part.name))
    named = {name for name, option in options.items() if _names_a_file(option.kind)}
    return str(
        Part(part.name, {name: value for name, value in part.options.items() if name not in named})
    )


def _names_a_file(kind: Any) -> bool:
    return isinstance(kind, FilePath) or any(map(_names_a_file, typing.get_args(kind)))


def first_line(error: BaseException) -> str:
    """Of where it began: the exporter wraps it in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
