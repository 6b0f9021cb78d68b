"""An algorithm with what the settings put around it: a teacher, transforms, and a combiner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.architectures import within_architectures
from fedproto.core.closed_form import with_teacher
from fedproto.core.combination import Combiner, with_combiner
from fedproto.core.federation import Federation
from fedproto.core.transform_chains import with_transforms
from fedproto.core.transforms import Transform
from fedproto.core.types import Algorithm, GroupLayout
from fedproto.errors import ConfigError


class Method(NamedTuple):
    """What the settings choose, before the federation is known."""

    algorithm: Algorithm  # with its teacher
    transforms: list[Transform]  # in the order in which a client applies them
    combiner: Combiner

    @classmethod
    def build(cls, config: Config) -> Method:
        """Return what the settings choose; ConfigError if it cannot be meant together."""
        algorithm = plugins.build("algorithm", config.algorithm)
        if config.teacher:
            algorithm = add_teacher(algorithm, config.teacher[0])
        _refuse_idle_map(config, algorithm)
        transforms = [plugins.build("transform", part) for part in config.transform]
        combiner = plugins.build("combiner", config.combiner)
        with_combiner(algorithm, combiner)  # refuses before data is read what does not fit
        return cls(algorithm, transforms, combiner)

    def compose(self, federation: Federation) -> Algorithm:
        """Return the algorithm with its uploads transformed and combined.

        The server combines uploads, then come the server parts of transforms, then the algorithm.
        Federations that one engine trains together declare uploads of the same shapes, so any of
        them will do. Each architecture has a server of its own, for all but class-level values.
        """
        if not federation.architectures:
            layouts = self.algorithm.declare(federation.members[0].initial, federation.task)
            return self._wrap(layouts)
        methods = {}
        layouts_of = {}
        clients = {}
        for name, members in federation.architectures.items():
            layouts_of[name] = self.algorithm.declare(members[0].initial, federation.task)
            methods[name] = self._wrap(layouts_of[name])
            clients[name] = len(members)
        return within_architectures(methods, layouts_of, clients)

    def _wrap(self, layouts: Mapping[str, GroupLayout]) -> Algorithm:
        """Return the algorithm of one architecture, whose uploads are transformed and combined."""
        transformed = with_transforms(self.algorithm, self.transforms, layouts)
        return with_combiner(transformed, self.combiner)


def add_teacher(algorithm: Algorithm, teacher: Part) -> Algorithm:
    """Return the algorithm with a teacher beside it; ConfigError if it is one itself."""
    if algorithm.uses_fixed:
        raise ConfigError(
            f"algorithm {algorithm.name} is a closed form itself, so it takes no teacher: leave "
            "teacher out"
        )
    return with_teacher(algorithm, plugins.build("teacher", teacher))


def _refuse_idle_map(config: Config, algorithm: Algorithm) -> None:
    """Refuse a feature map that nothing uses."""
    if config.feature_map and not algorithm.uses_fixed:
        raise ConfigError(
            f"feature_map is {config.feature_map[0].name}, but {algorithm.name} has no use for "
            "it: name a teacher, such as lda, or leave feature_map out"
        )
