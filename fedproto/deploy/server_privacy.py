"""Noise that a deployed server adds to the sum of all replies, and what a round costs members.

With `privacy=client` the members bound what they send, and the server adds noise to the sum before
anything else is made of it. A round costs everybody who is asked to take part in it. It is charged,
and written to the server's file, before the first request leaves. If the server is killed, it asks
for the same round again and charges nothing more: a noisy sum leaves the server only after the file
with its round was written, so that nobody ever sees two of one round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.config.choices import complete, parse_choice
from fedproto.core.types import Algorithm, GroupLayout
from fedproto.deploy.member_record import MemberRecord
from fedproto.deploy.settings import ServerSettings, TrainingTerms
from fedproto.errors import ConfigError
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.privacy.claim import (
    Claim,
    describe_coverage,
    describe_mechanism,
    describe_neighbours,
    list_failures,
)
from fedproto.privacy.conditions import SUMS
from fedproto.privacy.noisy_uploads import Protection
from fedproto.privacy.planning import find_rounding

#: A float32 is rounded by at most this, relative to its size.
_FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class SumPrivacy:
    """How a deployed server protects its members, and what that costs them.

    protection  clipping at the members, noise at the server
    delta       of all epsilons
    limit       the largest epsilon that a member may spend on this federation; None: any
    """

    protection: Protection
    delta: float
    limit: float | None

    def affords(self, member: MemberRecord, round: int) -> bool:
        """Return whether a member can take part in a round, which it may have paid for before."""
        if self.limit is None or member.charged_round == round:
            return True
        return self._compute_epsilon(member.spent + self._price()) <= self.limit

    def charge(self, member: MemberRecord, round: int) -> None:
        """Count a round for a member, once."""
        if member.charged_round != round:
            member.spent += self._price()
            member.charges += 1
            member.charged_round = round

    def compute_spent(self, member: MemberRecord) -> float:
        """Return the epsilon that the federation has cost a member so far."""
        return self._compute_epsilon(member.spent)

    def make_claim(self, members: Sequence[MemberRecord]) -> Claim:
        """Return what can be claimed of the rounds so far."""
        return Claim(
            unit="one member with all its records",
            neighbours=describe_neighbours(is_record=False),
            mechanism=describe_mechanism(self.protection),
            epsilon=max((self.compute_spent(member) for member in members), default=0.0),
            delta=self.delta,
            releases=max((member.charges for member in members), default=0),
            covers=describe_coverage(self.protection),
            does_not_cover=(
                "accuracies that members tell, and everything else in the server's own file",
                "the members' own models, which stay with them",
                "that a member takes part, when, and for how long",
                "rounds of other federations on the same records",
            ),
            assumes=(
                "the list of classes and the number of members in a round are public",
                "the server adds the noise as its settings say, and its file is never put back to "
                "an earlier one",
            ),
            fails=list_failures(self.protection),
        )

    def _price(self) -> float:
        """Return 1 / noise² of a round; these add up over rounds, also if the noise changes."""
        return self.protection.noise**-2

    def _compute_epsilon(self, spent: float) -> float:
        return compute_epsilon([Release(1 / math.sqrt(spent))], self.delta) if spent else 0.0


def plan_sum_privacy(
    terms: TrainingTerms,
    settings: ServerSettings,
    algorithm: Algorithm,
    layouts: Mapping[str, GroupLayout],
) -> SumPrivacy | None:
    """Return how the server protects its members; None: it does not, whatever they do themselves.

    Raises ConfigError if the settings want something together with it for which no claim holds.

    layouts  what the algorithm declares over all classes
    """
    if terms.privacy != "client":
        _refuse_idle_budget(settings)
        return None
    _refuse_unprotected(terms, settings, algorithm)
    combiner = complete("combiner", parse_choice("combiner", settings.combiner), {}, {})
    rounding = find_rounding(combiner)
    if rounding:
        rounding += _FLOAT32_ROUNDING * max(1.0, terms.clip)  # what members mask is float32
    protection = Protection(
        unit="client",
        noise=terms.noise_multiplier,
        clip=terms.clip,
        at="server",
        threshold=terms.count_threshold,
        rounding=rounding,
    )
    privacy = SumPrivacy(protection, settings.delta, settings.epsilon or None)
    if not privacy.affords(MemberRecord(0), round=1):
        spent = compute_epsilon([Release(terms.noise_multiplier)], settings.delta)
        raise ConfigError(
            f"the first round with noise-multiplier {terms.noise_multiplier:g} costs an epsilon of "
            f"{spent:.3g}, more than the budget of {settings.epsilon:g}: raise either"
        )
    return privacy


def _refuse_idle_budget(settings: ServerSettings) -> None:
    """Refuse a budget of the server where members add the noise, and count what it costs."""
    for name in ("epsilon", "delta"):
        if getattr(settings, name) != getattr(ServerSettings, name):
            raise ConfigError(
                f"`{name}` is of the noise that the server adds: set privacy to client, too; with "
                "noise at members, each keeps its own budget"
            )


def _refuse_unprotected(
    terms: TrainingTerms, settings: ServerSettings, algorithm: Algorithm
) -> None:
    """Refuse what would let a member move more than the noise on the sum hides."""
    if not terms.noise_multiplier:
        raise ConfigError(
            "privacy=client needs `noise-multiplier`, the noise that the server adds, above 0"
        )
    if settings.buffer:
        raise ConfigError(
            "asynchronous rounds weigh replies by their age, for which there is no privacy claim: "
            "leave buffer or privacy out"
        )
    if terms.transform:
        raise ConfigError(
            "transform changes uploads after they were clipped, and the noise is added to their "
            "sum: leave transform or privacy out"
        )
    combiner = parse_choice("combiner", settings.combiner).name
    if combiner not in SUMS:
        raise ConfigError(
            f"privacy=client adds noise to a sum, and combiner {combiner} makes something else of "
            "the replies: leave combiner out"
        )
    if settings.new_classes or not settings.classes:
        raise ConfigError(
            "privacy=client needs a list of classes that does not depend on who has which: list "
            "them as `classes`, without new-classes"
        )
    if algorithm.once:
        raise ConfigError(
            f"privacy=client is for what members send anew in each round, and {algorithm.name} "
            f"sends {algorithm.once[0]} once: use privacy=release"
        )


def describe_privacy(privacy: SumPrivacy, members: Sequence[MemberRecord]) -> dict[str, Any]:
    """Return what the server's file says about its noise and what that has cost."""
    return {
        "setting": "client",
        "budget": privacy.limit,
        "claim": privacy.make_claim(members).describe(),
    }
