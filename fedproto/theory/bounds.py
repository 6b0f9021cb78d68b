"""The paper's convergence statements as formulas, and what we add to them.

Equations are numbered as they are displayed in the paper's appendix B, where Eq. 1 is the local
loss. In all functions:

eta                lr of plain SGD
lam                the importance weight λ of the regulariser
steps              E, the number of SGD steps of a client in a round
square_sum         Σ_{e=1/2}^{E−1} ‖∇L_{tE+e}‖², over the steps of one round
`Constants`        what Assumptions 1 to 4 presuppose

Some statements are vacuous for some constants; then a `Limit` has no value, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Constants(NamedTuple):
    """What the four assumptions presuppose, for one client or as suprema over all."""

    smoothness: float  # L1: the gradient's Lipschitz constant (Assumption 1)
    variance: float  # σ²: of a stochastic gradient (Assumption 2)
    gradient: float  # G: the expected norm of a stochastic gradient (Assumption 3)
    lipschitz: float  # L2: of the embedding as a function of its parameters (Assumption 4)


class Terms(NamedTuple):
    """The three terms that Theorem 1 adds to L_{tE+1/2}."""

    descent: float  # −(η − L1 η²/2) Σ_e ‖∇L_{tE+e}‖²
    noise: float  # L1 E η² σ² / 2
    drift: float  # λ L2 η E G

    @property
    def total(self) -> float:
        """The change of the loss that the bound allows; below 0 it proves a decrease."""
        return self.descent + self.noise + self.drift

    @property
    def dominant(self) -> str:
        """The name of the term with the largest absolute value."""
        sizes = {name: abs(value) for name, value in self._asdict().items()}
        return max(sizes, key=lambda name: sizes[name])


class Limit(NamedTuple):
    """A number below which, or a number of rounds after which, a statement holds."""

    value: float | None  # None: the statement is vacuous
    words: str  # what it means, or why there is none


# --- Lemma 1, Lemma 2 and Theorem 1


def lemma_1_terms(eta: float, steps: int, square_sum: float, constants: Constants) -> Terms:
    """Return the terms of Lemma 1 (Eq. 11): E[L_{(t+1)E}] ≤ L_{tE+1/2} + their total.

    With η > 2/L1 the bound is valid, but its descent term is an ascent.
    """
    descent = -(eta - constants.smoothness * eta**2 / 2) * square_sum
    noise = constants.smoothness * steps * eta**2 * constants.variance / 2
    return Terms(descent, noise, drift=0.0)


def lemma_2_drift(eta: float, lam: float, steps: int, constants: Constants) -> float:
    """Return λ L2 η E G of Lemma 2 (Eq. 19): E[L_{(t+1)E+1/2}] ≤ L_{(t+1)E} + it.

    Steps (a) and (b) of its proof (Eq. 21 and 22) take the norm ‖f − C̄‖, not its square.
    """
    return lam * constants.lipschitz * eta * steps * constants.gradient


def theorem_1_terms(
    eta: float,
    lam: float,
    steps: int,
    square_sum: float,
    constants: Constants,
    most_steps: int | None = None,
) -> Terms:
    """Return the terms of Theorem 1 (Eq. 34): E[L_{(t+1)E+1/2}] ≤ L_{tE+1/2} + their total.

    The paper has one E. Where clients take different numbers of steps, Lemma 1 needs the client's
    own, `steps`, and Lemma 2 the largest of all clients, `most_steps`.
    """
    lemma_1 = lemma_1_terms(eta, steps, square_sum, constants)
    drift = lemma_2_drift(eta, lam, most_steps or steps, constants)
    return lemma_1._replace(drift=drift)


# --- Corollary 1


def eta_limit(
    square_sum: float,
    lam: float,
    steps: int,
    constants: Constants,
    most_steps: int | None = None,
) -> Limit:
    """Return the learning rate below which Theorem 1 proves a decrease (Eq. 42).

    With the sum over the steps up to e', it is η_{e'} of Corollary 1 (Eq. 35). The sum is that of a
    trajectory with some learning rate already, so this says whether a rate in use is small enough
    rather than which to use.
    """
    numerator = square_sum - _drift_per_eta(lam, most_steps or steps, constants)
    denominator = constants.smoothness * (square_sum + steps * constants.variance)
    if numerator <= 0:
        return Limit(
            None,
            "no learning rate: λ L2 E G is not below the sum of squared gradients, so Theorem 1 "
            "proves a decrease for no η",
        )
    if denominator == 0:
        return Limit(math.inf, "every learning rate: the objective is linear")
    value = 2 * numerator / denominator
    return Limit(value, f"a learning rate below {value:.3g}")


def eta_limits(
    squares: Sequence[float], lam: float, steps: int, constants: Constants
) -> list[Limit]:
    """Return η_{e'} of Corollary 1 (Eq. 35) for e' = 1/2, 1, ..., E − 1.

    squares  ‖∇L_{tE+e}‖² for the same e; the sum of the first ones goes into each limit
    """
    limits = []
    square_sum = 0.0
    for square in squares:
        square_sum += square
        limits.append(eta_limit(square_sum, lam, steps, constants))
    return limits


def lambda_limit(square_sum: float, steps: int, constants: Constants) -> Limit:
    """Return the λ below which some learning rate makes Theorem 1 prove a decrease (Eq. 43).

    With ‖∇L_{tE+1/2}‖² alone in place of the sum, it is λ_t of Corollary 1 (Eq. 36). Since
    ‖∇L‖ ≤ G, that one is at most ‖∇L_{tE+1/2}‖ / (L2 E): it goes to 0 where training converges.
    """
    per_lambda = _drift_per_eta(1.0, steps, constants)
    if per_lambda == 0:
        return Limit(math.inf, "every λ: the prototypes do not move")
    value = square_sum / per_lambda
    return Limit(value, f"a λ below {value:.3g}")


def best_eta(square_sum: float, lam: float, steps: int, constants: Constants) -> Limit:
    """Return the learning rate with the largest proved decrease: half of `eta_limit`."""
    limit = eta_limit(square_sum, lam, steps, constants)
    if limit.value is None or math.isinf(limit.value):
        return limit
    value = limit.value / 2
    return Limit(value, f"the largest proved decrease is at a learning rate of {value:.3g}")


def _drift_per_eta(lam: float, steps: int, constants: Constants) -> float:
    """Return λ L2 E G."""
    return lemma_2_drift(1.0, lam, steps, constants)


# --- Theorem 2


def rounds_needed(
    epsilon: float, delta: float, eta: float, lam: float, steps: int, constants: Constants
) -> Limit:
    """Return T of Theorem 2 (Eq. 37): after more rounds the mean squared gradient is below ε.

    delta  L_0 − L*, where L* must be a lower bound for every prototype that will ever be sent, not
           the optimum for the first ones (see docs/theory.md)
    """
    floor = gradient_floor(eta, lam, constants)
    if floor.value is None:
        return floor
    if epsilon <= floor.value:
        return Limit(
            None,
            f"no number of rounds: with this η and λ the bound never falls below {floor.value:.3g}",
        )
    gain = steps * epsilon * (2 * eta - constants.smoothness * eta**2)
    loss = steps * eta * (_noise(eta, constants) + 2 * _floor_of_lambda(lam, constants))
    value = 2 * delta / (gain - loss)
    return Limit(value, f"more than {value:.3g} rounds")


def gradient_floor(eta: float, lam: float, constants: Constants) -> Limit:
    """Return the ε that Theorem 2 needs at least: (L1 η σ² + 2 λ L2 G) / (2 − L1 η).

    It is what is left of its bound (Eq. 46) after infinitely many rounds. By Assumption 3 every
    squared gradient is at most G², so a floor of G² or more says nothing.
    """
    rest = 2 - constants.smoothness * eta
    if rest <= 0:
        return Limit(None, "nothing: the learning rate is not below 2 / L1")
    value = (_noise(eta, constants) + 2 * _floor_of_lambda(lam, constants)) / rest
    if value >= constants.gradient**2:
        words = f"squared gradients of {value:.3g}, not below G² by Assumption 3: it says nothing"
        return Limit(value, words)
    return Limit(value, f"squared gradients of {value:.3g}")


def theorem_2_eta(epsilon: float, lam: float, constants: Constants) -> Limit:
    """Return the learning rate that Theorem 2 needs (Eq. 39)."""
    numerator = epsilon - _floor_of_lambda(lam, constants)
    if numerator <= 0:
        return Limit(None, "no learning rate: ε is not above λ L2 G")
    value = 2 * numerator / (constants.smoothness * (epsilon + constants.variance))
    return Limit(value, f"a learning rate below {value:.3g}")


def theorem_2_lambda(epsilon: float, constants: Constants) -> Limit:
    """Return the λ that Theorem 2 needs (Eq. 40)."""
    value = epsilon / (constants.lipschitz * constants.gradient)
    return Limit(value, f"a λ below {value:.3g}")


def _noise(eta: float, constants: Constants) -> float:
    return constants.smoothness * eta * constants.variance


def _floor_of_lambda(lam: float, constants: Constants) -> float:
    return lam * constants.lipschitz * constants.gradient


# --- what the paper leaves out


def momentum_factor(momentum: float) -> float:
    """Return by how much SGD's momentum β lengthens a round's path at most: 1 / (1 − β).

    Σ_e v_e = Σ_e g_e (1 − β^(E−e)) / (1 − β), so step (g) of Lemma 2 holds with η / (1 − β).
    """
    return 1 / (1 - momentum)


def squared_drift(
    lam: float, distance: float, movement: float, squared_movement: float, dim: int = 1
) -> float:
    """Return what Lemma 2 allows for the squared distance, λ (2 R E[Δ] + E[Δ²]) / d.

    ‖f − C̄'‖² − ‖f − C̄‖² = 2 (f − C̄)·(C̄ − C̄') + ‖C̄' − C̄‖². The mean of f over a client's rows
    of a class is its own prototype, so R bounds the distance of own to global prototypes.

    distance          R
    movement          E[Δ] ≤ L2 η E G, of a global prototype in a round
    squared_movement  E[Δ²] ≤ (L2 η E)² E‖g‖²
    dim               d for the mean over dimensions, 1 for the sum
    """
    return lam * (2 * distance * movement + squared_movement) / dim


def contrast_drift(
    beta: float, tau: float, distance: float, movement: float, squared_movement: float, dim: int
) -> float:
    """Return what the contrast term −β log p_y may gain: 2β (2 R E[Δ] + E[Δ²]) / (τ d).

    −log p_y = d_y/τ + log Σ_j exp(−d_j/τ), and log Σ exp grows by no more than its largest
    exponent; so the change is at most 2/τ times the largest |Δd_j|. R bounds the distance of
    embeddings to *all* prototypes, Δ is over all classes, and τ is fixed (tau_unit absolute).
    """
    return 2 * squared_drift(beta, distance, movement, squared_movement, dim) / tau


def dropped_drift(lam: float, movement: float, disagreement: float) -> float:
    """Return what Lemma 2 allows if absent clients are dropped: λ (E[Δ] + D).

    disagreement  D, between the means of the old prototypes over the clients of this round and
                  over those of the last one: it is there without any training
    """
    return lam * (movement + disagreement)
