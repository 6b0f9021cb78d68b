"""Measured rounds in a few numbers: how often each statement holds, how loose it is, and why."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fedproto.theory.bounds import Constants, gradient_floor, rounds_needed

STATEMENTS = ("lemma_1", "lemma_2", "theorem_1")
#: The names of the statements for people.
TITLES = {"lemma_1": "Lemma 1", "lemma_2": "Lemma 2", "theorem_1": "Theorem 1"}

Record = dict[str, Any]


def summarise_rounds(records: Sequence[Record], eta: float, lam: float) -> Record:
    """Return what measured rounds of one run say about every statement."""
    return summarise_statements(records) | {
        "theorem_2": _summarise_theorem_2(records, eta, lam),
        "seconds": _add_seconds(records),
    }


def summarise_statements(records: Sequence[Record]) -> Record:
    """Return the shares and medians over all client-rounds, of one run or of several."""
    clients = [client for record in records for client in record["clients"]]
    statements = {name: _summarise_statement(clients, name) for name in STATEMENTS}
    return {
        "client_rounds": len(clients),
        "statements": statements,
        "corollary_1": _summarise_corollary(clients),
        "federation": _summarise_federation(records),
        "constants": _summarise_constants(clients),
    }


def _summarise_statement(clients: Sequence[Record], name: str) -> Record | None:
    """Return how often an inequality holds, and the medians of both sides.

    Looseness is (bound − change) / |change|: 0 is tight, 10 is room for ten such changes more.
    """
    checks = [client[name] for client in clients if client[name] is not None]
    if not checks:
        return None
    moving = [check for check in checks if check["change"] != 0]
    looseness = [(check["bound"] - check["change"]) / abs(check["change"]) for check in moving]
    summary = {
        "checks": len(checks),
        "holds": _share(check["holds"] for check in checks),
        "clearly_violated": _share(check["clearly_violated"] for check in checks),
        "holds_with_means": _share(check["holds_with_means"] for check in checks),
        "median_change": statistics.median(check["change"] for check in checks),
        "median_bound": statistics.median(check["bound"] for check in checks),
        "median_bound_of_means": statistics.median(check["bound_of_means"] for check in checks),
        "median_looseness": statistics.median(looseness) if looseness else None,
    }
    if name == "lemma_2":
        summary["holds_corrected"] = _share(check["holds_corrected"] for check in checks)
        bounds = [check["corrected_bound"] for check in checks]
        summary["median_corrected_bound"] = statistics.median(bounds)
        movements = [client["movement"] for client in clients if client[name] is not None]
        summary["median_movement"] = statistics.median(movements)
    if name == "theorem_1":
        counts = Counter(check["dominant"] for check in checks)
        summary["dominant"] = {term: count / len(checks) for term, count in counts.items()}
        summary["proves_decrease"] = _share(check["bound"] < 0 for check in checks)
        summary["decreases"] = _share(check["change"] < 0 for check in checks)
    return summary


def _summarise_corollary(clients: Sequence[Record]) -> Record | None:
    """Return how η and λ stand against Corollary 1, in rounds that had prototypes before."""
    limits = [client["corollary_1"] for client in clients if client["lemma_2"] is not None]
    if not limits:
        return None
    found: Record = {}
    for name in ("lambda_first", "lambda_sum", "eta_without_lambda"):
        values = [limit[name] for limit in limits if limit[name] is not None]
        found[f"median_{name}"] = statistics.median(values)
        found[f"smallest_{name}"] = min(values)
        found[f"largest_{name}"] = max(values)
    for name in ("lambda_holds", "lambda_sum_holds", "eta_holds", "eta_without_lambda_holds"):
        found[name] = _share(limit[name] for limit in limits)
    return found


def _summarise_federation(records: Sequence[Record]) -> Record | None:
    """Return what rounds do to the sum of all clients' objectives, weighted by their rows."""
    rounds = [record["federation"] for record in records if record["prototypes_before"]]
    if not rounds:
        return None
    return {
        "rounds": len(rounds),
        "aggregation_decreases": _share(each["aggregation_change"] <= 0 for each in rounds),
        "largest_aggregation_change": max(each["largest_aggregation_change"] for each in rounds),
        "holds_without_drift": _share(
            each["change"] <= each["bound_without_drift"] for each in rounds
        ),
        "median_change": statistics.median(each["change"] for each in rounds),
        "median_bound_without_drift": statistics.median(
            each["bound_without_drift"] for each in rounds
        ),
    }


