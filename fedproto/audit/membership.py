"""Membership inference by likelihood ratios (LiRA, Carlini et al. 2022) over shadow federations.

Some federations are the attacker's shadows, whose coins it knows; the others are attacked. Of each
record the attacker knows how a statistic is distributed in shadows that have the record, and in
those that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedproto.audit.shadows import Observations
from fedproto.audit.threats import ThreatModel

KNOWS = "the records' distribution, by training shadow federations with the run's settings"
THREATS = {
    "prototypes": ThreatModel(
        "server",
        f"a client's prototypes of the last round, and {KNOWS}",
        "to tell whether a record is in that client's training data",
    ),
    "global prototypes": ThreatModel(
        "member",
        f"the global prototypes after the last round, and {KNOWS}",
        "to tell whether a record is in the training data of some client of its class",
    ),
    "sent weights": ThreatModel(
        "server",
        f"the weights that a client sent in the last round, and {KNOWS}",
        "to tell whether a record is in that client's training data",
    ),
    "trained model": ThreatModel(
        "outsider",
        f"the probabilities that a client's final model gives, and {KNOWS}",
        "to tell whether a record is in that client's training data",
    ),
}
#: Of the covariance that is estimated from few shadows, this part is replaced by a multiple of 1.
SHRINKAGE = 0.2
#: The score of a record whose class its client visibly does not have.
CERTAINLY_OUT = -1e6


@dataclass(frozen=True)
class Trials:
    """Scores of records of attacked federations, and what the coins said."""

    scores: np.ndarray  # log-likelihood ratios: above 0 means "in"
    included: np.ndarray  # bool


def split_federations(seen: Observations, shadows: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the shadow federations and of the attacked ones."""
    federations = len(seen.included)
    return torch.arange(shadows), torch.arange(shadows, federations)


def score_ratios(shadow_values: Tensor, shadow_included: Tensor, attacked_values: Tensor) -> Tensor:
    """Return log N(v; μ_in, σ_in) − log N(v; μ_out, σ_out) of each attacked value.

    Means are those of each record, standard deviations are pooled over records, as is done for few
    shadows. All are (federations, records); NaN in the shadows is left out, and makes an attacked
    record certainly out.
    """
    is_seen = ~shadow_values.isnan()
    values = shadow_values.nan_to_num()
    means = []
    deviations = []
    for side in (shadow_included & is_seen, ~shadow_included & is_seen):
        weight = side.double()
        counts = weight.sum(0)
        mean = (values * weight).sum(0) / counts.clamp(min=1)
        mean = torch.where(counts > 0, mean, mean.mean())
        degrees = (counts - 1).clamp(min=0).sum().clamp(min=1)
        variance = ((values - mean).square() * weight).sum() / degrees
        means.append(mean)
        deviations.append(variance.sqrt().clamp(min=1e-12))
    log_in = _log_normal(attacked_values, means[0], deviations[0])
    log_out = _log_normal(attacked_values, means[1], deviations[1])
    return (log_in - log_out).nan_to_num(nan=CERTAINLY_OUT)


def _log_normal(values: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the log-density of a normal distribution, without its constant."""
    return -((values - mean) / deviation).square() / 2 - deviation.log()


def project_prototypes(
    prototypes: Tensor, embeddings: Tensor, place: Tensor, shadows: Tensor
) -> Tensor:
    """Return one number per federation and record: how far a prototype leans to the record.

    u'Σ⁻¹(c − μ), where c is the prototype, μ and Σ its mean and covariance over shadows, and u the
    mean embedding of the record by the shadows' models, minus μ: Fisher's discriminant for a record
    that moves a mean.

    prototypes  (f, places, d)
    embeddings  (f, records, d)
    place       (records,) which prototype a record is part of
    """
    dim = prototypes.shape[-1]
    mean_embeddings = embeddings[shadows].mean(0)
    projected = torch.full((len(prototypes), len(place)), torch.nan, dtype=torch.float64)
    for number in place.unique().tolist():
        mine = (place == number).nonzero().flatten()
        values = prototypes[:, number]
        known = values[shadows]
        known = known[~known.isnan().any(1)]
        if len(known) < 2:
            continue
        mean = known.mean(0)
        covariance = torch.cov(known.T)
        level = covariance.diagonal().mean().clamp(min=1e-12)
        covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * level * torch.eye(dim).double()
        directions = torch.linalg.solve(covariance, (mean_embeddings[mine] - mean).T)
        projected[:, mine] = (values - mean) @ directions
    return projected


def list_statistics(seen: Observations, shadows: Tensor) -> dict[str, Tensor]:
    """Return what each attacker looks at: (federations, records) by its name in THREATS."""
    records = seen.records
    found = {}
    if seen.prototypes is not None:
        clients, classes = seen.prototypes.shape[1:3]
        flat = seen.prototypes.reshape(len(seen.prototypes), clients * classes, -1)
        place = records.client * classes + records.label
        found["prototypes"] = project_prototypes(flat, seen.embeddings, place, shadows)
    if seen.shared is not None:
        found["global prototypes"] = project_prototypes(
            seen.shared, seen.embeddings, records.label, shadows
        )
    if seen.uploaded is not None:
        found["sent weights"] = seen.uploaded
    found["trained model"] = seen.confidence
    return found


def infer_membership(seen: Observations, shadows: int) -> dict[str, Trials]:
    """Return the trials of each attacker; the first `shadows` federations are its own."""
    own, attacked = split_federations(seen, shadows)
    trials = {}
    for name, values in list_statistics(seen, own).items():
        scores = score_ratios(values[own], seen.included[own], values[attacked])
        included = seen.included[attacked]
        trials[name] = Trials(scores.flatten().numpy(), included.flatten().numpy())
    return trials
