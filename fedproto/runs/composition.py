"""An algorithm with what the settings put around it: a teacher, transforms, and a combiner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.architectures import within_architectures
from fedproto.core.closed_form import with_teacher
from fedproto.core.combination import Combiner, with_combiner
from fedproto.core.federation import Federation
from fedproto.core.transform_chains import find_recoding, with_transforms
from fedproto.core.transforms import Transform
from fedproto.core.types import Algorithm, GroupLayout
from fedproto.errors import ConfigError
from fedproto.privacy.conditions import refuse_federation, refuse_settings
from fedproto.privacy.mechanism import protect
from fedproto.privacy.planning import plan_privacy
from fedproto.privacy.step_costs import (
    StepCount,
    count_private_steps,
    refuse_unprotected_training,
    releases_records,
)
from fedproto.privacy.training_plan import plan_training
from fedproto.runs.scheduling import build_schedule
from fedproto.runs.training_settings import training_of


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
        if combiner.summation is not None:
            refuse_single_uploads(combiner.summation.name, config.buffer, algorithm, transforms)
        if config.privacy != "none":
            refuse_settings(config)
        return cls(algorithm, transforms, combiner)

    def compose(self, federations: Sequence[Federation], configs: Sequence[Config]) -> Algorithm:
        """Return the algorithm with its uploads made private, transformed and combined.

        A client clips and adds noise, then come its parts of transforms. The server combines
        uploads, then come the server parts of transforms, then noise, then the algorithm.
        Federations that one engine trains together declare uploads of the same shapes, so any of
        them will do. Each architecture has a server of its own, for all but class-level values.
        """
        federation = federations[0]
        task = federation.task
        summation = self.combiner.summation
        if federation.architectures and summation is not None:
            raise ConfigError(
                f"{self.algorithm.name} shares weights within each architecture, so their groups "
                f"would tell which one a client has: {summation.name} needs clients of one model, "
                "or an algorithm that shares prototypes only"
            )
        if not federation.architectures:
            layouts = self.algorithm.declare(federation.members[0].initial, task)
            algorithm = self._protect(layouts, federations, configs)
            return self._wrap(algorithm, algorithm.declare(federation.members[0].initial, task))
        methods = {}
        layouts_of = {}
        clients = {}
        for name, members in federation.architectures.items():
            layouts = self.algorithm.declare(members[0].initial, task)
            algorithm = self._protect(layouts, federations, configs)
            layouts_of[name] = algorithm.declare(members[0].initial, task)
            methods[name] = self._wrap(algorithm, layouts_of[name])
            clients[name] = len(members)
        return within_architectures(methods, layouts_of, clients)

    def _protect(
        self,
        layouts: Mapping[str, GroupLayout],
        federations: Sequence[Federation],
        configs: Sequence[Config],
    ) -> Algorithm:
        """Return the algorithm whose uploads are private, if the settings ask for it."""
        if configs[0].privacy == "none":
            return self.algorithm
        schedules = []
        for config, federation in zip(configs, federations, strict=True):
            refuse_federation(config, federation, list(layouts))
            clients = len(federation.members)
            schedules.append((build_schedule(config, clients), clients))
        if configs[0].privacy != "training":
            plan = plan_privacy(configs[0], self.algorithm, list(layouts), schedules)
            return replace(protect(self.algorithm, plan.protection, layouts), privacy=plan)
        has_releases = releases_records(self.algorithm, layouts)
        counts = self._count_private_steps(federations, configs)
        plan = plan_training(configs[0], self.algorithm, has_releases, schedules, counts)
        protected = self.algorithm
        if has_releases:
            protected = protect(self.algorithm, plan.protection, layouts)
        return replace(protected, privacy=plan)

    def _count_private_steps(
        self, federations: Sequence[Federation], configs: Sequence[Config]
    ) -> list[list[StepCount]]:
        """Return the steps of a round, by federation and client; ConfigError if one is unprotected.

        All clients count, of whatever architecture.
        """
        counts = []
        for config, federation in zip(configs, federations, strict=True):
            training = training_of(config)
            regularise = str(config.algorithm.options.get("regularise"))
            of_federation = []
            for member in federation.members:
                refuse_unprotected_training(member, self.algorithm, training, regularise)
                of_federation.append(count_private_steps(member, self.algorithm, training))
            counts.append(of_federation)
        return counts

    def _wrap(self, algorithm: Algorithm, layouts: Mapping[str, GroupLayout]) -> Algorithm:
        """Return the algorithm of one architecture, whose uploads are transformed and combined."""
        if self.combiner.summation is not None:
            refuse_recoding(self.combiner.summation.name, self.transforms, layouts)
        transformed = with_transforms(algorithm, self.transforms, layouts)
        return with_combiner(transformed, self.combiner)


def refuse_single_uploads(
    name: str, buffer: int, algorithm: Algorithm, transforms: Sequence[Transform]
) -> None:
    """Raise ConfigError if something needs single uploads, which a summation hides.

    name    of the summation
    buffer  uploads of an asynchronous round; 0: rounds are synchronous
    """
    if buffer:
        raise ConfigError(
            f"{name} adds the uploads of all clients of a round, and asynchronous rounds take them "
            "one by one: leave buffer out, or the combiner"
        )
    if algorithm.keeps_once_singly:
        raise ConfigError(
            f"individual needs the sums of single clients, which {name} hides from the server: "
            "set individual=0"
        )
    for transform in transforms:
        if transform.server is not None and transform.needs == "each":
            raise ConfigError(
                f"transform {transform.name} needs single uploads, which {name} hides from the "
                "server: leave one of them out"
            )


def refuse_recoding(
    name: str, transforms: Sequence[Transform], layouts: Mapping[str, GroupLayout]
) -> None:
    """Raise ConfigError if a transform makes something of the values that cannot be added."""
    recoding = find_recoding(transforms, layouts)
    if recoding is not None:
        raise ConfigError(
            f"transform {recoding} sends codes or single values, which cannot be added as they "
            f"are, and {name} sends all values in fixed point: leave one of them out"
        )


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
