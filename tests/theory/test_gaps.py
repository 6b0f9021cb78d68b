"""Where the paper's proof does not hold: each gap of docs/theory.md with a counter-example.

The embeddings are f(φ; x) = φ, which is Lipschitz with L2 = 1, and gradients are exact (σ² = 0).
"""

import pytest
import torch
from helpers.tiny import build, send
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedproto.core.tensors import make_group, stack_uploads
from fedproto.core.types import Algorithm, Batch, State, Step
from fedproto.theory.bounds import (
    Constants,
    contrast_drift,
    dropped_drift,
    eta_limits,
    lemma_1_terms,
    lemma_2_drift,
    rounds_needed,
    squared_drift,
    theorem_1_terms,
)

LAM, ETA = 1.0, 0.1


def regulariser(
    algorithm: Algorithm, features: Tensor, y: Tensor, server: State, term: str = "regulariser"
) -> float:
    """Return a term of the loss of a client with these embeddings."""
    classes = len(server["known"])
    own = torch.zeros(classes, dtype=torch.float64)
    own[y] = 1
    received = send(algorithm, server, own)
    logits = features.new_zeros(len(features), classes)
    batch = Batch(features, y, features.new_ones(len(y)))
    return float(algorithm.loss(Step({}, features, logits, batch, received))[term])


def aggregate(algorithm: Algorithm, embeddings: list[Tensor], labels: list[Tensor], classes: int):
    """Return the server's state after clients with these embeddings have uploaded."""
    uploads = []
    for features, y in zip(embeddings, labels, strict=True):
        in_class = torch.nn.functional.one_hot(y, classes).double()
        counts = in_class.sum(0)
        means = in_class.T @ features / counts.clamp(min=1)[:, None]
        group = make_group({"prototypes": means}, counts)
        held = (counts > 0).double()
        uploads.append({"prototypes": group._replace(counts={"holders": held})})
    width = embeddings[0].shape[1]
    empty = {"prototypes": torch.zeros(classes, width), "known": torch.zeros(classes)}
    server = {name: value.double() for name, value in empty.items()}
    return algorithm.aggregate(server, stack_uploads(uploads))


