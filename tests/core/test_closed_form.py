"""What is solved from sums: by hand, against scikit-learn, and when clients come and go."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from torch.func import vmap

from fedproto.algorithms.local import local
from fedproto.core.closed_form import (
    CLASS_SUMS,
    GRAM,
    TEACHER,
    WEIGHTS,
    Sums,
    choose_weight,
    judge,
    pack_triangle,
    score_rows,
    solve_known,
    sum_classes,
    to_log_probabilities,
    unpack_triangle,
    with_teacher,
)
from fedproto.core.tensors import select_rows, stack_uploads
from fedproto.core.types import OVER_RECIPIENTS, Batch, Recipient, SentOnce, Step, Task
from fedproto.errors import ConfigError
from fedproto.teachers.lda import lda, measure_around
from fedproto.teachers.ncm import ncm
from fedproto.teachers.ridge import ridge


def sums_of(x, y, classes):
    sums, counts = sum_classes(x, y, torch.ones(len(y)).to(x), classes)
    return Sums(sums, counts, x.T @ x)


def score(solution, x):
    return (x @ solution.vectors.T + solution.bias).numpy()


@pytest.fixture(scope="module")
def digits():
    bunch = load_digits()
    x = torch.tensor(bunch.data[:400]) / 16
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return x + 0.01 * noise, torch.tensor(bunch.target[:400])


# --- against scikit-learn


@pytest.mark.parametrize("shrinkage", [0.01, 0.1, 0.5, 1.0])
def test_lda_is_scikit_learns(digits, shrinkage):
    """Theirs adds the logarithm of how frequent a class is; here all are equally likely."""
    x, y = digits
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)
    expected = theirs.fit(x.numpy(), y.numpy()).decision_function(x.numpy())
    found = score(lda(shrinkage=shrinkage).solve(sums_of(x, y, 10)), x)
    np.testing.assert_allclose(found + np.log(theirs.priors_), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("strength", [0.001, 0.1, 3.0])
def test_ridge_is_scikit_learns(digits, strength):
    x, y = digits
    centred = x - x.mean(0)
    alpha = strength * centred.square().sum(0).mean().item()
    one_hot = torch.nn.functional.one_hot(y, 10).numpy()
    expected = Ridge(alpha=alpha).fit(x.numpy(), one_hot).predict(x.numpy())
    found = score(ridge(strength=strength).solve(sums_of(x, y, 10)), x)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


def test_ncm_is_scikit_learns(digits):
    x, y = digits
    expected = NearestCentroid().fit(x.numpy(), y.numpy()).predict(x.numpy())
    found = score(ncm().solve(sums_of(x, y, 10)._replace(gram=None)), x)
    assert (found.argmax(1) == expected).all()


# --- by hand


def test_two_dimensions_by_hand():
    """Classes at (±1, 0), each with two rows that differ by ±1 in both directions.

    Within the classes all products are 1, W = [[1, 1], [1, 1]]; half of it and half of the mean
    variance give S = [[1, ½], [½, 1]], whose inverse is 4/3 · [[1, −½], [−½, 1]].
    """
    x = torch.tensor([[2.0, 1], [0, -1], [0, 1], [-2, -1]]).double()
    y = torch.tensor([0, 0, 1, 1])
    solution = lda(shrinkage=0.5).solve(sums_of(x, y, 2))
    expected = torch.tensor([[4 / 3, -2 / 3], [-4 / 3, 2 / 3]]).double()
    assert torch.allclose(solution.vectors, expected)
    assert torch.allclose(solution.bias, torch.tensor([-2 / 3, -2 / 3]).double())


def test_without_shrinkage_a_singular_covariance_is_refused():
    x = torch.tensor([[2.0, 1], [0, -1], [0, 1], [-2, -1]]).double()
    with pytest.raises(ConfigError, match="the matrix of 2 features is singular; raise shrinkage"):
        lda(shrinkage=0.0).solve(sums_of(x, torch.tensor([0, 0, 1, 1]), 2))
    with pytest.raises(ConfigError, match="singular; raise strength"):
        ridge(strength=0.0).solve(sums_of(x * 0, torch.tensor([0, 0, 1, 1]), 2))


@pytest.mark.parametrize("teacher", [lda(), ridge()], ids=["lda", "ridge"])
def test_negative_eigenvalues_of_noisy_sums_count_as_zero(digits, teacher):
    x, y = digits
    sums = sums_of(x, y, 10)
    assert sums.gram is not None
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double()
    noisy = sums._replace(gram=sums.gram + 3 * (noise + noise.T))
    assert torch.linalg.eigvalsh(noisy.gram).min() < 0
    found = score(teacher.solve(noisy), x).argmax(1)
    assert (torch.tensor(found) == y).double().mean() > 0.7


def test_classes_without_rows_get_no_vector_and_change_nothing(digits):
    x, y = digits
    few = sums_of(x, y, 10)
    more = sums_of(x, y, 12)
    solution = solve_known(lda(), more)
    assert torch.equal(solution.vectors[:10], lda().solve(few).vectors)
    assert not solution.vectors[10:].any()
    assert not solve_known(lda(), Sums(few.classes * 0, few.counts * 0, None)).vectors.any()


def test_a_triangle_is_packed_and_unpacked():
    matrix = torch.tensor([[1, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert pack_triangle(matrix).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(unpack_triangle(pack_triangle(matrix), 3), matrix)


# --- a covariance of each client's own


def test_two_clients_by_hand():
    """Classes at (±1, 0). Client 0's rows differ by ±2 along x, client 1's by ±2 along y.

    W_0 = [[4, 0], [0, 0]], W_1 = [[0, 0], [0, 4]] and, since both have four rows, W = 2 · I, which
    shrinkage leaves as it is. With individual = ½, the covariances are [[3, 0], [0, 1]] and
    [[1, 0], [0, 3]].
    """
    y = torch.tensor([0, 0, 1, 1])
    first = sums_of(torch.tensor([[3.0, 0], [-1, 0], [1, 0], [-3, 0]]).double(), y, 2)
    second = sums_of(torch.tensor([[1.0, 2], [1, -2], [-1, 2], [-1, -2]]).double(), y, 2)
    pooled = Sums(*(a + b for a, b in zip(first, second, strict=True)))
    teacher = lda(shrinkage=0.5, individual=0.5)
    assert teacher.solve_own is not None
    means = torch.tensor([[1.0, 0], [-1, 0]]).double()
    for own, variance in ((first, 3.0), (second, 1.0)):
        solution = teacher.solve_own(pooled, own)
        assert torch.allclose(solution.vectors, means / variance)
        assert torch.allclose(solution.bias, torch.full((2,), -0.5 / variance).double())
    assert torch.allclose(teacher.solve(pooled).vectors, means / 2)


def split_digits(digits):
    """Return the digits of two clients: of the classes 0 to 6, and of 4 to 9."""
    x, y = digits
    chosen = (torch.arange(len(y)) % 2 == 0) & (y < 7)
    rest = ~chosen & (y > 3)
    return (x[chosen], y[chosen]), (x[rest], y[rest])


def test_the_covariance_around_the_means_of_all_follows_from_the_sums(digits):
    (x, y), (other_x, other_y) = split_digits(digits)
    pooled = sums_of(torch.cat([x, other_x]), torch.cat([y, other_y]), 10)
    means = pooled.classes / pooled.counts[:, None]
    offsets = x - means[y]
    expected = offsets.T @ offsets / len(y)
    found = measure_around(sums_of(x, y, 10), means)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_with_personal_1_only_the_covariance_of_the_client_counts(digits):
    (x, y), (other_x, other_y) = split_digits(digits)
    pooled = sums_of(torch.cat([x, other_x]), torch.cat([y, other_y]), 10)
    means = pooled.classes / pooled.counts[:, None]
    offsets = x - means[y]
    own = offsets.T @ offsets / len(y)
    expected = torch.linalg.solve(own, means.T).T
    teacher = lda(shrinkage=0.2, individual=1)
    found = solve_known(teacher, pooled, sums_of(x, y, 10))
    assert torch.allclose(found.vectors, expected, rtol=1e-8, atol=1e-8)
    assert torch.allclose(found.bias, -0.5 * (expected * means).sum(1), rtol=1e-8, atol=1e-8)


def test_the_covariance_of_all_is_shrunk_before_the_clients_own_is_added(digits):
    (x, y), (other_x, other_y) = split_digits(digits)
    pooled = sums_of(torch.cat([x, other_x]), torch.cat([y, other_y]), 10)
    means = pooled.classes / pooled.counts[:, None]
    within = (pooled.gram - means.T @ pooled.classes) / pooled.counts.sum()
    shrunk = 0.8 * within + 0.2 * within.diagonal().mean() * torch.eye(64).double()
    offsets = other_x - means[other_y]
    covariance = 0.7 * shrunk + 0.3 * offsets.T @ offsets / len(other_y)
    expected = torch.linalg.solve(covariance, means.T).T
    teacher = lda(shrinkage=0.2, individual=0.3)
    found = solve_known(teacher, pooled, sums_of(other_x, other_y, 10))
    assert torch.allclose(found.vectors, expected, rtol=1e-8, atol=1e-8)


def test_a_covariance_of_few_rows_alone_is_refused_with_what_to_do(digits):
    x, y = digits
    sums = sums_of(x, y, 10)
    with pytest.raises(ConfigError, match="64 features is singular; lower individual"):
        solve_known(lda(individual=1), sums, sums_of(x[:9] * 0, y[:9], 10))


def test_a_client_without_a_solution_of_its_own_is_sent_that_of_all():
    """Client 1 has sent nothing and client 3 has no rows; 0 and 2 have their own."""
    algorithm = with_teacher(local(), lda(individual=0.5))
    clients = [*draw_clients(3, 2), (torch.zeros(0, 2), torch.zeros(0).long())]
    uploads = uploads_of(algorithm, clients)
    server = algorithm.aggregate_once(
        algorithm.init(PARAMS, TASK), collect(uploads, numbers=[0, 2, 3])
    )
    recipients = Recipient(torch.arange(4), torch.ones(4, 3), "", torch.zeros(4))
    sent = vmap(algorithm.send, in_dims=(None, OVER_RECIPIENTS))(server, recipients)[TEACHER]
    everybody = server[TEACHER]["vectors"]
    is_common = [bool(torch.equal(vectors, everybody)) for vectors in sent["vectors"]]
    assert is_common == [False, True, False, True]
    pooled = with_teacher(local(), lda())
    expected = pooled.aggregate_once(pooled.init(PARAMS, TASK), collect(uploads))
    for name, value in expected[TEACHER].items():
        assert torch.equal(server[TEACHER][name], value)
    for row, client in enumerate((0, 2)):
        own = read_sums(uploads[row])
        wanted = solve_known(lda(individual=0.5), read_sums(*uploads), own)
        assert torch.allclose(sent["vectors"][client], wanted.vectors.float())
        assert torch.allclose(sent["bias"][client], wanted.bias.float())


def read_sums(*uploads):
    """Return the sums of some clients together."""
    classes = sum(upload[CLASS_SUMS].sums["features"].double() for upload in uploads)
    counts = sum(upload[CLASS_SUMS].weight.double() for upload in uploads)
    gram = sum(unpack_triangle(upload[GRAM].sums["gram"].double(), 2) for upload in uploads)
    return Sums(classes, counts, gram)


def test_without_personal_nothing_is_kept_by_client():
    server = with_teacher(local(), lda(individual=0)).init(PARAMS, TASK)
    assert "own_vectors" not in server[TEACHER]


# --- clients that come and go

TASK = Task(classes=3, dim=1, clients=4, seed=0, fixed=2)
PARAMS = {"w": torch.zeros(1)}


def uploads_of(algorithm, rows):
    """Return what clients with these rows, (features, classes) each, send."""
    server = algorithm.init(PARAMS, TASK)
    received = algorithm.send(server, Recipient(torch.tensor(0), torch.ones(3)))
    found = []
    for x, y in rows:
        batch = Batch(torch.empty(0), y, torch.ones(len(y)), {TEACHER: x})
        empty = torch.empty(0)
        step = Step(PARAMS, empty, empty, batch, received)
        found.append(algorithm.upload_once(step))
    return found


def collect(uploads, numbers=None, round=1):
    """Return what clients with these numbers, or 0, 1, ..., have sent once."""
    clients = torch.tensor(range(len(uploads)) if numbers is None else numbers)
    return SentOnce(stack_uploads(uploads), clients, round)


def draw_clients(seed, count):
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for _ in range(count):
        rows = int(torch.randint(3, 9, (), generator=generator))
        x = torch.randn(rows, 2, generator=generator)
        clients.append((x, torch.randint(0, 3, (rows,), generator=generator)))
    return clients


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 4), st.sampled_from([0, 0.5]), st.data())
def test_who_leaves_has_never_been_there(seed, count, individual, data):
    algorithm = with_teacher(local(), lda(individual=individual))
    uploads = uploads_of(algorithm, draw_clients(seed, count))
    leaver = data.draw(st.integers(0, count - 1))
    numbers = [number for number in range(count) if number != leaver]
    staying = collect([uploads[number] for number in numbers], numbers)
    server = algorithm.init(PARAMS, TASK)
    before = algorithm.aggregate_once(server, collect(uploads))
    after = algorithm.aggregate_once(before, staying)
    never = algorithm.aggregate_once(server, staying)
    for name, value in never[TEACHER].items():
        assert torch.equal(after[TEACHER][name], value)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_clients_together_are_one_client_with_all_rows(seed):
    algorithm = with_teacher(local(), ridge())
    clients = draw_clients(seed, 3)
    pooled = (torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]))
    server = algorithm.init(PARAMS, TASK)
    several = algorithm.aggregate_once(server, collect(uploads_of(algorithm, clients)))
    single = algorithm.aggregate_once(server, collect(uploads_of(algorithm, [pooled])))
    assert torch.allclose(several[TEACHER]["vectors"], single[TEACHER]["vectors"], atol=1e-4)


def test_padding_is_left_out():
    algorithm = with_teacher(local(), lda())
    ((x, y),) = draw_clients(1, 1)
    (plain,) = uploads_of(algorithm, [(x, y)])
    received = algorithm.send(
        algorithm.init(PARAMS, TASK), Recipient(torch.tensor(0), torch.ones(3))
    )
    mask = torch.cat([torch.ones(len(y)), torch.zeros(2)])
    padded_x = torch.cat([x, torch.full((2, 2), 7.0)])
    padded_y = torch.cat([y, torch.zeros(2).long()])
    batch = Batch(torch.empty(0), padded_y, mask, {TEACHER: padded_x})
    padded = algorithm.upload_once(Step(PARAMS, torch.empty(0), torch.empty(0), batch, received))
    assert torch.allclose(padded[CLASS_SUMS].sums["features"], plain[CLASS_SUMS].sums["features"])
    assert torch.equal(padded[CLASS_SUMS].weight, plain[CLASS_SUMS].weight)
    assert torch.allclose(padded[GRAM].sums["gram"], plain[GRAM].sums["gram"])
    assert padded[GRAM].weight == len(y)


def test_a_solution_is_sent_to_who_has_missed_it():
    algorithm = with_teacher(local(), lda())
    sent_once = collect(uploads_of(algorithm, draw_clients(2, 3)), round=4)
    server = algorithm.aggregate_once(algorithm.init(PARAMS, TASK), sent_once)

    def is_sent(heard):
        recipient = Recipient(torch.tensor(0), torch.ones(3), heard=torch.tensor(heard))
        return bool(algorithm.send(server, recipient)[TEACHER]["known"].any())

    assert is_sent(0) and is_sent(3) and is_sent(4)  # solved after the download of round 4
    assert not is_sent(5) and not is_sent(6)


def test_when_everybody_has_left_nothing_is_known():
    algorithm = with_teacher(local(), lda())
    sent_once = collect(uploads_of(algorithm, draw_clients(2, 3)))
    server = algorithm.aggregate_once(algorithm.init(PARAMS, TASK), sent_once)
    nobody = SentOnce(select_rows(sent_once.groups, torch.tensor([]).long()), torch.tensor([]), 2)
    server = algorithm.aggregate_once(server, nobody)
    assert not server[TEACHER]["vectors"].any() and not server[TEACHER]["counts"].any()


def test_beside_an_algorithm_whose_server_needs_the_groups_in_every_round_is_refused():
    algorithm = replace(local(), once=("mine",), additive=False)
    with pytest.raises(ConfigError, match="local sends mine once, so beside a teacher it needs"):
        with_teacher(algorithm, lda())


# --- predictions


def test_log_probabilities_are_added_with_a_weight():
    tree = {
        "vectors": torch.tensor([[1.0], [0.0], [9.0]]),
        "bias": torch.zeros(3),
        "known": torch.tensor([1.0, 1, 0]),
    }
    scores = score_rows(torch.tensor([[2.0]]), tree)
    assert scores.tolist() == [[2.0, 0.0, -torch.inf]]
    opinion = judge(scores, 2.0)  # the unknown class is as unlikely as the second one
    expected = torch.log_softmax(torch.tensor([[1.0, 0.0, 0.0]]), 1)
    assert torch.allclose(opinion, expected)
    nothing_known = judge(torch.full((1, 3), -torch.inf), 2.0)
    assert torch.allclose(nothing_known.exp(), torch.full((1, 3), 1 / 3))
    assert to_log_probabilities(torch.full((1, 2), -torch.inf)).tolist() == [[-torch.inf] * 2]


def test_a_weight_that_is_better_by_chance_is_not_chosen():
    """The teacher is right in one row and wrong in another: 2 is not surely better."""
    scores = torch.zeros(2, 2)
    opinion = torch.log_softmax(torch.tensor([[1.5, 0], [0.5, 0]]), 1)
    batch = Batch(torch.empty(0), torch.tensor([0, 1]), torch.ones(2))
    step = Step({}, torch.empty(0), torch.empty(0), batch, {})
    assert choose_weight(scores, opinion, step) == 1


@pytest.mark.parametrize(
    ("scores", "opinion", "weight"),
    [
        ([[3.0, 0, 0], [0, 3, 0]], [[0.0, 3, 0], [3, 0, 0]], 0.0),  # the teacher is wrong
        ([[0.1, 0, 0], [0, 0.1, 0]], [[3.0, 0, 0], [0, 3, 0]], 2.0),  # it knows more
        ([[3.0, 0, 0], [0, 3, 0]], [[0.0, 0, 0], [0, 0, 0]], 1.0),  # it says nothing
    ],
)
def test_the_weight_with_the_least_cross_entropy_is_chosen(scores, opinion, weight):
    """Of the three rows the last is padding, which would favour the opposite."""
    scores = torch.tensor([*scores, [0.0, 9, 0]])
    opinion = torch.log_softmax(torch.tensor([*opinion, [9.0, 0, 0]]), 1)
    y = torch.tensor([0, 1, 0])
    batch = Batch(torch.empty(0), y, torch.tensor([1.0, 1, 0]))
    step = Step({}, torch.empty(0), torch.empty(0), batch, {})
    assert weight in WEIGHTS
    assert choose_weight(scores, opinion, step) == weight
