"""Estimators on problems whose constants are known, and the inequalities where they must hold."""

import pytest
import torch
from helpers.quadratics import make_linear, make_quadratics
from torch import Tensor

from fedproto.theory.bounds import Constants, lemma_1_terms
from fedproto.theory.estimators import (
    dot,
    draw_directions,
    embedding_quotients,
    iterate_power,
    jacobian_norms,
    largest_quotient,
    norm,
)
from fedproto.theory.replays import ReplayPlan, Replays, replay_round

CLIENTS, ROWS, SIZE = 3, 40, 4
PLAN = ReplayPlan(replays=600, batch=8, eta=0.05, momentum=0.0, seed=0, round=1)
STEPS = torch.tensor([6, 3, 5])


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def matrices() -> Tensor:
    """Symmetric matrices with the eigenvalues 1, 2, 3 and 8."""
    basis = torch.linalg.qr(draw(CLIENTS, SIZE, SIZE, seed=1)).Q
    values = torch.tensor([1.0, 2.0, 3.0, 8.0], dtype=torch.float64)
    return basis @ torch.diag(values) @ basis.mT


X = draw(CLIENTS, ROWS, SIZE, seed=2)
START = {"w": 3 + draw(CLIENTS, SIZE, seed=3)}
WHO = torch.arange(CLIENTS)


def covariance(client: int) -> Tensor:
    gaps = X[client] - X[client].mean(0)
    return gaps.T @ gaps / ROWS


def replays_of(matrices: Tensor, plan: ReplayPlan = PLAN) -> Replays:
    objectives, received = make_quadratics(matrices, X)
    return replay_round(objectives, START, received, STEPS, plan)


class Exact:
    """SGD on a quadratic: the second moment of w − mean(x) has a recursion."""

    def __init__(self, matrix: Tensor, client: int, plan: ReplayPlan) -> None:
        self.matrix = matrix
        self.variance = matrix @ covariance(client) @ matrix / plan.batch  # of a gradient
        gap = START["w"][client] - X[client].mean(0)
        self.squares = []
        self.losses = []
        moment = torch.outer(gap, gap)
        shrink = torch.eye(SIZE, dtype=torch.float64) - plan.eta * matrix
        spread = 0.5 * torch.trace(matrix @ covariance(client))
        for _ in range(int(STEPS[client]) + 1):
            self.squares.append(float(torch.trace(matrix @ moment @ matrix)))
            self.losses.append(float(0.5 * torch.trace(matrix @ moment) + spread))
            moment = shrink @ moment @ shrink + plan.eta**2 * self.variance


# --- L1


def test_power_iteration_finds_the_largest_eigenvalue(matrices: Tensor) -> None:
    objectives, received = make_quadratics(matrices, X)
    multiply = objectives.linearise_gradient(START, received, objectives.samples)
    found = iterate_power(multiply, draw_directions(START, seed=0), iterations=8)
    assert found.values.tolist() == pytest.approx([8.0] * CLIENTS, rel=0.05)
    assert found.change.max() < 0.05


def test_power_iteration_also_finds_a_negative_eigenvalue() -> None:
    """L1 is the largest absolute one: a concave objective is as curved as a convex one."""
    matrix = torch.diag(torch.tensor([-8.0, 1.0, 2.0, 3.0], dtype=torch.float64))
    objectives, received = make_quadratics(matrix.expand(CLIENTS, -1, -1), X)
    multiply = objectives.linearise_gradient(START, received, objectives.samples)
    found = iterate_power(multiply, draw_directions(START, seed=0), iterations=8)
    assert found.values.tolist() == pytest.approx([8.0] * CLIENTS, rel=0.05)


def test_a_difference_quotient_along_the_steepest_direction_is_exact(matrices: Tensor) -> None:
    objectives, received = make_quadratics(matrices, X)
    steepest = torch.linalg.eigh(matrices).eigenvectors[..., -1]
    points = [START, {"w": START["w"] + 0.3 * steepest}]
    gradients = [objectives.full_gradient(point, received, WHO) for point in points]
    assert largest_quotient(points, gradients).tolist() == pytest.approx([8.0] * CLIENTS)


