"""Files of global prototypes, by class name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedproto.config.config_file import read_run_toml
from fedproto.core import files
from fedproto.core.class_names import class_name
from fedproto.core.tensors import FLOATS
from fedproto.core.types import Tree
from fedproto.errors import DataError

PROTOTYPES, MEMBERS, UPLOAD = "prototypes.safetensors", "members.safetensors", "upload.safetensors"


START = "start.safetensors"


#: The formats of these files. members.safetensors is a file of prototypes that says, too, whose they are.
PROTOTYPES_FORMAT, UPLOAD_FORMAT = "prototypes", "upload"


VERSION = 1


@dataclass(frozen=True)
class Prototypes:
    """C̄^(j) of each class by name; `known` is 0 where a class has none."""

    classes: tuple[str, ...]
    values: Tensor  # (C, d)
    known: Tensor  # (C,)
    weighting: str | None = (
        None  # how members are weighed, where that is known: a newcomer must be weighed alike
    )

    def over(self, classes: tuple[str, ...]) -> Prototypes:
        """The same for other classes, in their order; those that have no prototype here have none there."""
        places = [
            (new, self.classes.index(name))
            for new, name in enumerate(classes)
            if name in self.classes
        ]
        to, of = (
            torch.tensor(side, dtype=torch.long)
            for side in (zip(*places, strict=True) if places else ([], []))
        )
        values, known = (
            self.values.new_zeros(len(classes), self.values.shape[1]),
            self.known.new_zeros(len(classes)),
        )
        placed = values.index_copy(0, to, self.values[of]), known.index_copy(0, to, self.known[of])
        return Prototypes(classes, *placed, self.weighting)


def read_prototypes(path: Path) -> Prototypes:
    """Of a file, or of a folder (a run, or an exported member) that holds one."""
    if path.is_dir():
        held = [path / name for name in (MEMBERS, PROTOTYPES) if (path / name).exists()]
        if not held:
            raise DataError(
                f"{path} holds no {PROTOTYPES}: name a finished run of fedproto, or such a file"
            )
        path = held[0]
    tensors, header = files.read_tensors(path, PROTOTYPES_FORMAT, VERSION, DataError)
    classes = read_class_names(header, path)
    values, known = tensors.get("prototypes"), tensors.get("known")
    if (
        values is None
        or known is None
        or values.dim() != 2
        or not len(classes) == len(values) == known.numel()
    ):
        raise DataError(
            f"{path} holds no prototypes: `prototypes` (classes, values) and `known` (classes) are wanted"
        )
    for name, value in (("prototypes", values), ("known", known)):
        if value.dtype not in FLOATS:
            raise DataError(
                f"{path} holds {name} of type {value.dtype}, where floating-point numbers are wanted"
            )
    # As models see them: a number of float64 may be infinite in float32.
    if not (
        torch.isfinite(values.float()).all()
        and torch.isin(known.float(), torch.tensor([0.0, 1.0])).all()
    ):
        raise DataError(
            f"{path} holds prototypes that are not finite, or a `known` that is neither 0 nor 1"
        )
    return Prototypes(classes, values, known, _weighting_beside(path))


def write_prototypes(path: Path, tensors: Tree, classes: Sequence[str]) -> None:
    """Write a file that `read_prototypes` reads: `prototypes` (classes, values), `known` (classes), and others."""
    files.write_tensors(path, tensors, PROTOTYPES_FORMAT, VERSION, {"classes": list(classes)})


def _weighting_beside(path: Path) -> str | None:
    """That of the run whose folder the file lies in."""
    config = path.parent / "config.toml"
    weighting = read_run_toml(config).get("algorithm.weighting") if config.exists() else None
    if weighting is not None and not isinstance(weighting, str):
        raise DataError(f"{config} has a weighting that is not text")
    return weighting


def read_class_names(header: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """The names of the classes in a file's header."""
    stated = header.get("classes")
    names: tuple[str, ...] = ()
    if isinstance(stated, list) and all(isinstance(name, str) for name in stated):
        names = tuple(class_name(name, f"{path} has a class") for name in stated)
    if not names or len(set(names)) < len(names):
        raise DataError(
            f"{path} names no classes, or one twice: `classes` in its header must list different names"
        )
    return names
