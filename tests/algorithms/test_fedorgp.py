"""FedORGP: directions that the server trains to be orthogonal."""

import pytest
import torch
from helpers.engine_comparison import assert_engines_agree
from helpers.tiny import build, finished, send, step

from fedproto.algorithms.fedorgp import orthogonality_loss
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Task

TASK = Task(classes=3, dim=2, clients=2, seed=0)
EYE = torch.eye(2, dtype=torch.float64)
PARAMS = {"body.w": EYE, "head.v": torch.ones(2, 3, dtype=torch.float64)}
X = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
Y = torch.tensor([0, 0, 1])
MIX = {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8}


def identity_generator(embedding):
    """A generator whose layers change nothing of an embedding without negative values."""
    zeros = torch.zeros(2, dtype=torch.float64)
    layers = {"weight1": EYE, "bias1": zeros, "weight2": EYE, "bias2": zeros}
    return {"embedding": torch.tensor(embedding, dtype=torch.float64)} | layers


def two_uploads(algorithm, server):
    received = send(algorithm, server, torch.ones(3))
    steps = [step(PARAMS, received, X[rows], Y[rows]) for rows in ([0, 1], [2])]
    return stack_uploads([algorithm.upload(each) for each in steps])


def test_the_servers_loss_by_hand():
    """(3, 4) has cosines 0.6, 0.8 and 1 to (1, 0), (0, 2) and (6, 8)."""
    generator = identity_generator([[1.0, 0.0], [0.0, 2.0], [6.0, 8.0]])
    prototypes = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    loss = orthogonality_loss(generator, prototypes, torch.tensor([0]), gamma=0.5)
    assert float(loss) == pytest.approx((1 - 0.6) + 0.5 * (0.8 + 1) / 2)


def test_orthogonal_prototypes_in_the_right_directions_have_no_loss():
    generator = identity_generator([[5.0, 0.0], [0.0, 0.1]])
    prototypes = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    loss = orthogonality_loss(generator, prototypes, torch.tensor([0, 1]), gamma=1.0)
    assert float(loss) == pytest.approx(0)


def test_the_gradient_of_the_servers_loss_is_its_finite_difference():
    generator = build("fedorgp").init(PARAMS, TASK)["generator"]
    prototypes = torch.tensor([[1.0, 0.5], [0.3, 2.0]], dtype=torch.float64)
    leaves = tuple(value.clone().requires_grad_() for value in generator.values())

    def loss(*values):
        params = dict(zip(generator, values, strict=True))
        return orthogonality_loss(params, prototypes, torch.tensor([0, 2]), 0.7)

    assert torch.autograd.gradcheck(loss, leaves)


def test_a_clients_loss_is_one_minus_the_cosine():
    """Of (1, 0), (3, 0) and (0, 4) to the prototypes (3, 4), (3, 4) and (0, 1)."""
    received = {
        "prototypes": torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64),
        "known": torch.ones(3, dtype=torch.float64),
    }
    terms = build("fedorgp", lam=2).loss(step(PARAMS, received, X, Y))
    assert terms["regulariser"].item() == pytest.approx(2 * (0.4 + 0.4 + 0) / 3)


def test_a_round_of_two_clients_by_hand():
    """One step of the server, whose gradient is taken by autograd and applied here."""
    algorithm = build("fedorgp", server_lr=0.1)
    server = algorithm.init(PARAMS, TASK)
    new = algorithm.aggregate(server, two_uploads(algorithm, server))
    sent = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in server["generator"].items()}
    orthogonality_loss(leaves, sent, torch.tensor([0, 1]), 1.0).backward()
    for name, leaf in leaves.items():
        assert torch.allclose(new["generator"][name], (leaf - 0.1 * leaf.grad).detach())
    assert torch.allclose(new["prototypes"].norm(dim=1), torch.ones(3, dtype=torch.float64))
    assert new["known"].tolist() == [1, 1, 0]


def test_training_brings_every_class_to_its_own_axis():
    algorithm = build("fedorgp", server_epochs=500, server_lr=0.1)
    server = algorithm.init(PARAMS, TASK)
    new = algorithm.aggregate(server, two_uploads(algorithm, server))
    assert torch.allclose(new["prototypes"][:2], EYE, atol=0.05)


def test_the_nearest_prototype_has_the_largest_cosine():
    _, result = finished("fedorgp", rounds=1)
    assert {"head", "prototype", "both"} <= result.accuracy.keys()
    lengths = result.prototypes["prototypes"].norm(dim=1)
    assert torch.allclose(lengths, torch.ones_like(lengths))


def test_architectures_may_differ_in_every_engine():
    assert_engines_agree("fedorgp", **MIX)
