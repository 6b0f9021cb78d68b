"""Files of a closed-form teacher after training: its solution, by class name.

RUN/teacher.safetensors  the teacher of a run, and of its clients that have not left since

An exported client has such a file, too. What each client adds is its own weight of the teacher,
which is kept with its model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedproto.config import plugins
from fedproto.config.settings import Config
from fedproto.core.closed_form import TEACHER, judge
from fedproto.core.files import TensorFormat, read_tensors, write_tensors
from fedproto.core.tensors import FLOATS
from fedproto.core.types import Algorithm, State, Tree
from fedproto.errors import DataError
from fedproto.runs.fixed_features import AUTO_MAP
from fedproto.runs.prototype_files import read_class_names

if TYPE_CHECKING:
    from fedproto.runs.experiment import Experiment

TEACHER_FILE = "teacher.safetensors"
TEACHER_FORMAT = TensorFormat("teacher", 1, DataError)


@dataclass(frozen=True, eq=False)
class SolvedTeacher:
    """A linear classifier over a feature map, as a server has solved it."""

    classes: tuple[str, ...]
    vectors: Tensor  # (C, D)
    bias: Tensor  # (C,)
    known: Tensor  # (C,) 0 where nobody had rows of the class
    feature_map: str  # its name and options, such as `random-conv(filters=64)`
    scale: float  # see `closed_form.Teacher`
    is_alone: bool  # whether no model was trained beside it
    left: tuple[str, ...] = ()  # clients without whose rows it was solved again

    def score(self, features: Tensor) -> Tensor:
        """Return the scores (n, C) of features (n, D), on the CPU in float32.

        Those of unknown classes mean nothing.
        """
        vectors = self.vectors.to(features.device)
        scores = features.to(vectors) @ vectors.T + self.bias.to(vectors)
        return scores.float().cpu()

    def known_classes(self) -> list[str]:
        """Return the classes of which somebody had rows."""
        flags = zip(self.classes, self.known.tolist(), strict=True)
        return [name for name, is_known in flags if is_known]

    def select(self, scores: Tensor, names: Sequence[str]) -> Tensor:
        """Return scores (n, C) in the order of these known classes: (n, names)."""
        return scores[:, [self.classes.index(name) for name in names]]

    def judge(self, scores: Tensor, names: Sequence[str]) -> Tensor:
        """Return log-probabilities (n, names), to be added to those of others.

        Classes that the teacher does not know count as the least likely one that it knows.
        """
        others = [name for name in names if name not in self.classes]
        places = {name: place for place, name in enumerate((*self.classes, *others))}
        masked = scores.masked_fill(self.known.cpu() == 0, -torch.inf)
        nothing = scores.new_full((len(scores), len(others)), -torch.inf)
        opinion = judge(torch.cat([masked, nothing], 1), self.scale)
        return opinion[:, [places[name] for name in names]]


def take_teacher(
    config: Config, algorithm: Algorithm, server: State, classes: Sequence[str]
) -> SolvedTeacher | None:
    """Return the teacher that a server of a run has solved; None if the run has none."""
    own = server.get(TEACHER)
    if not isinstance(own, dict):
        return None
    scale = 1.0
    if config.teacher:
        scale = float(plugins.build("teacher", config.teacher[0]).scale)
    (feature_map,) = config.feature_map or (AUTO_MAP,)
    return SolvedTeacher(
        classes=tuple(classes),
        vectors=own["vectors"].cpu(),
        bias=own["bias"].cpu(),
        known=(own["counts"] > 0).to(own["vectors"]).cpu(),
        feature_map=str(feature_map),
        scale=scale,
        is_alone=not algorithm.phases,
    )


def teacher_of(experiment: Experiment) -> SolvedTeacher | None:
    """Return the teacher of an experiment as it is now; None if it has none."""
    return take_teacher(
        experiment.config,
        experiment.algorithm,
        experiment.progress.server,
        experiment.federation.classes,
    )


def weight_of(kept: State) -> float:
    """Return the weight that a client which keeps this beside its model gives the teacher."""
    own = kept.get(TEACHER, {})
    assert isinstance(own, dict), "the teacher's part of a client's state is a tree"
    return float(own["weight"]) if "weight" in own else 1.0


def write_teacher(path: Path, teacher: SolvedTeacher) -> None:
    """Write a file that `read_teacher` reads."""
    tensors = {"vectors": teacher.vectors, "bias": teacher.bias, "known": teacher.known}
    header = {
        "classes": list(teacher.classes),
        "feature_map": teacher.feature_map,
        "scale": teacher.scale,
        "is_alone": teacher.is_alone,
        "left": list(teacher.left),
    }
    write_tensors(path, tensors, TEACHER_FORMAT, header)


def read_teacher(path: Path) -> SolvedTeacher | None:
    """Return the teacher in a file, or in a folder; None if the folder has none.

    DataError says what is wrong with the file, which may come from anybody. A feature map of a
    module of its own is refused unless it is trusted.
    """
    if path.is_dir():
        path = path / TEACHER_FILE
        if not path.exists():
            return None
    tensors, header = read_tensors(path, TEACHER_FORMAT)
    classes = read_class_names(header, path)
    _check_tensors(tensors, len(classes), path)
    _check_header(header, path)
    plugins.refuse_plugins({"feature_map": header["feature_map"]}, path)
    return SolvedTeacher(
        classes=classes,
        vectors=tensors["vectors"],
        bias=tensors["bias"],
        known=tensors["known"],
        feature_map=header["feature_map"],
        scale=float(header["scale"]),
        is_alone=header["is_alone"],
        left=tuple(header["left"]),
    )


def without_clients(teacher: SolvedTeacher, solution: Tree, left: Sequence[str]) -> SolvedTeacher:
    """Return a teacher as it was solved again without some clients.

    solution  `vectors`, `bias` and `counts`, as the server keeps them
    """
    return replace(
        teacher,
        vectors=solution["vectors"],
        bias=solution["bias"],
        known=(solution["counts"] > 0).to(solution["vectors"]),
        left=tuple(left),
    )


def _check_tensors(tensors: Tree, classes: int, path: Path) -> None:
    """Refuse tensors that are not a teacher's: vectors (C, D), bias (C,) and known (C,)."""
    sizes = tuple(tensors["vectors"].shape) if "vectors" in tensors else ()
    width = sizes[1] if len(sizes) == 2 else 0
    shapes = {"vectors": (classes, width), "bias": (classes,), "known": (classes,)}
    for name, shape in shapes.items():
        value = tensors.get(name)
        is_valid = value is not None and tuple(value.shape) == shape and value.dtype in FLOATS
        if not is_valid or value is None or not torch.isfinite(value.float()).all():
            raise DataError(
                f"{path} holds no teacher: `vectors` (classes, values), `bias` (classes) and "
                "`known` (classes) of finite numbers are required"
            )


def _check_header(header: dict[str, Any], path: Path) -> None:
    """Refuse a header that does not say how the teacher is used."""
    feature_map = header.get("feature_map")
    if not isinstance(feature_map, str) or not feature_map or "\n" in feature_map:
        raise DataError(f"{path} names no feature map: `feature_map` must be a name with options")
    scale: Any = header.get("scale")
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not 0 < scale < math.inf:
        raise DataError(f"{path} has a scale that is not a positive number")
    if not isinstance(header.get("is_alone"), bool):
        raise DataError(f"{path} does not say whether the teacher is alone: true or false")
    left = header.get("left")
    if not isinstance(left, list) or not all(isinstance(name, str) for name in left):
        raise DataError(f"{path} does not say which clients have left: a list of names")