def point(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# --- Lemma 2: the norm, not its square (Eq. 21)


@pytest.mark.parametrize(("distance", "holds"), [("l2", True), ("sql2", False)])
def test_lemma_2_holds_for_the_norm_and_not_for_its_square(distance: str, holds: bool) -> None:
    """Client A stays at 0; B moves from 4 to 4 + η G in one step, so C̄ moves from 2 by η G / 2."""
    algorithm = build("fedproto", lam=LAM, distance=distance)
    y = [torch.tensor([0]), torch.tensor([0])]
    gradient = 3.0
    stays, before, after = point(0.0), point(4.0), point(4.0 + ETA * gradient)
    old = aggregate(algorithm, [stays, before], y, classes=1)
    new = aggregate(algorithm, [stays, after], y, classes=1)
    change = regulariser(algorithm, stays, y[0], new) - regulariser(algorithm, stays, y[0], old)
    constants = Constants(smoothness=0, variance=0, gradient=gradient, lipschitz=1.0)
    assert (change <= lemma_2_drift(ETA, LAM, 1, constants)) == holds
    # As corrected, with R = 2 and Δ = η G / 2, it is an equality.
    if distance == "sql2":
        movement = ETA * gradient / 2
        assert change == pytest.approx(squared_drift(LAM, 2.0, movement, movement**2))


def test_the_norm_has_no_l1() -> None:
    """One step of length η across the prototype needs an L1 that grows like 1/η (Assumption 1)."""
    needed = []
    for eta in (0.1, 0.01, 0.001):
        start = eta / 10  # |w − C̄|; the gradient has length 1
        change = (eta - start) - start
        without = Constants(smoothness=0, variance=0, gradient=1.0, lipschitz=1.0)
        assert change > lemma_1_terms(eta, 1, 1.0, without).total
        needed.append(2 * (change + eta) / eta**2)  # where Lemma 1 is an equality
        enough = without._replace(smoothness=needed[-1])
        assert change == pytest.approx(lemma_1_terms(eta, 1, 1.0, enough).total)
    assert needed[1] == pytest.approx(10 * needed[0])
    assert needed[2] == pytest.approx(100 * needed[0])


# --- "we omit the label (j), which does not affect the proof"


def test_a_sum_over_classes_drifts_by_each_of_them() -> None:
    """Eq. 8 sums over classes; with f = φ the prototypes of all of them move at once."""
    algorithm = build("fedproto", lam=LAM, distance="l2", regularise="class")
    labels = torch.tensor([0, 1, 2])
    y = [labels, labels]
    gradient = 3.0
    ours = torch.zeros(3, 1, dtype=torch.float64)
    theirs = ours + 4.0
    moved = theirs + ETA * gradient
    old = aggregate(algorithm, [ours, theirs], y, classes=3)
    new = aggregate(algorithm, [ours, moved], y, classes=3)
    change = regulariser(algorithm, ours, labels, new) - regulariser(algorithm, ours, labels, old)
    constants = Constants(smoothness=0, variance=0, gradient=gradient, lipschitz=1.0)
    bound = lemma_2_drift(ETA, LAM, 1, constants)
    assert change > bound
    assert change <= 3 * bound


# --- round 1


def test_the_first_aggregation_raises_the_loss_without_any_training() -> None:
    """Before it no class has a prototype, and the regulariser is 0; Lemma 2 allows η E G = 0."""
    algorithm = build("fedproto", lam=LAM, distance="l2")
    y = torch.tensor([0])
    ours, theirs = point(0.0), point(4.0)
    first = aggregate(algorithm, [ours, theirs], [y, y], classes=1)
    before = first | {"known": torch.zeros(1, dtype=torch.float64)}
    assert regulariser(algorithm, ours, y, before) == 0
    assert regulariser(algorithm, ours, y, first) == pytest.approx(2.0)


# --- expectations that are missing


def test_lemma_1_is_about_the_expected_gradients() -> None:
    """L = w²/2 from w = 1, gradients w ± 1, η = 1/2, E = 2: w₁ is 0 or 1, with equal chances.

    E[L_2] = (¼·(E[w₁²] + 1))/2 = 3/16. With E‖∇L_1‖² = ½ the bound is an equality; with the
    ‖∇L_1‖² = 1 of one of the two paths, as printed, it is violated.
    """
    eta = 0.5
    constants = Constants(smoothness=1.0, variance=1.0, gradient=2.0, lipschitz=1.0)
    change = 3 / 16 - 1 / 2
    expected = lemma_1_terms(eta, 2, 1.0 + 0.5, constants).total
    assert change == pytest.approx(expected)
    on_one_path = lemma_1_terms(eta, 2, 1.0 + 1.0, constants).total
    assert change > on_one_path


# --- Corollary 1: a rate of its own for each iteration


def test_rates_per_iteration_that_satisfy_corollary_1_may_increase_the_loss() -> None:
    """L = w²/2 + 0.3 |φ − C̄| − 0.3 φ, where φ = 0 stays; another client has 9/10 of the class.

    Its φ moves away by η_e G in each step. All three rates are below their limits (Eq. 35), and the
    loss grows: after the second step the gradient is 0, but the others go on.
    """
    lam, gradient, share = 0.3, 1.0, 0.9
    constants = Constants(smoothness=1.0, variance=0.0, gradient=gradient, lipschitz=1.0)
    rates = (0.1, 1.0, 1.0)
    w, prototype, squares = 1.0, 4.0, []
    before = w**2 / 2 + lam * prototype
    for rate in rates:
        squares.append(w**2)
        w -= rate * w
        prototype += share * rate * gradient
    limits = eta_limits(squares, lam, len(rates), constants)
    assert all(rate < limit.value for rate, limit in zip(rates, limits, strict=True))
    assert w**2 / 2 + lam * prototype > before + 0.06
    # One rate for all iterations, below the first limit, does what the corollary says.
    assert theorem_1_terms(0.19, lam, 3, 1.0 + 0.81**2 + 0.6561**2, constants).total < 0


# --- Theorem 2: L* is not the optimum for the first prototypes


def test_the_losses_may_fall_by_more_than_delta() -> None:
    """L = |w − C̄| + w²/2 (λ = 1): with C̄ = 10 its optimum is 9.5, at w = 1; with C̄ = 0 it is 0."""

    def loss(w: float, prototype: float) -> float:
        return abs(w - prototype) + w**2 / 2

    start = loss(1.0, 10.0)
    best_for_the_first = min(loss(w / 100, 10.0) for w in range(-2000, 2000))
    delta = start - best_for_the_first
    assert delta == pytest.approx(0.0)
    after_aggregation = loss(1.0, 0.0)
    assert start - after_aggregation > delta
    # With that Δ the theorem would promise small gradients after no round at all.
    constants = Constants(smoothness=1.0, variance=0.0, gradient=2.0, lipschitz=1.0)
    assert rounds_needed(4.0, delta, 0.1, 1.0, 1, constants).value == 0
    gradient_of_round_2 = 1.0 + 1.0  # w + sign(w − 0) at w = 1
    assert gradient_of_round_2**2 >= 4.0


# --- partial participation


def test_dropping_absent_clients_moves_prototypes_without_any_training() -> None:
    """Two clients take turns and nobody trains (η = 0): Lemma 2 allows no increase at all."""
    algorithm = build("fedproto", lam=LAM, distance="l2", absent="drop")
    y = torch.tensor([0])
    first, second = point(0.0), point(4.0)
    only_first = aggregate(algorithm, [first], [y], classes=1)
    only_second = aggregate(algorithm, [second], [y], classes=1)
    change = regulariser(algorithm, first, y, only_second)
    change -= regulariser(algorithm, first, y, only_first)
    still = Constants(smoothness=0, variance=0, gradient=3.0, lipschitz=1.0)
    assert change > lemma_2_drift(0.0, LAM, 1, still) == 0
    disagreement = float((only_first["prototypes"] - only_second["prototypes"]).norm())
    assert change == pytest.approx(dropped_drift(LAM, 0.0, disagreement))


vectors = st.lists(st.floats(-5, 5), min_size=3, max_size=3)


@settings(max_examples=40)
@given(st.lists(vectors, min_size=3, max_size=5), st.data())
def test_remembered_prototypes_move_by_the_share_of_those_who_trained(
    places: list[list[float]], data: st.DataObject
) -> None:
    """‖C̄' − C̄‖ ≤ Σ_{i in the cohort} q_i ‖C_i' − C_i‖: Lemma 2 with a factor below 1."""
    algorithm = build("fedproto", lam=LAM, distance="l2")
    old = [torch.tensor([place], dtype=torch.float64) for place in places]
    trains = data.draw(st.lists(st.booleans(), min_size=len(old), max_size=len(old)))
    moves = [torch.tensor([data.draw(vectors)], dtype=torch.float64) * flag for flag in trains]
    new = [place + move for place, move in zip(old, moves, strict=True)]
    y = [torch.tensor([0])] * len(old)
    before = aggregate(algorithm, old, y, classes=1)
    after = aggregate(algorithm, new, y, classes=1)
    longest = max(float(move.norm()) for move in moves)
    share = sum(trains) / len(trains)
    for features in new:
        change = regulariser(algorithm, features, y[0], after)
        change -= regulariser(algorithm, features, y[0], before)
        assert change <= LAM * share * longest + 1e-9


# --- what holds instead: aggregation minimises


embeddings = st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=2), min_size=1, max_size=4)


