"""The claim of a run: what exactly is private, by which means, at what price, and what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.config.settings import Config
from fedproto.core.federation import Federation
from fedproto.privacy.budget import Budget
from fedproto.privacy.noisy_uploads import Protection
from fedproto.privacy.planning import PrivacyPlan
from fedproto.privacy.step_costs import StepPlan

ACCOUNTANT = (
    "dp-accounting: all releases as one Gaussian mechanism (analytic, Balle and Wang 2018), "
    "without amplification by sampling"
)
_ACCOUNTANT_OF_SAMPLES = (
    "dp-accounting: privacy loss distributions of Gaussian mechanisms over Poisson samples of the "
    "clients (amplification by sampling; add or remove)"
)
_ACCOUNTANT_OF_STEPS = (
    "dp-accounting: privacy loss distributions of all steps of training, as Gaussian mechanisms "
    "over Poisson samples, and of all uploads that are made of records"
)


@dataclass(frozen=True)
class Claim:
    """A statement of differential privacy about a run."""

    unit: str
    neighbours: str
    mechanism: str
    epsilon: float  # the largest of all clients; infinite without noise
    delta: float
    releases: int  # the most that one unit was in
    covers: str
    does_not_cover: tuple[str, ...]
    assumes: tuple[str, ...]
    fails: tuple[str, ...]  # why nothing is private; empty if the claim holds
    accountant: str = ACCOUNTANT

    @property
    def holds(self) -> bool:
        return not self.fails

    def __str__(self) -> str:
        if not self.holds:
            return f"no privacy is claimed: {'; '.join(self.fails)}"
        return (
            f"({self.epsilon:.3g}, {self.delta:g})-differential privacy of {self.unit}: "
            f"{self.covers}"
        )

    def describe(self) -> dict[str, Any]:
        """Return the claim for a JSON file; an infinite epsilon is None."""
        return {
            "holds": self.holds,
            "statement": str(self),
            "unit": self.unit,
            "neighbours": self.neighbours,
            "mechanism": self.mechanism,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "releases": self.releases,
            "accountant": self.accountant,
            "covers": self.covers,
            "does_not_cover": list(self.does_not_cover),
            "assumes": list(self.assumes),
            "fails": list(self.fails),
        }


def make_claim(plan: PrivacyPlan, budget: Budget, config: Config, federation: Federation) -> Claim:
    """Return what can be claimed of what the budget says was spent so far."""
    protection = plan.protection
    if plan.steps is not None:
        return _claim_of_training(plan, plan.steps, budget, config, federation)
    is_record = protection.unit == "record"
    return Claim(
        unit="one record of one client" if is_record else "one client with all its records",
        neighbours=describe_neighbours(is_record),
        mechanism=describe_mechanism(protection) + _describe_sampling(protection),
        epsilon=max(budget.epsilons(), default=0.0),
        delta=plan.delta,
        releases=max(budget.count_releases(), default=0),
        covers=describe_coverage(protection) + _describe_exception(config, federation),
        does_not_cover=_list_uncovered(config, protection, federation),
        assumes=_list_assumptions(config, federation, plan),
        fails=list_failures(protection),
        accountant=ACCOUNTANT if protection.sampling is None else _ACCOUNTANT_OF_SAMPLES,
    )


def _claim_of_training(
    plan: PrivacyPlan, steps: StepPlan, budget: Budget, config: Config, federation: Federation
) -> Claim:
    """Return what can be claimed of a run whose clients also train privately."""
    mechanism = (
        f"steps of training that take each record with probability batch / records, clip its "
        f"gradient to an L2 norm of {steps.clip} and add Gaussian noise of {steps.noise:.4g} times "
        "that to the sum"
    )
    failures = []
    if steps.noise == 0 or steps.clip is None:
        failures.append("there is no noise on the steps of training")
    if plan.per_round:
        mechanism += f"; of what is sent, {describe_mechanism(plan.protection)}"
        failures += list_failures(plan.protection)
    elif steps.seeded:
        failures.append("the noise is drawn from the seed of the run (a mode for tests)")
    uncovered = [
        entry
        for entry in _list_uncovered(config, plan.protection, federation)
        if not entry.startswith("the clients' own models")
    ]
    covers = (
        "the models of all clients and everything that they send in all rounds, with what server "
        "and other clients make of it; it holds against the server, too"
    )
    if plan.per_round and plan.protection.at == "server":
        covers = f"the models of all clients, and {describe_coverage(plan.protection)}"
    number_is_public = (
        "the number of a client's records, which decides its number of steps and how probably a "
        "step takes a record, is public"
    )
    return Claim(
        unit="one record of one client",
        neighbours=(
            f"{describe_neighbours(is_record=True)}; the others keep their places, which draws of "
            "dropout and augmentation belong to"
        ),
        mechanism=mechanism,
        epsilon=max(budget.epsilons(), default=0.0),
        delta=plan.delta,
        releases=max(budget.count_releases(), default=0),
        covers=covers + _describe_exception(config, federation),
        does_not_cover=tuple(uncovered),
        assumes=(number_is_public, *_list_assumptions(config, federation, plan)),
        fails=tuple(failures),
        accountant=_ACCOUNTANT_OF_STEPS,
    )


def describe_neighbours(is_record: bool) -> str:
    """Return which two data sets must look alike."""
    if is_record:
        return "two sets of rows of a client, of which one has one row more (add or remove)"
    return "two federations, in one of which one client takes part with values and weights of 0"


def describe_mechanism(protection: Protection) -> str:
    """Return how uploads are made private."""
    what = "embeddings" if protection.unit == "record" else "values of each client"
    where = "each client adds to what it sends"
    if protection.at == "server":
        where = "the server adds to the sum of all clients before it is used"
    sums = "sums, counts and Gram matrix"
    if protection.shape == "variance":
        sums = (
            "sums, counts and the sums of squares of each coordinate, by which embeddings are "
            "scaled before they are clipped once more and added"
        )
    return (
        f"{what} clipped to an L2 norm of {protection.clip}; Gaussian noise, which {where}, of "
        f"{protection.noise:.4g} times the joint sensitivity of {sums}"
    )


def _describe_sampling(protection: Protection) -> str:
    if protection.sampling is None:
        return ""
    return (
        f"; each client is in a round with probability {protection.sampling:g}, independently of "
        "the others and drawn from the operating system; sums of models are divided by the "
        "expected number of clients, and a round in which nobody is sampled has noise, too"
    )


def describe_coverage(protection: Protection) -> str:
    """Return what the claim is about."""
    if protection.at == "client":
        return (
            "everything that the client sends in all rounds, and what server and other clients "
            "make of it; it holds against the server, too"
        )
    return (
        "everything that the server makes of the noisy sums, and so what clients receive in all "
        "rounds; the server itself sees single uploads and is trusted, unless a secure sum hides "
        "them"
    )


def _list_uncovered(
    config: Config, protection: Protection, federation: Federation
) -> tuple[str, ...]:
    uncovered = [
        "losses, accuracies and other metrics in the run folder, which are computed from the "
        "clients' rows",
        "the clients' own models and heads (models/, checkpoints), which stay with them",
        _describe_presence(protection),
        "hyper-parameters that were chosen by looking at the same data",
    ]
    if protection.at == "server":
        uncovered.append("checkpoints and traffic counts, which are made of single uploads")
    if _is_encoded_by_own_rows(config, federation):
        uncovered.append(
            "the encoding of columns or words (means, categories, vocabulary), which was made from "
            "the clients' own rows: give one made from public rows as encoding=FILE"
        )
    if protection.unit == "record":
        uncovered.append("several records of the same person: epsilon grows with their number")
    return tuple(uncovered)


def _describe_presence(protection: Protection) -> str:
    if protection.sampling is None:
        return "that a client takes part, when, and for how long"
    return (
        "that a client is a member at all, and the files of the run folder that tell in which "
        "rounds it was sampled (metrics.jsonl, checkpoints): whoever reads them gains more than "
        "epsilon says"
    )


def _has_encoding(federation: Federation) -> bool:
    return any(member.preprocessing.encoding is not None for member in federation.members)


def _is_encoded_by_own_rows(config: Config, federation: Federation) -> bool:
    """Return whether the program made an encoding from the rows that it is to protect."""
    is_given = all(part.options.get("encoding") is not None for part in config.dataset)
    return _has_encoding(federation) and not is_given


def _describe_exception(config: Config, federation: Federation) -> str:
    """Return what of the program's own doing a claim leaves out, as the end of its statement."""
    if not _is_encoded_by_own_rows(config, federation):
        return ""
    return "; the encoding of the rows was made from them and is not covered"