def test_points_that_are_equal_have_no_quotient(matrices: Tensor) -> None:
    objectives, received = make_quadratics(matrices, X)
    gradient = objectives.full_gradient(START, received, WHO)
    assert largest_quotient([START, START], [gradient, gradient]).tolist() == [0.0] * CLIENTS


def test_the_full_gradient_is_that_of_the_mean(matrices: Tensor) -> None:
    objectives, received = make_quadratics(matrices, X)
    found = objectives.full_gradient(START, received, WHO)["w"]
    gaps = START["w"] - X.mean(1)
    expected = torch.einsum("mij,mj->mi", matrices, gaps)
    torch.testing.assert_close(found, expected)


# --- σ², G and the sum of squared gradients


@pytest.mark.parametrize("batch", [8, 5])
def test_the_halves_of_batches_give_the_exact_moments(matrices: Tensor, batch: int) -> None:
    plan = PLAN._replace(batch=batch)
    replays = replays_of(matrices, plan)
    for client in range(CLIENTS):
        steps = int(STEPS[client])
        exact = Exact(matrices[client], client, plan)
        found = replays.squares[client].sum(1).mean()
        assert float(found) == pytest.approx(sum(exact.squares[:steps]), rel=0.05)
        variance = replays.variances[client, :, :steps].mean()
        assert float(variance) == pytest.approx(float(torch.trace(exact.variance)), rel=0.05)
        assert (replays.squares[client, :, steps:] == 0).all()


def test_the_norm_of_a_gradient_is_that_of_the_whole_batch(matrices: Tensor) -> None:
    """At the first step, all replays are at the same point: E‖g‖² = ‖∇L‖² + σ²."""
    replays = replays_of(matrices)
    for client in range(CLIENTS):
        exact = Exact(matrices[client], client, PLAN)
        expected = exact.squares[0] + float(torch.trace(exact.variance))
        found = float(replays.norms[client, :, 0].square().mean())
        assert found == pytest.approx(expected, rel=0.05)


def test_replays_end_where_sgd_ends(matrices: Tensor) -> None:
    """The expected end of SGD on a quadratic is that of gradient descent."""
    replays = replays_of(matrices)
    ends = torch.stack([end["w"] for end in replays.ends]).mean(0)
    for client in range(CLIENTS):
        shrink = torch.eye(SIZE, dtype=torch.float64) - PLAN.eta * matrices[client]
        gap = START["w"][client] - X[client].mean(0)
        expected = torch.linalg.matrix_power(shrink, int(STEPS[client])) @ gap
        found = ends[client] - X[client].mean(0)
        assert float((found - expected).norm() / expected.norm()) < 0.05


def test_replays_depend_on_seed_round_and_client_only(matrices: Tensor) -> None:
    plan = PLAN._replace(replays=3)
    again = replays_of(matrices, plan)
    first = replays_of(matrices, plan)
    other = replays_of(matrices, plan._replace(round=2))
    assert torch.equal(first.squares, again.squares)
    assert not torch.equal(first.squares, other.squares)


