"""What private steps of training cost, and which algorithms they protect completely."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedproto.core.batches import Training, count_round_steps, has_batch_norm
from fedproto.core.entropy import Entropy
from fedproto.core.federation import Member
from fedproto.core.private_steps import PrivateSteps, sampling_rate
from fedproto.core.types import Algorithm, GroupLayout, same_state
from fedproto.errors import ConfigError
from fedproto.privacy.accounting import Release

#: The algorithms whose uploads are class means, of which each record is in one.
CLASS_MEANS = ("fedproto", "fedproto-mh")


class StepCount(NamedTuple):
    """The steps of a client in a round."""

    steps: int
    rate: float  # the probability with which a step takes a record

    def releases(self, noise: float, rounds: int = 1) -> list[Release]:
        """Return what the steps of some rounds release, for the accountant."""
        return [Release(noise, rounds * self.steps, self.rate)] if self.steps * rounds else []


@dataclass(frozen=True)
class StepPlan:
    """How the steps of a run are protected, and how many there are.

    noise   standard deviation / clip
    clip    the largest length of a record's gradient; None: any, and there must be no noise
    seeded  whether draws can be repeated, so that nothing is private
    counts  by federation and client
    """

    noise: float
    clip: float | None
    seeded: bool
    counts: Sequence[Sequence[StepCount]]

    def private_steps(self) -> PrivateSteps:
        """Return what the engines are given."""
        norm = math.inf if self.clip is None else self.clip
        return PrivateSteps(norm, self.noise, Entropy(seed=0 if self.seeded else None))


def count_private_steps(member: Member, algorithm: Algorithm, training: Training) -> StepCount:
    """Return the steps of a client in one round, and how records are drawn for them.

    All its steps count, also if the client is slow and takes half of them.
    """
    steps = count_round_steps(member, algorithm, training)
    return StepCount(steps, sampling_rate(training.batch, len(member.train)))


def refuse_unprotected_training(
    member: Member, algorithm: Algorithm, training: Training, regularise: str = "sample"
) -> None:
    """Raise ConfigError if something else than private steps reads a client's records.

    What an algorithm uploads of records, such as prototypes, is not looked at here: it is a release
    of its own.

    regularise  the option of this name of the algorithm, if it has one
    """
    name = algorithm.name
    if has_batch_norm(member.module):
        raise ConfigError(
            "privacy=training needs models whose records do not see each other, and "
            f"{member.model} has BatchNorm: choose a model without it, such as cnn"
        )
    if training.class_weights != "none" or training.sampling != "shuffle":
        raise ConfigError(
            "privacy=training draws every record with the same probability: leave class_weights "
            "and sampling as they are"
        )
    if algorithm.collects == "during":
        raise ConfigError(
            "privacy=training releases each record once per round, and with collect=during it may "
            "pass several times: use collect=after"
        )
    if regularise == "class":
        raise ConfigError(
            "privacy=training computes the loss of one record at a time, and regularise=class is a "
            "loss of a whole batch: use regularise=sample"
        )
    if algorithm.client_update is not same_state or algorithm.client_validate is not None:
        raise ConfigError(
            f"privacy=training does not cover {name}, whose clients keep something that they make "
            "of all their records after training: fedproto, fedavg, fedprox, fedper, fedrep and "
            "local, for example, are covered"
        )


def releases_records(algorithm: Algorithm, layouts: Mapping[str, GroupLayout]) -> bool:
    """Return whether an upload is made of records, beside the weights that steps have trained.

    Raises ConfigError if it is made of both.
    """
    is_weights = all(layout.per == "client" for layout in layouts.values())
    if algorithm.collects == "nothing" and not algorithm.once and is_weights:
        return False
    if algorithm.name in CLASS_MEANS and not algorithm.once:
        return True
    raise ConfigError(
        f"privacy=training covers weights or class means, and {algorithm.name} sends something "
        "else: use fedproto, fedavg, fedprox, fedper, fedrep or local, for example"
    )
