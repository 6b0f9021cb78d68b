"""Whether Lemma 1, Lemma 2 and Theorem 1 hold for each client in a measured round.

An expectation is a mean over replays, and a constant is the largest value that was observed, so a
statement that holds here holds with estimated constants. L2 and G are the largest over all clients.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedproto.theory.bounds import (
    Constants,
    Limit,
    eta_limit,
    lambda_limit,
    momentum_factor,
    squared_drift,
    theorem_1_terms,
)
from fedproto.theory.measured_round import MeasuredRound

#: A statement is clearly violated if it is by more than so many standard errors.
STANDARD_ERRORS = 2.0


class RoundSettings(NamedTuple):
    """The settings of a round that the statements are about."""

    eta: float
    lam: float
    momentum: float
    distance: str
    dim: int


class RoundConstants(NamedTuple):
    """The constants of a round: of each client, and L2 and G as the largest of all."""

    smoothness: Tensor  # (m,)
    variance: Tensor  # (m,)
    gradient: float
    second_gradient: float  # √ of the largest E‖g‖²
    lipschitz: float

    def of(self, client: int) -> Constants:
        """Return the constants that a client's statements use."""
        return Constants(
            smoothness=float(self.smoothness[client]),
            variance=float(self.variance[client]),
            gradient=self.gradient,
            lipschitz=self.lipschitz,
        )


def find_constants(tables: dict[str, Tensor], steps: Tensor) -> tuple[RoundConstants, ...]:
    """Return the constants as largest values, and as means along the paths where there are some.

    The means are what the inequalities need at least: Σ_e Var(g_e)/E in place of σ², the observed
    difference quotients in place of L1 and L2, the mean of ‖g‖ in place of G.
    """
    counts = steps.double()
    variances = tables["variances"].mean(1)
    norms = tables["norms"].mean(1)
    squared_norms = tables["norms"].square().mean(1)
    largest_lipschitz = torch.maximum(tables["lipschitz_jacobian"], tables["lipschitz_largest"])
    largest = RoundConstants(
        smoothness=torch.maximum(tables["smoothness_power"], tables["smoothness_quotient"]),
        variance=variances.amax(1),
        gradient=float(norms.max()),
        second_gradient=math.sqrt(float(squared_norms.max())),
        lipschitz=float(largest_lipschitz.max()),
    )
    means = RoundConstants(
        smoothness=tables["smoothness_quotient"],
        variance=variances.sum(1) / counts,
        gradient=float((norms.sum(1) / counts).max()),
        second_gradient=math.sqrt(float((squared_norms.sum(1) / counts).max())),
        lipschitz=float(tables["lipschitz_mean"].max()),
    )
    return largest, means


class Check(NamedTuple):
    """An inequality: the measured change of the loss is at most the bound."""

    change: float  # the mean over replays
    bound: float
    error: float  # the standard error of change − bound over the replays

    @property
    def slack(self) -> float:
        """How much room is left; below 0 the inequality is violated."""
        return self.bound - self.change

    def describe(self) -> dict[str, Any]:
        """Return the check for a JSON file."""
        return {
            "change": self.change,
            "bound": self.bound,
            "error": self.error,
            "holds": self.slack >= 0,
            "clearly_violated": self.slack < -STANDARD_ERRORS * self.error,
        }


def check_round(measured: MeasuredRound, steps: Tensor, settings: RoundSettings) -> dict[str, Any]:
    """Return what is known of a round, for a JSON file: its constants, and each client's checks."""
    tables = measured.tables
    largest, means = find_constants(tables, steps)
    clients = []
    for client in range(len(steps)):
        record = _describe_client(measured, client, int(steps[client]))
        record |= _check_client(measured, client, steps, settings, largest)
        of_means = _check_client(measured, client, steps, settings, means)
        for name in ("lemma_1", "lemma_2", "theorem_1"):
            if record[name] is not None:
                record[name]["bound_of_means"] = of_means[name]["bound"]
                record[name]["holds_with_means"] = of_means[name]["holds"]
        record["smoothness"]["used"] = float(largest.smoothness[client])
        clients.append(record)
    return {
        "round": measured.round,
        "prototypes_before": measured.has_prototypes,
        "constants": {
            "L1": float(largest.smoothness.max()),
            "sigma2": float(largest.variance.max()),
            "G": largest.gradient,
            "L2": largest.lipschitz,
        },
        "constants_of_means": {
            "L1": float(means.smoothness.max()),
            "sigma2": float(means.variance.max()),
            "G": means.gradient,
            "L2": means.lipschitz,
        },
        "federation": _check_federation(tables, clients),
        "seconds": measured.seconds,
        "clients": clients,
    }


