"""Files of global prototypes, by class name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedproto.config.config_file import read_run_toml
from fedproto.core import files
from fedproto.core.class_names import class_name
from fedproto.core.prototypes import DEFAULT_TAU, Tau
from fedproto.core.tensors import FLOATS
from fedproto.core.types import State, Tree
from fedproto.errors import DataError

# File names. A file of members is a file of prototypes that also says whose they are.
PROTOTYPES = "prototypes.safetensors"
MEMBERS = "members.safetensors"
UPLOAD = "upload.safetensors"
START = "start.safetensors"

PROTOTYPES_FORMAT = files.TensorFormat("prototypes", 1, DataError)
UPLOAD_FORMAT = files.TensorFormat("upload", 2, DataError)


@dataclass(frozen=True)
class Prototypes:
    """The global prototype C̄^(j) of each class by name; `known` is 0 where a class has none."""

    classes: tuple[str, ...]
    values: Tensor  # (C, d)
    known: Tensor  # (C,)
    #: How uploads are weighted, where that is known: a newcomer's must be weighted the same way.
    weighting: str | None = None
    tau: Tau = DEFAULT_TAU  # of the prediction by both prototypes and head

    def over(self, classes: tuple[str, ...]) -> Prototypes:
        """Return the prototypes of other classes, in their order; unknown ones have none."""
        new_rows = []
        own_rows = []
        for row, name in enumerate(classes):
            if name in self.classes:
                new_rows.append(row)
                own_rows.append(self.classes.index(name))
        target = torch.tensor(new_rows, dtype=torch.long)
        source = torch.tensor(own_rows, dtype=torch.long)
        no_values = self.values.new_zeros(len(classes), self.values.shape[1])
        none_known = self.known.new_zeros(len(classes))
        values = no_values.index_copy(0, target, self.values[source])
        known = none_known.index_copy(0, target, self.known[source])
        return Prototypes(classes, values, known, self.weighting, self.tau)


def take_prototypes(state: State) -> Tree:
    """Return the `prototypes` and which are `known` of what a server keeps or sends; {} if none."""
    names = ("prototypes", "known")
    if any(name not in state for name in names):
        return {}
    return {name: state[name].cpu() for name in names}


def read_prototypes(path: Path) -> Prototypes:
    """Read the prototypes of a file, or of a folder (a run, or an exported member) with one.

    In a folder with members.safetensors these are the prototypes after the latest change of the
    members. DataError says what is wrong with the file, which may come from anybody.
    """
    if path.is_dir():
        path = _find_prototypes(path)
    tensors, header = files.read_tensors(path, PROTOTYPES_FORMAT)
    classes = read_class_names(header, path)
    values, known = _check_prototypes(tensors, len(classes), path)
    config = path.parent / "config.toml"
    settings = read_run_toml(config) if config.exists() else {}
    weighting = _read_weighting(settings, config)
    return Prototypes(classes, values, known, weighting, _read_tau(settings, config))


def write_prototypes(
    path: Path, tensors: Tree, classes: Sequence[str], clients: Sequence[str] = ()
) -> None:
    """Write a file that `read_prototypes` reads.

    `tensors` holds `prototypes` (classes, values), `known` (classes), and possibly others;
    `clients` are the names of those whose own prototypes are among these, in order.
    """
    header = {"classes": list(classes)}
    if clients:
        header["clients"] = list(clients)
    files.write_tensors(path, tensors, PROTOTYPES_FORMAT, header)


def read_class_names(header: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the names of the classes in a file's header, checked."""
    stated = header.get("classes")
    names: tuple[str, ...] = ()
    if isinstance(stated, list) and all(isinstance(name, str) for name in stated):
        names = tuple(class_name(name, f"{path} has a class") for name in stated)
    if not names or len(set(names)) < len(names):
        raise DataError(
            f"{path} names no classes, or one twice: `classes` in its header must list different "
            "names"
        )
    return names


def _find_prototypes(folder: Path) -> Path:
    """Return the newest file of prototypes in a folder."""
    for name in (MEMBERS, PROTOTYPES):
        if (folder / name).exists():
            return folder / name
    raise DataError(
        f"{folder} holds no {PROTOTYPES}: name a finished run of fedproto, or such a file"
    )


def _check_prototypes(tensors: Tree, classes: int, path: Path) -> tuple[Tensor, Tensor]:
    """Return the prototypes (classes, values) and which of them are known (classes).

    Raises DataError where shapes, types or values are not those of prototypes.
    """
    values = tensors.get("prototypes")
    known = tensors.get("known")
    if (
        values is None
        or known is None
        or values.dim() != 2
        or len(values) != classes
        or known.numel() != classes
    ):
        raise DataError(
            f"{path} holds no prototypes: `prototypes` (classes, values) and `known` (classes) are "
            "required"
        )
    for name, value in (("prototypes", values), ("known", known)):
        if value.dtype not in FLOATS:
            raise DataError(
                f"{path} holds {name} of type {value.dtype}; floating-point numbers are required"
            )
    # As models see them: a float64 may be infinite in float32.
    are_finite = torch.isfinite(values.float()).all()
    flags = torch.tensor([0.0, 1.0])
    are_flags = torch.isin(known.float(), flags).all()
    if not (are_finite and are_flags):
        raise DataError(
            f"{path} holds prototypes that are not finite, or a `known` that is neither 0 nor 1"
        )
    return values, known


def _read_weighting(settings: Mapping[str, Any], config: Path) -> str | None:
    """Return how the run whose settings these are weights uploads; None if there is no run."""
    weighting = settings.get("algorithm.weighting")
    if weighting is not None and not isinstance(weighting, str):
        raise DataError(f"{config} has a weighting that is not text")
    return weighting


def _read_tau(settings: Mapping[str, Any], config: Path) -> Tau:
    """Return the τ of the run whose settings these are; the default if it has none."""
    options = {}
    for name in ("tau", "tau_unit"):
        if f"algorithm.{name}" in settings:
            options[name] = settings[f"algorithm.{name}"]
    tau = Tau.of(options)
    if not is_tau(tau):
        raise DataError(f"{config} has a tau that is not a positive number, or has another unit")
    return tau


def is_tau(tau: Tau) -> bool:
    """Return whether what a file states is a τ: a positive number and its unit."""
    is_number = isinstance(tau.value, (int, float)) and not isinstance(tau.value, bool)
    return is_number and 0 < tau.value < math.inf and tau.unit in ("relative", "absolute")