def _list_assumptions(config: Config, federation: Federation, plan: PrivacyPlan) -> tuple[str, ...]:
    assumptions = ["the list of classes is public, and does not depend on who has which rows"]
    if _has_encoding(federation) and not _is_encoded_by_own_rows(config, federation):
        assumptions.append(
            "the encoding of columns or words (means, categories, vocabulary) was made from public "
            "rows"
        )
    if config.initial is not None or _has_stored_weights(config):
        assumptions.append("the weights that the encoder starts from come from public data")
    assumptions.append("normalisation of inputs uses constants that are public")
    if plan.protection.sampling is not None:
        assumptions.append("the number of clients of the federation is public")
        assumptions.append(
            "nobody but the server, and the client itself, learns in which rounds a client was "
            "sampled"
        )
    elif plan.setting == "client":
        assumptions.append("the number of clients in a round is public")
    return tuple(assumptions)


def _has_stored_weights(config: Config) -> bool:
    """Return whether a model or a feature map reads weights from a file."""
    parts = (*config.model, *config.feature_map)
    return any(part.options.get("weights") is not None for part in parts)


def list_failures(protection: Protection) -> tuple[str, ...]:
    """Return why nothing is private; empty if nothing stands against it."""
    failures = []
    if protection.noise == 0 or protection.clip is None:
        failures.append("there is no noise")
    if protection.seeded:
        failures.append("the noise is drawn from the seed of the run (a mode for tests)")
    return tuple(failures)


def list_lines(claim: Claim, clients: Sequence[str] = ()) -> list[str]:
    """Return the claim as lines of text for people."""
    lines = [str(claim)]
    if claim.holds:
        lines.append(f"neighbours: {claim.neighbours}")
        lines.append(f"mechanism: {claim.mechanism}; {claim.releases} releases")
        for kind, entries in (("assumes", claim.assumes), ("not covered", claim.does_not_cover)):
            lines += [f"{kind}: {entry}" for entry in entries]
    return lines
