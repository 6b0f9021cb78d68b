"""The formulas against numbers computed by hand, and against sympy's solutions of the proof."""

import math

import pytest
import sympy as sp
from hypothesis import given
from hypothesis import strategies as st

from fedproto.theory.bounds import (
    Constants,
    best_eta,
    contrast_drift,
    dropped_drift,
    eta_limit,
    eta_limits,
    gradient_floor,
    lambda_limit,
    lemma_1_terms,
    lemma_2_drift,
    momentum_factor,
    rounds_needed,
    squared_drift,
    theorem_1_terms,
    theorem_2_eta,
    theorem_2_lambda,
)

#: L1 = 4, σ² = 3, G = 5, L2 = 2.
FOUR = Constants(smoothness=4.0, variance=3.0, gradient=5.0, lipschitz=2.0)

small = st.floats(0.01, 10)
constants = st.builds(Constants, smoothness=small, variance=small, gradient=small, lipschitz=small)


# --- by hand


def test_the_terms_of_theorem_1_by_hand() -> None:
    # η = 0.1, E = 10, Σ‖∇L‖² = 20: −(0.1 − 4·0.01/2)·20 = −1.6; 4·10·0.01·3/2 = 0.6;
    # λ = 0.02: 0.02·2·0.1·10·5 = 0.2.
    terms = theorem_1_terms(0.1, 0.02, 10, 20.0, FOUR)
    assert terms.descent == pytest.approx(-1.6)
    assert terms.noise == pytest.approx(0.6)
    assert terms.drift == pytest.approx(0.2)
    assert terms.total == pytest.approx(-0.8)
    assert terms.dominant == "descent"
    assert lemma_1_terms(0.1, 10, 20.0, FOUR).total == pytest.approx(-1.0)
    assert lemma_2_drift(0.1, 0.02, 10, FOUR) == pytest.approx(0.2)


def test_a_client_with_fewer_steps_drifts_by_the_largest_number_of_steps() -> None:
    terms = theorem_1_terms(0.1, 0.02, 10, 20.0, FOUR, most_steps=30)
    assert terms.noise == pytest.approx(0.6)
    assert terms.drift == pytest.approx(0.6)


def test_corollary_1_by_hand() -> None:
    # λ L2 E G = 0.02·2·10·5 = 2; 2·(20 − 2) / (4·(20 + 30)) = 0.18.
    assert eta_limit(20.0, 0.02, 10, FOUR).value == pytest.approx(0.18)
    assert best_eta(20.0, 0.02, 10, FOUR).value == pytest.approx(0.09)
    # 20 / (2·10·5) = 0.2.
    assert lambda_limit(20.0, 10, FOUR).value == pytest.approx(0.2)
    per_step = eta_limits([1.0, 2.0, 17.0], 0.02, 10, FOUR)
    assert per_step[0].value is None  # 1 < 2
    assert per_step[1].value == pytest.approx(2 * (3 - 2) / (4 * (3 + 30)))
    assert per_step[2].value == pytest.approx(0.18)


def test_theorem_2_by_hand() -> None:
    # η = 0.1, λ = 0.02, ε = 4: 10·4·(0.2 − 0.04) − 10·0.1·(4·0.1·3 + 2·0.02·2·5) = 6.4 − 1.6;
    # Δ = 2.4: T = 4.8 / 4.8 = 1.
    assert rounds_needed(4.0, 2.4, 0.1, 0.02, 10, FOUR).value == pytest.approx(1.0)
    assert theorem_2_eta(4.0, 0.02, FOUR).value == pytest.approx(2 * 3.8 / (4 * 7))
    assert theorem_2_lambda(4.0, FOUR).value == pytest.approx(0.4)
    # (4·0.1·3 + 0.4) / (2 − 0.4) = 1.
    assert gradient_floor(0.1, 0.02, FOUR).value == pytest.approx(1.0)


def test_what_we_add_by_hand() -> None:
    assert momentum_factor(0.5) == 2
    # 3·(2·0.5·0.1 + 0.02)/4 = 0.09.
    assert squared_drift(3.0, 0.5, 0.1, 0.02, dim=4) == pytest.approx(0.09)
    assert contrast_drift(3.0, 0.2, 0.5, 0.1, 0.02, dim=4) == pytest.approx(0.9)
    assert dropped_drift(2.0, 0.1, 0.4) == pytest.approx(1.0)


# --- vacuous cases are said in words


def test_a_lambda_that_is_too_large_has_no_learning_rate() -> None:
    limit = eta_limit(20.0, 1.0, 10, FOUR)
    assert limit.value is None
    assert "no learning rate" in limit.words
    assert best_eta(20.0, 1.0, 10, FOUR).value is None
    assert theorem_2_eta(4.0, 1.0, FOUR).value is None


def test_an_epsilon_below_the_floor_needs_no_number_of_rounds() -> None:
    limit = rounds_needed(0.9, 2.4, 0.1, 0.02, 10, FOUR)
    assert limit.value is None
    assert "never falls below 1" in limit.words