def weighted_sum(
    algorithm: Algorithm, clients: list[Tensor], y: list[Tensor], server: State
) -> float:
    """Return Σ_i |D_i| L_R of client i."""
    total = 0.0
    for features, labels in zip(clients, y, strict=True):
        total += len(labels) * regulariser(algorithm, features, labels, server)
    return total


@settings(max_examples=50)
@given(st.lists(embeddings, min_size=2, max_size=4), st.integers(0, 2**31), st.booleans())
def test_aggregation_never_increases_the_squared_distance_of_all_clients(
    rows: list[list[list[float]]], seed: int, is_mean: bool
) -> None:
    """The sample-weighted mean of the prototypes is where Σ |D_i| L_R is smallest."""
    algorithm = build("fedproto", lam=LAM, distance="mse" if is_mean else "sql2")
    generator = torch.Generator().manual_seed(seed)
    clients = [torch.tensor(each, dtype=torch.float64) for each in rows]
    y = [torch.randint(0, 2, (len(each),), generator=generator) for each in clients]
    old = aggregate(algorithm, clients, y, classes=2)
    noise = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    old = old | {"prototypes": old["prototypes"] + noise}
    new = aggregate(algorithm, clients, y, classes=2)
    before = weighted_sum(algorithm, clients, y, old)
    after = weighted_sum(algorithm, clients, y, new)
    assert after <= before + 1e-9


