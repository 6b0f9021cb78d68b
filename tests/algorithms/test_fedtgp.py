"""FedTGP: the prototypes that the server trains, its margin and its loss."""

import math

import pytest
import torch
from helpers.engine_comparison import assert_engines_agree
from helpers.tiny import SETTINGS, build, experiment, finished, send, step

import fedproto
from fedproto.algorithms.fedtgp import adaptive_margin, generate, margin_loss
from fedproto.core.tensors import flatten_state, stack_uploads
from fedproto.core.types import Task
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder

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
    return stack_uploads(
        [algorithm.upload(step(PARAMS, received, X[rows], Y[rows])) for rows in ([0, 1], [2])]
    )


def test_the_margin_is_the_largest_distance_between_class_means():
    prototypes = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 5.0], [1.0, 1.0]]).double()
    classes = torch.tensor([0, 0, 1, 2])
    # The means are (1, 0), (1, 5) and (1, 1).
    assert float(adaptive_margin(prototypes, classes, 4, 100.0)) == pytest.approx(5)
    assert float(adaptive_margin(prototypes, classes, 4, 3.0)) == 3
    assert float(adaptive_margin(prototypes[:2], classes[:2], 4, 3.0)) == 0
    assert float(adaptive_margin(prototypes[:0], classes[:0], 4, 3.0)) == 0


def test_the_servers_loss_by_hand():
    generator = identity_generator([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    prototypes = torch.tensor([[0.0, 4.0]], dtype=torch.float64)
    margin = torch.tensor(0.5, dtype=torch.float64)
    # The distances are 4, 5 and 0; the margin is added to that of the own class.
    expected = -math.log(math.exp(-4.5) / (math.exp(-4.5) + math.exp(-5) + 1))
    loss = margin_loss(generator, prototypes, torch.tensor([0]), margin)
    assert float(loss) == pytest.approx(expected)


def test_the_gradient_of_the_servers_loss_is_its_finite_difference():
    algorithm = build("fedtgp")
    generator = algorithm.init(PARAMS, TASK)["generator"]
    prototypes = torch.tensor([[1.0, 0.5], [0.3, 2.0]], dtype=torch.float64)
    margin = torch.tensor(0.7, dtype=torch.float64)
    leaves = tuple(value.clone().requires_grad_() for value in generator.values())

    def loss(*values):
        params = dict(zip(generator, values, strict=True))
        return margin_loss(params, prototypes, torch.tensor([0, 2]), margin)

    assert torch.autograd.gradcheck(loss, leaves)


def test_a_round_of_two_clients_by_hand():
    """One step of the server, whose gradient is taken by autograd and applied here."""
    algorithm = build("fedtgp", server_epochs=1, server_lr=0.1)
    server = algorithm.init(PARAMS, TASK)
    new = algorithm.aggregate(server, two_uploads(algorithm, server))
    prototypes = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    classes = torch.tensor([0, 1])
    margin = torch.tensor(math.sqrt(20), dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in server["generator"].items()}
    margin_loss(leaves, prototypes, classes, margin).backward()
    for name, leaf in leaves.items():
        assert torch.allclose(new["generator"][name], (leaf - 0.1 * leaf.grad).detach())
    assert torch.equal(new["prototypes"], generate(new["generator"]))
    assert new["known"].tolist() == [1, 1, 0]
    assert int(new["round"]) == 1


def test_training_brings_a_prototype_nearest_to_those_of_its_class():
    algorithm = build("fedtgp", server_epochs=300, server_lr=0.05)
    server = algorithm.init(PARAMS, TASK)
    new = algorithm.aggregate(server, two_uploads(algorithm, server))
    sent = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    assert torch.cdist(sent, new["prototypes"]).argmin(1).tolist() == [0, 1]


def test_aggregation_depends_on_its_arguments_only():
    algorithm = build("fedtgp", server_epochs=2, server_batch=1)
    server = algorithm.init(PARAMS, TASK)
    uploads = two_uploads(algorithm, server)
    first = flatten_state(algorithm.aggregate(server, uploads))
    again = flatten_state(algorithm.aggregate(server, uploads))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_classes_keep_being_known_without_further_uploads():
    algorithm = build("fedtgp", server_epochs=1)
    server = algorithm.init(PARAMS, TASK) | {"known": torch.tensor([0.0, 0.0, 1.0]).double()}
    assert algorithm.aggregate(server, two_uploads(algorithm, server))["known"].tolist() == [1] * 3


def test_a_server_that_knows_no_class_says_so():
    algorithm = build("fedtgp")
    server = algorithm.init(PARAMS, TASK)
    note = "fedtgp: no class has a prototype yet, so none is predicted"
    assert algorithm.notes(server) == [note]
    assert algorithm.notes(algorithm.aggregate(server, two_uploads(algorithm, server))) == []


def test_a_run_without_uploads_keeps_its_note():
    run = experiment("fedtgp", lost_uploads=1.0, rounds=1)
    assert "fedtgp: no class has a prototype yet" in str(run.execute().metrics[-1]["notes"])


def test_another_seed_draws_another_generator():
    tasks = [TASK._replace(seed=seed) for seed in (0, 1)]
    first, second = [build("fedtgp").init(PARAMS, task)["generator"] for task in tasks]
    assert all((value != second[name]).all() for name, value in first.items())


def test_architectures_may_differ_in_every_engine():
    assert_engines_agree("fedtgp", **MIX)


def test_prototypes_are_scored_like_fedprotos():
    _, result = finished("fedtgp", rounds=1)
    assert {"head", "prototype", "prototype_own"} <= result.accuracy.keys()


def test_a_run_may_start_from_the_prototypes_of_another(tmp_path):
    settings = SETTINGS | {"algorithm": "fedtgp", "server_epochs": 2, "rounds": 1}
    given = fedproto.run(**settings, out=tmp_path / "first").prototypes
    start = experiment("fedtgp", prototypes=str(tmp_path / "first")).progress.server
    assert torch.equal(start["prototypes"], given["prototypes"])
    fedproto.run(**settings, prototypes=tmp_path / "first", out=tmp_path / "second")
    again, _ = reopen(RunFolder.open(tmp_path / "second"))
    assert int(again.progress.server["round"]) == 1