def test_a_learning_rate_of_2_over_l1_proves_nothing() -> None:
    assert gradient_floor(0.5, 0.02, FOUR).value is None
    assert rounds_needed(4.0, 2.4, 0.5, 0.02, 10, FOUR).words.startswith("nothing")


def test_a_floor_above_what_assumption_3_says_is_called_empty() -> None:
    assert "says nothing" in gradient_floor(0.1, 2.5, FOUR).words  # λ L2 = G
    assert "says nothing" not in gradient_floor(0.1, 0.02, FOUR).words


def test_a_linear_objective_and_prototypes_that_stay_have_no_limit() -> None:
    still = Constants(smoothness=0.0, variance=0.0, gradient=0.0, lipschitz=0.0)
    assert eta_limit(1.0, 1.0, 3, still).value == math.inf
    assert lambda_limit(1.0, 3, still).value == math.inf


@given(constants, small, st.integers(1, 50), st.floats(1.0, 100))
def test_with_lambda_l2_above_g_theorem_2_says_less_than_assumption_3(
    known: Constants, eta: float, steps: int, factor: float
) -> None:
    """Then its floor is above G², which bounds every squared gradient anyway."""
    lam = factor * known.gradient / known.lipschitz
    floor = gradient_floor(eta, lam, known)
    assert floor.value is None or floor.value >= known.gradient**2 * (1 - 1e-9)


@given(constants, st.floats(0.001, 100), st.integers(1, 50))
def test_corollary_1s_lambda_goes_to_0_with_the_gradient(
    known: Constants, share: float, steps: int
) -> None:
    """‖∇L‖ ≤ G, so λ_t ≤ ‖∇L‖ / (L2 E): no λ above 0 is below it until the end."""
    gradient = min(share, 1.0) * known.gradient
    limit = lambda_limit(gradient**2, steps, known)
    assert limit.value is not None
    assert limit.value <= gradient / (known.lipschitz * steps) * (1 + 1e-9)


# --- sympy solves the proof's inequalities

ETA, LAM, E, S, L1, VAR, G, L2, EPS, DELTA, T = sp.symbols(
    "eta lam E S L1 var G L2 epsilon Delta T", positive=True
)
TOTAL = -(ETA - L1 * ETA**2 / 2) * S + L1 * E * ETA**2 * VAR / 2 + LAM * L2 * ETA * E * G
VALUES = {ETA: 0.1, LAM: 0.02, E: 10, S: 20.0, L1: 4, VAR: 3, G: 5, L2: 2, EPS: 4.0, DELTA: 2.4}


def number(expression: sp.Expr, *unknown: sp.Symbol) -> float:
    values = {symbol: value for symbol, value in VALUES.items() if symbol not in unknown}
    return float(expression.subs(values))


def test_corollary_1_is_where_theorem_1s_terms_cancel() -> None:
    (solution,) = sp.solve(sp.cancel(TOTAL / ETA), ETA)
    assert eta_limit(20.0, 0.02, 10, FOUR).value == pytest.approx(number(solution, ETA))
    (solution,) = sp.solve(sp.limit(TOTAL / ETA, ETA, 0), LAM)
    assert lambda_limit(20.0, 10, FOUR).value == pytest.approx(number(solution, LAM))


def test_the_best_eta_is_where_the_bound_has_its_minimum() -> None:
    (solution,) = sp.solve(sp.diff(TOTAL, ETA), ETA)
    assert best_eta(20.0, 0.02, 10, FOUR).value == pytest.approx(number(solution, ETA))


def test_theorem_2_is_the_sum_of_theorem_1_over_rounds() -> None:
    mean_square = sp.Symbol("mean_square", positive=True)
    # T rounds of Theorem 1, whose losses telescope to −Δ at the least.
    summed = DELTA / T + TOTAL.subs(S, E * mean_square)
    (bound,) = sp.solve(summed, mean_square)
    (rounds,) = sp.solve(sp.Eq(bound, EPS), T)
    found = rounds_needed(4.0, 2.4, 0.1, 0.02, 10, FOUR).value
    assert found == pytest.approx(number(rounds, T))
    floor = gradient_floor(0.1, 0.02, FOUR).value
    assert floor == pytest.approx(number(sp.limit(bound, T, sp.oo), T))
    eta_where_no_t_is_enough = sp.solve(sp.cancel(sp.denom(sp.together(rounds)) / ETA), ETA)
    assert theorem_2_eta(4.0, 0.02, FOUR).value == pytest.approx(
        number(eta_where_no_t_is_enough[0], ETA)
    )


def test_the_momentum_factor_bounds_the_sum_of_velocities() -> None:
    momentum, steps = sp.Rational(1, 2), 6
    gradients = sp.symbols(f"g0:{steps}")
    velocity = sp.Integer(0)
    path = sp.Integer(0)
    for gradient in gradients:
        velocity = momentum * velocity + gradient
        path += velocity
    weights = [sp.expand(path).coeff(gradient) for gradient in gradients]
    expected = [(1 - momentum ** (steps - e)) / (1 - momentum) for e in range(steps)]
    assert weights == expected
    assert max(weights) < momentum_factor(0.5)