def test_the_middle_is_half_way_through_the_first_replay(matrices: Tensor) -> None:
    objectives, received = make_quadratics(matrices, X)
    plan = PLAN._replace(replays=2)
    whole = replay_round(objectives, START, received, STEPS, plan)
    short = replay_round(objectives, START, received, (STEPS + 1) // 2, plan)
    # With fewer steps the batches of the first steps are the same: a stream of draws per replay.
    torch.testing.assert_close(whole.middle["w"], short.ends[0]["w"])


# --- Lemma 1


def change_and_bound(matrix: Tensor, constants: Constants, plan: ReplayPlan) -> tuple[float, float]:
    """Return E[L_E] − L_0 and Lemma 1's bound of it for client 0, both exact."""
    exact = Exact(matrix, 0, plan)
    steps = int(STEPS[0])
    terms = lemma_1_terms(plan.eta, steps, sum(exact.squares[:steps]), constants)
    return exact.losses[steps] - exact.losses[0], terms.total


@pytest.mark.parametrize("eta", [0.01, 0.1, 0.2, 0.3])
def test_lemma_1_holds_with_the_true_constants(matrices: Tensor, eta: float) -> None:
    """Also where η is above 2 / L1 = 0.25, and the loss grows."""
    plan = PLAN._replace(eta=eta)
    variance = float(torch.trace(Exact(matrices[0], 0, plan).variance))
    change, bound = change_and_bound(matrices[0], Constants(8.0, variance, 0, 0), plan)
    assert change <= bound
    assert (bound > 0) or (change < 0)


def test_lemma_1_is_an_equality_where_the_curvature_is_the_same_everywhere() -> None:
    matrix = 8.0 * torch.eye(SIZE, dtype=torch.float64)
    variance = float(torch.trace(Exact(matrix, 0, PLAN).variance))
    change, bound = change_and_bound(matrix, Constants(8.0, variance, 0, 0), PLAN)
    assert change == pytest.approx(bound)


@pytest.mark.parametrize(("smoothness", "share"), [(4.0, 1.0), (8.0, 0.5)])
def test_lemma_1_is_violated_with_too_small_a_constant(smoothness: float, share: float) -> None:
    matrix = 8.0 * torch.eye(SIZE, dtype=torch.float64)
    plan = PLAN._replace(eta=0.2)
    variance = share * float(torch.trace(Exact(matrix, 0, plan).variance))
    change, bound = change_and_bound(matrix, Constants(smoothness, variance, 0, 0), plan)
    assert change > bound


def test_lemma_1_is_violated_with_momentum() -> None:
    """Plain gradient descent of w²/2 from 1 with η = 1, and the same with momentum 0.9."""
    constants = Constants(smoothness=1.0, variance=0.0, gradient=0.0, lipschitz=0.0)
    eta, steps = 1.0, 4
    for momentum in (0.0, 0.9):
        w, velocity, squares = 1.0, 0.0, 0.0
        for _ in range(steps):
            squares += w**2
            velocity = momentum * velocity + w
            w -= eta * velocity
        change = (w**2 - 1) / 2
        bound = lemma_1_terms(eta, steps, squares, constants).total
        if momentum == 0:
            assert change == pytest.approx(bound)
        else:
            assert change > bound + 0.5


# --- L2


def test_the_jacobian_of_a_linear_embedding_has_the_norm_of_its_input() -> None:
    x = draw(CLIENTS, 1, 6, seed=4)
    objectives = make_linear(x, size=4)
    params = {"phi": draw(CLIENTS, 4, 6, seed=5)}
    push, pull, dim = objectives.linearise_embedding(params, x[:, 0])
    start = draw_directions({"u": torch.zeros(CLIENTS, dim, dtype=torch.float64)}, seed=0)["u"]
    found = jacobian_norms(push, pull, start, iterations=3)
    assert found.tolist() == pytest.approx(x[:, 0].norm(dim=-1).tolist(), rel=1e-9)


def test_embeddings_move_by_at_most_l2_times_their_parameters() -> None:
    x = draw(CLIENTS, ROWS, 6, seed=6)
    objectives = make_linear(x, size=4)
    before = {"phi": draw(CLIENTS, 4, 6, seed=7)}
    longest = x[torch.arange(CLIENTS), x.norm(dim=-1).argmax(1)]
    # A step of rank one along the longest input: the quotient there is its norm exactly.
    direction = draw(CLIENTS, 4, seed=8)
    after = {"phi": before["phi"] + 0.1 * torch.einsum("mi,mj->mij", direction, longest)}
    moved = norm({"phi": after["phi"] - before["phi"]})
    quotients = embedding_quotients(
        objectives.outputs(before, WHO).features,
        objectives.outputs(after, WHO).features,
        objectives.samples.mask,
        moved,
    )
    assert quotients.largest.tolist() == pytest.approx(longest.norm(dim=-1).tolist())
    assert (quotients.mean < quotients.largest).all()


def test_padding_and_unmoved_parameters_count_for_nothing() -> None:
    before = torch.zeros(2, 2, 3)
    after = torch.ones(2, 2, 3)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    quotients = embedding_quotients(before, after, mask, torch.tensor([1.0, 0.0]))
    assert quotients.largest.tolist() == pytest.approx([3**0.5, 0.0])
    assert quotients.mean.tolist() == pytest.approx([3**0.5, 0.0])


def test_dot_is_over_all_tensors_of_a_row() -> None:
    tree = {"a": torch.ones(2, 3), "b": 2 * torch.ones(2, 2, 2)}
    assert dot(tree, tree).tolist() == [19.0, 19.0]