@pytest.mark.parametrize("change", [{"distance": "l2"}, {"distance": "sql2", "weighting": "eq6"}])
def test_that_needs_the_square_and_means_by_samples(change: dict[str, str]) -> None:
    """For the norm a mean is not the minimiser, and Eq. 6 as printed is not even a mean."""
    algorithm = build("fedproto", lam=LAM, **change)
    averaging = build("fedproto", lam=LAM)
    clients = [point(0.0), point(0.0), point(9.0)]
    y = [torch.tensor([0])] * 3
    old = aggregate(averaging, [point(0.0)] * 3, y, classes=1)  # the median of the three
    if change["distance"] != "l2":
        clients = [point(6.0)] * 3
        old = aggregate(averaging, clients, y, classes=1)
    new = aggregate(algorithm, clients, y, classes=1)
    before = weighted_sum(algorithm, clients, y, old)
    after = weighted_sum(algorithm, clients, y, new)
    assert after > before


# --- the square and the contrast term, as corrected


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@given(st.integers(0, 2**31), st.floats(0.01, 2), st.sampled_from(["sql2", "mse"]))
def test_the_squared_distance_drifts_as_corrected(seed: int, size: float, distance: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    algorithm = build("fedproto", lam=LAM, distance=distance)
    features = draw(generator, 6, 3)
    y = torch.randint(0, 2, (6,), generator=generator)
    server = {
        "prototypes": draw(generator, 2, 3),
        "known": torch.ones(2, dtype=torch.float64),
    }
    moved = server["prototypes"] + size * draw(generator, 2, 3)
    change = regulariser(algorithm, features, y, server | {"prototypes": moved})
    change -= regulariser(algorithm, features, y, server)
    movement = float((moved - server["prototypes"]).norm(dim=-1).max())
    own_distances = []
    for label in y.unique():
        own = features[y == label].mean(0)
        own_distances.append(float((own - server["prototypes"][label]).norm()))
    dim = 3 if distance == "mse" else 1
    bound = squared_drift(LAM, max(own_distances), movement, movement**2, dim)
    assert change <= bound + 1e-9


@given(st.integers(0, 2**31), st.floats(0.01, 2), st.floats(0.05, 5))
def test_the_contrast_term_drifts_as_derived(seed: int, size: float, tau: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    beta = 0.7
    algorithm = build("fedproto", contrast=beta, tau=tau, tau_unit="absolute")
    features = draw(generator, 6, 3)
    y = torch.randint(0, 4, (6,), generator=generator)
    server = {"prototypes": draw(generator, 4, 3), "known": torch.ones(4, dtype=torch.float64)}
    moved = server["prototypes"] + size * draw(generator, 4, 3)
    change = regulariser(algorithm, features, y, server | {"prototypes": moved}, "contrast")
    change -= regulariser(algorithm, features, y, server, "contrast")
    movement = float((moved - server["prototypes"]).norm(dim=-1).max())
    distance = float(torch.cdist(features, server["prototypes"]).max())
    bound = contrast_drift(beta, tau, distance, movement, movement**2, dim=3)
    assert abs(change) <= bound + 1e-9


def test_the_contrast_terms_bound_needs_all_classes() -> None:
    """A prototype of a class that the client does not hold moves its loss, too."""
    algorithm = build("fedproto", contrast=1.0, tau=1.0, tau_unit="absolute")
    y = torch.tensor([0])
    server = {
        "prototypes": torch.tensor([[0.0], [2.0]], dtype=torch.float64),
        "known": torch.ones(2, dtype=torch.float64),
    }
    moved = server | {"prototypes": torch.tensor([[0.0], [1.0]], dtype=torch.float64)}
    before = regulariser(algorithm, point(0.0), y, server, "contrast")
    after = regulariser(algorithm, point(0.0), y, moved, "contrast")
    assert after > before
