"""An algorithm with what the settings put around it: transforms of uploads."""

from __future__ import annotations

from collections.abc import Sequence

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.federation import Federation
from fedproto.core.transforms import Transform, with_transforms
from fedproto.core.types import Algorithm


def build_transforms(parts: Sequence[Part]) -> list[Transform]:
    """Return the transforms that the settings name, in their order."""
    return [plugins.build("transform", part) for part in parts]


def transform_uploads(
    algorithm: Algorithm, transforms: Sequence[Transform], federation: Federation
) -> Algorithm:
    """Return the algorithm with its uploads transformed.

    Federations that one engine trains together declare uploads of the same shapes, so any of them
    will do.
    """
    if not transforms:
        return algorithm
    layouts = algorithm.declare(federation.members[0].initial, federation.task)
    return with_transforms(algorithm, transforms, layouts)
