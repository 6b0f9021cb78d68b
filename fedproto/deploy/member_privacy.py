"""What a member demands before it trains, and what it enters in its ledger before it replies."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedproto.config.options import words
from fedproto.core.closed_form import CLASS_SUMS, GRAM
from fedproto.core.federation import Member
from fedproto.core.types import Algorithm, GroupLayout, Task
from fedproto.deploy.messages import Header
from fedproto.deploy.privacy_ledger import PrivacyLedger, mark_as_sent, reserve_round
from fedproto.deploy.settings import MemberSettings, TrainingTerms
from fedproto.errors import ConfigError, MessageError, ProtectionTooWeak
from fedproto.privacy.accounting import Release
from fedproto.privacy.conditions import refuse_other_sums
from fedproto.privacy.mechanism import protect
from fedproto.privacy.noisy_uploads import as_dtype
from fedproto.privacy.step_costs import (
    CLASS_MEANS,
    count_private_steps,
    refuse_unprotected_training,
    releases_records,
)

LOG = logging.getLogger("flwr")


def refuse_weak_protection(terms: TrainingTerms, own: MemberSettings, hidden: bool = False) -> None:
    """Raise ProtectionTooWeak unless the server asks for what the member's file demands.

    hidden  whether no upload leaves the member but in a secure sum
    """
    allowed = words(own.privacy)
    if allowed and terms.privacy not in allowed:
        raise ProtectionTooWeak(
            f"the server asks for privacy={terms.privacy}, but this member's `privacy` is "
            f"{own.privacy!r}"
        )
    if terms.privacy == "none" and own.max_epsilon_per_year is not None:
        raise ProtectionTooWeak(
            "the server asks for privacy=none, which no budget allows, and this member's "
            f"max-epsilon-per-year is {own.max_epsilon_per_year:g}"
        )
    if own.secure_aggregation == "required" and not hidden:
        raise ProtectionTooWeak(
            "the server asks for single uploads, but this member's secure-aggregation is 'required'"
        )
    least = min(noises_of(terms), default=0.0)
    if own.min_noise > least:
        raise ProtectionTooWeak(
            f"the server asks for noise of {least:g}, but this member's min-noise is "
            f"{own.min_noise:g}"
        )


def noises_of(terms: TrainingTerms) -> list[float]:
    """Return the noise multipliers of what the server asks for; none without protection."""
    if terms.privacy in ("release", "client"):
        return [terms.noise_multiplier]
    if terms.privacy == "training":
        sends_means = terms.part().name in CLASS_MEANS
        return [terms.step_noise] + [terms.noise_multiplier] * sends_means
    return []


def protect_uploads(
    terms: TrainingTerms, algorithm: Algorithm, layouts: Mapping[str, GroupLayout]
) -> Algorithm:
    """Return the algorithm whose uploads are clipped and noisy, if the server asks for that.

    With privacy=client they are bounded only: the noise is the server's.

    layouts  what the algorithm declares

    Raises ConfigError if what is asked for cannot be had.
    """
    if terms.privacy == "client":
        bounded = protect(algorithm, terms.protection(), layouts)
        return replace(bounded, upload=lambda step: as_dtype(bounded.upload(step), step.lr.dtype))
    if terms.privacy == "none" or not sends_sums(terms, algorithm, layouts):
        return algorithm
    return protect(algorithm, terms.protection(), layouts)


def sends_sums(
    terms: TrainingTerms, algorithm: Algorithm, layouts: Mapping[str, GroupLayout]
) -> bool:
    """Return whether an upload has sums over records; ConfigError if they cannot be private."""
    if terms.privacy == "training":
        if not releases_records(algorithm, layouts):
            return False
        refuse_other_sums(terms.part(), terms.privacy)
        return True
    if set(layouts) <= {CLASS_SUMS, GRAM}:
        return True
    raise ConfigError(
        "privacy=release needs features that no private row has trained, which deployed members "
        f"have for closed-form only: {algorithm.name} needs privacy=training"
    )


def refuse_unprotectable(
    terms: TrainingTerms, algorithm: Algorithm, layouts: Mapping[str, GroupLayout]
) -> None:
    """Raise ConfigError, at the server, if its terms ask for a protection that nobody can give."""
    if terms.privacy in ("none", "client"):  # of the latter see server_privacy
        return
    needed = {"noise-multiplier": terms.noise_multiplier} if terms.privacy == "release" else {}
    if terms.privacy == "training":
        needed["step-noise"] = terms.step_noise
    if sends_sums(terms, algorithm, layouts):
        needed["noise-multiplier"] = terms.noise_multiplier
    for key, noise in needed.items():
        if not noise:
            raise ConfigError(
                f"privacy={terms.privacy} of {algorithm.name} needs `{key}`, the noise that "
                "members add, above 0"
            )


def list_round_releases(
    terms: TrainingTerms, client: Member, task: Task, delivered: Sequence[str]
) -> list[Release]:
    """Return what one round of the member releases; MessageError if that cannot be protected.

    delivered  the groups that are sent once and have arrived
    """
    if terms.privacy == "client":
        return [Release(terms.noise_multiplier)]  # which the server promises to add
    algorithm = terms.build()
    layouts = algorithm.declare(client.initial, task)
    releases: list[Release] = []
    try:
        if terms.privacy == "training":
            training = terms.training()
            regularise = str(terms.part().options.get("regularise"))
            refuse_unprotected_training(client, algorithm, training, regularise)
            counted = count_private_steps(client, algorithm, training)
            releases += counted.releases(terms.step_noise)
        if sends_sums(terms, algorithm, layouts):
            of_round = set(layouts) - set(algorithm.once)
            sent_once = set(algorithm.once) - set(delivered)
            times = bool(of_round) + bool(sent_once)
            releases += [Release(terms.noise_multiplier, times)] if times else []
    except ConfigError as error:
        raise MessageError(f"the server's message: {error}") from error
    return releases


def reserve(own: MemberSettings, header: Header, releases: list[Release]) -> None:
    """Enter what a round costs, before it is trained; BudgetSpent if it costs too much."""
    spent = reserve_round(own, str(header.get("federation")), header["round"], releases)
    limit = own.max_epsilon_per_year
    budget = "" if limit is None else f" of {limit:g}"
    LOG.info(
        "Round %d: epsilon %.4g%s spent within a year (delta %g)",
        header["round"],
        spent,
        budget,
        own.epsilon_delta,
    )


def tell_epsilon(own: MemberSettings, header: Header) -> Header:
    """Return what a reply says of epsilon: that of this federation within a year, if finite."""
    federation = str(header.get("federation"))
    epsilon = PrivacyLedger.read(own).epsilon(time.time(), federation=federation)
    return {"epsilon": epsilon} if math.isfinite(epsilon) else {}


def release_reply(own: MemberSettings, header: Header) -> None:
    """Enter that the reply to a request may leave the member from now on."""
    mark_as_sent(own, str(header.get("federation")), header["round"])
