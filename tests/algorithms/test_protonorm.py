"""ProtoNorm: prototypes that repel each other on a sphere."""

import math

import pytest
import torch
from helpers.engine_comparison import assert_engines_agree
from helpers.tiny import build, experiment, finished, largest_difference, send, step

from fedproto.algorithms.protonorm import repel
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Task

TASK = Task(classes=3, dim=2, clients=2, seed=0)
PARAMS = {
    "body.w": torch.eye(2, dtype=torch.float64),
    "head.v": torch.ones(2, 3, dtype=torch.float64),
}
X = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
Y = torch.tensor([0, 0, 1])
ONES = torch.ones(3, dtype=torch.float64)
MIX = {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8}


def after_a_round(**options):
    algorithm = build("protonorm", **options)
    server = algorithm.init(PARAMS, TASK)
    received = send(algorithm, server, torch.ones(3))
    steps = [step(PARAMS, received, X[rows], Y[rows]) for rows in ([0, 1], [2])]
    return algorithm.aggregate(server, stack_uploads([algorithm.upload(each) for each in steps]))


def test_one_step_of_two_classes_by_hand():
    """(1, 0) and (0, 1) are sqrt 2 apart: the force on the first is (1, -1)/2."""
    new = after_a_round(scale=10, server_steps=1, server_lr=0.2)
    length = math.hypot(1.1, 0.1)
    assert new["prototypes"][0].tolist() == pytest.approx([11 / length, -1 / length])
    assert new["prototypes"][1].tolist() == pytest.approx([-1 / length, 11 / length])
    assert new["prototypes"][2].tolist() == [0, 0]
    assert new["known"].tolist() == [1, 1, 0]


def test_a_second_step_goes_on_with_momentum_and_a_smaller_rate():
    first = repel(torch.eye(2, dtype=torch.float64), ONES[:2], 1, 0.2, 0.5)
    difference = first[0] - first[1]
    velocity = 0.5 * torch.tensor([0.1, -0.1]) + 0.2 * 0.95 * difference / difference.square().sum()
    moved = first[0] + velocity
    second = repel(torch.eye(2, dtype=torch.float64), ONES[:2], 2, 0.2, 0.5)
    assert torch.allclose(second[0], moved / moved.norm())


def test_without_steps_means_are_only_scaled():
    assert after_a_round(scale=3, server_steps=0)["prototypes"].tolist()[:2] == [[3, 0], [0, 3]]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_classes_end_as_far_apart_as_they_can(count):
    """A regular simplex, whose cosines are -1/(n - 1), from directions close together."""
    generator = torch.Generator().manual_seed(0)
    start = 1 + 0.1 * torch.rand(count, 5, generator=generator, dtype=torch.float64)
    spread = repel(start, torch.ones(count, dtype=torch.float64), 500, 0.1, 0.9)
    cosines = spread @ spread.T
    others = ~torch.eye(count, dtype=torch.bool)
    expected = torch.full_like(cosines, -1 / (count - 1))
    assert torch.allclose(cosines[others], expected[others], atol=1e-3)


def test_unknown_classes_do_not_push():
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    known = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    with_third = repel(vectors, known, 5, 0.1, 0.9)
    assert torch.equal(with_third[:2], repel(vectors[:2], known[:2], 5, 0.1, 0.9))


def test_equal_prototypes_stay_finite():
    assert torch.isfinite(repel(ONES[:, None] * ONES, ONES, 10, 0.1, 0.9)).all()


def test_clients_train_as_in_fedproto():
    """Nothing is known in the first round, so both methods train the same models."""
    own, fedproto = experiment("protonorm", rounds=1), experiment("fedproto", rounds=1)
    own.execute()
    fedproto.execute()
    assert largest_difference(own, fedproto) == 0


def test_a_server_that_knows_no_class_says_so():
    algorithm = build("protonorm")
    note = "protonorm: no class has a prototype yet, so none is predicted"
    assert algorithm.notes(algorithm.init(PARAMS, TASK)) == [note]


def test_prototypes_are_scored_like_fedprotos():
    _, result = finished("protonorm", rounds=1)
    assert {"head", "prototype", "both"} <= result.accuracy.keys()


def test_architectures_may_differ_in_every_engine():
    assert_engines_agree("protonorm", **MIX)
