"""A learning rate and a λ that the theory proposes, from measured rounds.

Theorem 1 is a bound for every client, so the smallest values over clients are taken. It is honest
about nothing but its own bound: whether a proposal is any good is said by validation rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fedproto.errors import ConfigError
from fedproto.theory.bounds import Constants, best_eta, lemma_1_terms

#: Of the λ at which the proved decrease vanishes.
SAFE_SHARE = 0.5
#: Rounds of the default settings that are measured: the first ones with prototypes before them.
MEASURED_ROUNDS = (2, 3)


class Proposal(NamedTuple):
    """Settings that a statement proposes."""

    name: str
    lr: float
    lam: float
    words: str


def propose(measured: dict[str, Any]) -> list[Proposal]:
    """Return what Corollary 1 proposes for every client, and for the federation as a whole.

    measured  what `measure_experiment` returned for the default settings
    """
    if measured["lam"] == 0:
        raise ConfigError("theory proposes a λ from one above 0: set lam, as to 1")
    rounds = [record for record in measured["rounds"] if record["prototypes_before"]]
    clients = [(record, client) for record in rounds for client in record["clients"]]
    rates = []
    for record, client in clients:
        limit = best_eta(client["square_sum"], 0.0, client["steps"], _constants(record, client))
        if limit.value is not None:  # None: the estimated sum of squares is not above 0
            rates.append(limit.value)
    eta = min(rates)
    lr = eta * (1 - measured["momentum"])
    lambdas = [_largest_lambda(record, client, eta, measured) for record, client in clients]
    lam = SAFE_SHARE * max(min(lambdas), 0.0)
    return [
        Proposal(
            "theory, every client",
            lr,
            lam,
            "the lr of the largest decrease that Theorem 1 proves for every client at λ = 0, and "
            "half of the λ up to which it still proves one",
        ),
        Proposal(
            "theory, federation",
            lr,
            measured["lam"],
            "the same lr; for all clients together the squared distance needs no smaller λ",
        ),
    ]


def _constants(record: dict[str, Any], client: dict[str, Any]) -> Constants:
    return Constants(
        smoothness=client["smoothness"]["used"],
        variance=client["variance"]["largest"],
        gradient=record["constants"]["G"],
        lipschitz=record["constants"]["L2"],
    )


def _largest_lambda(
    record: dict[str, Any], client: dict[str, Any], eta: float, measured: dict[str, Any]
) -> float:
    """Return the λ at which the drift of Lemma 2 eats the decrease of Lemma 1 at a rate η.

    The drift is that of the distance in use, as measured with the run's own η. It is scaled with
    η; for a smaller one that leaves its term in Δ² too large, which is on the safe side.
    """
    constants = _constants(record, client)
    terms = lemma_1_terms(eta, client["steps"], client["square_sum"], constants)
    momentum_rate = measured["eta"] / (1 - measured["momentum"])
    drift_per_lambda = client["lemma_2"]["corrected_bound"] / measured["lam"]
    scaled = drift_per_lambda * eta / momentum_rate
    return -terms.total / scaled