def _check_federation(tables: dict[str, Tensor], clients: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a round does to F = Σ_i |D_i|/N L_i, the objective of all clients together.

    For the squared distance and means weighted by samples, aggregation minimises F over the
    prototypes: it never increases F, in any replay.
    """
    shares = (tables["rows"] / tables["rows"].sum())[:, None]
    aggregated = (shares * (tables["loss_after"] - tables["loss_end"])).sum(0)
    whole = (shares * (tables["loss_after"] - tables["loss_start"][:, None])).sum(0)
    bounds = torch.tensor([client["lemma_1"]["bound"] for client in clients]).double()
    return {
        "aggregation_change": float(aggregated.mean()),
        "largest_aggregation_change": float(aggregated.max()),
        "change": float(whole.mean()),
        "error": _standard_error(whole),
        "bound_without_drift": float((shares[:, 0] * bounds).sum()),
    }


def _describe_client(measured: MeasuredRound, client: int, steps: int) -> dict[str, Any]:
    """Return what was measured of one client."""
    tables = measured.tables
    square_sums = tables["squares"][client].sum(1)
    variances = tables["variances"][client, :, :steps].mean(0)
    norms = tables["norms"][client, :, :steps].mean(0)
    return {
        "client": client,
        "steps": steps,
        "loss_start": float(tables["loss_start"][client]),
        "loss_end": float(tables["loss_end"][client].mean()),
        "loss_after": float(tables["loss_after"][client].mean()),
        "square_sum": float(square_sums.mean()),
        "square_sum_error": _standard_error(square_sums),
        "square_start": float(tables["square_start"][client]),
        "movement": float(tables["movement"][client].mean()),
        "own_distance": float(tables["own_distance"][client].amax()),
        "smoothness": {
            "power": float(tables["smoothness_power"][client]),
            "power_change": float(tables["smoothness_change"][client]),
            "quotient": float(tables["smoothness_quotient"][client]),
        },
        "variance": {"largest": float(variances.max()), "mean": float(variances.mean())},
        "gradient": {"largest": float(norms.max()), "mean": float(norms.mean())},
        "lipschitz": {
            "jacobian": float(tables["lipschitz_jacobian"][client]),
            "largest": float(tables["lipschitz_largest"][client]),
            "mean": float(tables["lipschitz_mean"][client]),
        },
    }


def _check_client(
    measured: MeasuredRound,
    client: int,
    steps: Tensor,
    settings: RoundSettings,
    constants: RoundConstants,
) -> dict[str, Any]:
    """Return the three statements and Corollary 1 for one client."""
    tables = measured.tables
    own = constants.of(client)
    own_steps = int(steps[client])
    most_steps = int(steps.max())
    square_sums = tables["squares"][client].sum(1)
    square_sum = float(square_sums.mean())
    terms = theorem_1_terms(settings.eta, settings.lam, own_steps, square_sum, own, most_steps)
    trained = tables["loss_end"][client] - tables["loss_start"][client]
    aggregated = tables["loss_after"][client] - tables["loss_end"][client]
    weight = settings.eta - own.smoothness * settings.eta**2 / 2
    lemma_1 = _check(trained, terms.descent + terms.noise, trained + weight * square_sums)
    found: dict[str, Any] = {"lemma_1": lemma_1.describe(), "lemma_2": None, "theorem_1": None}
    found["terms"] = terms._asdict()
    found["corollary_1"] = _describe_corollary(
        float(tables["square_start"][client]), square_sum, settings, own_steps, most_steps, own
    )
    if not measured.has_prototypes:
        return found
    lemma_2 = _check(aggregated, terms.drift, aggregated)
    whole = trained + aggregated
    theorem_1 = _check(whole, terms.total, whole + weight * square_sums)
    found["lemma_2"] = lemma_2.describe()
    found["theorem_1"] = theorem_1.describe() | {"dominant": terms.dominant}
    corrected = _correct_drift(tables, client, most_steps, settings, constants)
    found["lemma_2"]["corrected_bound"] = corrected
    found["lemma_2"]["holds_corrected"] = lemma_2.change <= corrected
    return found


def _correct_drift(
    tables: dict[str, Tensor],
    client: int,
    steps: int,
    settings: RoundSettings,
    constants: RoundConstants,
) -> float:
    """Return Lemma 2's bound for the distance and the momentum in use."""
    path = settings.eta * momentum_factor(settings.momentum) * steps * constants.lipschitz
    movement = path * constants.gradient
    if settings.distance == "l2":
        return settings.lam * movement
    dim = settings.dim if settings.distance == "mse" else 1
    distance = float(tables["own_distance"][client].amax())
    squared_movement = (path * constants.second_gradient) ** 2
    return squared_drift(settings.lam, distance, movement, squared_movement, dim)


def _describe_corollary(
    square_start: float,
    square_sum: float,
    settings: RoundSettings,
    own_steps: int,
    most_steps: int,
    constants: Constants,
) -> dict[str, Any]:
    """Return the limits of Corollary 1, and whether η and λ in use are below them."""
    lambda_first = lambda_limit(square_start, most_steps, constants)
    lambda_whole = lambda_limit(square_sum, most_steps, constants)
    eta_whole = eta_limit(square_sum, settings.lam, own_steps, constants, most_steps)
    eta_first = eta_limit(square_start, settings.lam, own_steps, constants, most_steps)
    eta_alone = eta_limit(square_sum, 0.0, own_steps, constants)
    return {
        "lambda_first": lambda_first.value,
        "lambda_sum": lambda_whole.value,
        "eta_first": eta_first.value,
        "eta_sum": eta_whole.value,
        "eta_without_lambda": eta_alone.value,
        "words": eta_whole.words,
        "lambda_holds": _is_below(settings.lam, lambda_first),
        "lambda_sum_holds": _is_below(settings.lam, lambda_whole),
        "eta_holds": _is_below(settings.eta, eta_whole),
        "eta_without_lambda_holds": _is_below(settings.eta, eta_alone),
    }


def _is_below(value: float, limit: Limit) -> bool:
    return limit.value is not None and value < limit.value


def _check(changes: Tensor, bound: float, paired: Tensor) -> Check:
    """Return the check of a mean change; `paired` has the bound's random part added to it."""
    return Check(float(changes.mean()), bound, _standard_error(paired))


def _standard_error(values: Tensor) -> float:
    if len(values) < 2:
        return math.inf
    return float(values.std(correction=1)) / math.sqrt(len(values))
