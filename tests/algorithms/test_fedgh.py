"""FedGH: the head that the server trains on the clients' prototypes."""

import pytest
import torch
from helpers.engine_comparison import assert_engines_agree
from helpers.tiny import build, experiment, finished, scored_states, send, step

from fedproto.algorithms.fedgh import head_loss
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=2, seed=0)
EYE = torch.eye(2, dtype=torch.float64)
ZERO = torch.zeros(2, 2, dtype=torch.float64)
PARAMS = {"body.w": EYE, "head.v": ZERO}
X = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
Y = torch.tensor([0, 0, 1])
MIX = {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8}


def test_a_round_of_two_clients_by_hand():
    """With logits of 0, a step moves the head by lr times the mean of (one-hot − 1/2) ⊗ C."""
    algorithm = build("fedgh", server_lr=0.3)
    server = algorithm.init(PARAMS, TASK)
    received = send(algorithm, server, torch.ones(2))
    uploads = [algorithm.upload(step(PARAMS, received, X[rows], Y[rows])) for rows in ([0, 1], [2])]
    new = algorithm.aggregate(server, stack_uploads(uploads))
    # Prototypes: (2, 0) of class 0 from the first client, (0, 4) of class 1 from the second.
    expected = 0.3 / 2 * torch.tensor([[0.5 * 2, -0.5 * 4], [-0.5 * 2, 0.5 * 4]])
    assert torch.allclose(new["head"]["head.v"], expected.double())
    assert int(new["round"]) == 1
    assert torch.equal(new["seed"], server["seed"])


def test_clients_count_equally_whatever_their_numbers_of_samples():
    algorithm = build("fedgh", server_lr=0.3)
    server = algorithm.init(PARAMS, TASK)
    received = send(algorithm, server, torch.ones(2))
    few = [step(PARAMS, received, X[rows], Y[rows]) for rows in ([0], [2])]
    many = [step(PARAMS, received, X[rows], Y[rows]) for rows in ([0, 0, 0], [2])]
    heads = []
    for steps in (few, many):
        uploads = stack_uploads([algorithm.upload(each) for each in steps])
        heads.append(algorithm.aggregate(server, uploads)["head"]["head.v"])
    assert torch.allclose(*heads)


def test_the_gradient_of_the_servers_loss_is_its_finite_difference():
    prototypes = torch.randn(5, 3, dtype=torch.float64)
    classes = torch.tensor([0, 1, 3, 3, 2])

    def loss(weight, bias):
        return head_loss({"head.weight": weight, "head.bias": bias}, prototypes, classes)

    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (weight, bias))


def test_without_server_epochs_the_head_stays_as_it_was():
    run, _ = finished("fedgh(server_epochs=0)")
    initial = run.federation.members[0].initial
    for name, value in run.progress.server["head"].items():
        assert torch.equal(value, initial[name])


def test_a_client_is_scored_with_its_own_body_and_the_global_head():
    run, _ = finished("fedgh")
    states = scored_states(run)
    head, body = "head.fc3.weight", "body.fc1.weight"
    assert torch.equal(states[0][head], states[1][head])
    assert not torch.equal(states[0][head], run.engine.states[0][0][head])
    assert not torch.equal(states[0][body], states[1][body])


def test_bodies_may_differ_in_every_engine():
    assert_engines_agree("fedgh", **MIX)


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"body.w": EYE}, "this one has no `head`"),
        ({"head.a.w": EYE, "head.b.w": EYE}, r"this one has \['head.a.w', 'head.b.w'\]"),
    ],
)
@pytest.mark.parametrize("name", ["fedgh", "fednh"])
def test_a_head_that_is_not_one_linear_layer_is_refused(name, params, found):
    sentence = f"^{name} needs a model whose head is one linear layer; {found}$"
    with pytest.raises(ConfigError, match=sentence):
        build(name).init(params, TASK)


@pytest.mark.parametrize("option", ["server_lr=0", "server_batch=0", "server_epochs=-1"])
@pytest.mark.parametrize("name", ["fedgh", "fedtgp"])
def test_options_out_of_bounds_are_refused(name, option):
    key = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"algorithm {name}'s {key} must be a"):
        experiment(f"{name}({option})")