#: Constants by name: where a client's record has each estimate.
ESTIMATES: dict[str, Callable[[Record], float]] = {
    "L1, power iteration": lambda client: client["smoothness"]["power"],
    "L1, difference quotient": lambda client: client["smoothness"]["quotient"],
    "sigma2, largest on the path": lambda client: client["variance"]["largest"],
    "sigma2, mean on the path": lambda client: client["variance"]["mean"],
    "G, largest on the path": lambda client: client["gradient"]["largest"],
    "G, mean on the path": lambda client: client["gradient"]["mean"],
    "L2, Jacobian": lambda client: client["lipschitz"]["jacobian"],
    "L2, largest quotient": lambda client: client["lipschitz"]["largest"],
    "L2, mean quotient": lambda client: client["lipschitz"]["mean"],
}


def _summarise_constants(clients: Sequence[Record]) -> Record:
    """Return the spread of each estimate over client-rounds."""
    found = {}
    for name, read in ESTIMATES.items():
        values = [read(client) for client in clients]
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        found[name] = {
            "median": quartiles[1],
            "lower_quartile": quartiles[0],
            "upper_quartile": quartiles[2],
            "largest": max(values),
        }
    return found


def _summarise_theorem_2(records: Sequence[Record], eta: float, lam: float) -> Record | None:
    """Return, over clients, predicted rounds for the mean squared gradient that was measured.

    L* is 0, below every loss; constants are the largest over rounds, L2 and G also over clients.
    """
    rounds = [record for record in records if record["prototypes_before"]]
    if not rounds:
        return None
    gradient = max(record["constants"]["G"] for record in rounds)
    lipschitz = max(record["constants"]["L2"] for record in rounds)
    predictions = []
    without_lambda = []
    floors = []
    words = []
    for number in range(len(rounds[0]["clients"])):
        of_client = [record["clients"][number] for record in rounds]
        constants = Constants(
            smoothness=max(each["smoothness"]["used"] for each in of_client),
            variance=max(each["variance"]["largest"] for each in of_client),
            gradient=gradient,
            lipschitz=lipschitz,
        )
        epsilon = statistics.fmean(each["square_sum"] / each["steps"] for each in of_client)
        steps = of_client[0]["steps"]
        delta = of_client[0]["loss_start"]
        predicted = rounds_needed(epsilon, delta, eta, lam, steps, constants)
        alone = rounds_needed(epsilon, delta, eta, 0.0, steps, constants)
        predictions.append(predicted.value)
        without_lambda.append(alone.value)
        floors.append(gradient_floor(eta, lam, constants).value)
        words.append(predicted.words)
    known_floors = [floor for floor in floors if floor is not None]
    return {
        "rounds_measured": rounds[-1]["round"] - rounds[0]["round"] + 1,
        "predicted": _describe_predictions(predictions),
        "predicted_without_lambda": _describe_predictions(without_lambda),
        "median_floor": statistics.median(known_floors) if known_floors else None,
        "G2": gradient**2,
        "floor_below_G2": _share(floor is not None and floor < gradient**2 for floor in floors),
        "words": Counter(words).most_common(1)[0][0],
    }


def _describe_predictions(values: Sequence[float | None]) -> Record:
    known = [value for value in values if value is not None]
    return {
        "vacuous": _share(value is None for value in values),
        "median": statistics.median(known) if known else None,
    }


def _add_seconds(records: Sequence[Record]) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in records:
        for name, value in record["seconds"].items():
            total[name] = total.get(name, 0.0) + value
    return total


def _share(flags: Iterable[bool]) -> float:
    """Return the share of flags that are true."""
    values = [bool(flag) for flag in flags]
    return sum(values) / len(values)
