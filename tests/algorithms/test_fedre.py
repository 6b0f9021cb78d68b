"""FedRE: one mixture of class means per client, and a head that is trained on them."""

import math

import pytest
import torch
from helpers.engine_comparison import assert_engines_agree
from helpers.tiny import build, experiment, finished, send, step

from fedproto.algorithms.fedgh import head_loss
from fedproto.algorithms.fedre import mixture_loss
from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Task

TASK = Task(classes=3, dim=2, clients=2, seed=0)
PARAMS = {
    "body.w": torch.eye(2, dtype=torch.float64),
    "head.v": torch.tensor([[1.0, 0], [0, 1], [0, 0]], dtype=torch.float64),
}
HEAD = {"head.v": PARAMS["head.v"]}
X = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
Y = torch.tensor([0, 0, 1])
MIX = {"model": "mlp(hidden=5),mlp(hidden=9)", "dim": 8}


def client_step(rows, key=0):
    params = PARAMS | {"head.v": PARAMS["head.v"].T}
    received = send(build("fedre"), build("fedre").init(PARAMS, TASK), torch.ones(3))
    return step(params, received, X[rows], Y[rows])._replace(key=torch.tensor(key))


def upload(rows, key=0):
    return build("fedre").upload(client_step(rows, key))


def test_the_upload_is_one_mixture_with_its_labels():
    """The class means are (2, 0) and (0, 4)."""
    group = upload([0, 1, 2])["mixture"]
    first, second, third = group.sums["labels"].tolist()
    assert first + second == pytest.approx(1) and third == 0
    assert 0 < first < 1
    assert group.sums["embedding"].tolist() == pytest.approx([2 * first, 4 * second])
    assert float(group.weight) == 1


def test_another_round_or_client_draws_other_weights():
    first, second = (upload([0, 1, 2], key)["mixture"].sums["labels"] for key in (1, 2))
    assert not torch.allclose(first, second)
    assert torch.equal(first, upload([0, 1, 2], 1)["mixture"].sums["labels"])


def test_a_client_of_one_class_sends_its_mean():
    group = upload([0, 1])["mixture"]
    assert group.sums["embedding"].tolist() == pytest.approx([2, 0])
    assert group.sums["labels"].tolist() == pytest.approx([1, 0, 0])


def test_the_servers_loss_by_hand():
    """The logits of (1, 2) are (1, 2, 0)."""
    labels = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    embeddings = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    normaliser = math.log(math.exp(1) + math.exp(2) + 1)
    expected = 0.25 * (normaliser - 1) + 0.75 * (normaliser - 2)
    assert float(mixture_loss(HEAD, embeddings, labels)) == pytest.approx(expected)


def test_with_clients_of_one_class_the_loss_is_fedghs():
    embeddings = torch.tensor([[1.0, 2.0], [0.5, 0.1]], dtype=torch.float64)
    classes = torch.tensor([2, 0])
    labels = torch.nn.functional.one_hot(classes, 3).double()
    ours = mixture_loss(HEAD, embeddings, labels)
    assert float(ours) == pytest.approx(2 * float(head_loss(HEAD, embeddings, classes)))


def test_the_gradient_of_the_servers_loss_is_its_finite_difference():
    labels = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    embeddings = torch.tensor([[1.0, 2.0], [0.5, 0.1]], dtype=torch.float64)

    def loss(weight):
        return mixture_loss({"head.v": weight}, embeddings, labels)

    assert torch.autograd.gradcheck(loss, (PARAMS["head.v"].clone().requires_grad_(),))


def test_a_round_of_two_clients_by_hand():
    """One step of the server, whose gradient is taken by autograd and applied here."""
    algorithm = build("fedre", server_lr=0.1)
    server = algorithm.init(PARAMS, TASK)
    uploads = [upload([0, 1, 2], 5), upload([2], 6)]
    new = algorithm.aggregate(server, stack_uploads(uploads))
    weight = PARAMS["head.v"].clone().requires_grad_()
    sent = [each["mixture"].sums for each in uploads]
    embeddings = torch.stack([each["embedding"] for each in sent])
    labels = torch.stack([each["labels"] for each in sent])
    mixture_loss({"head.v": weight}, embeddings, labels).backward()
    assert torch.allclose(new["head"]["head.v"], (weight - 0.1 * weight.grad).detach())
    assert int(new["round"]) == 1


def test_a_client_uploads_one_vector_whatever_classes_it_has():
    run, result = finished("fedre")
    classes, dim = len(result.data["classes"]), run.federation.task.dim
    sent = {client["communication"]["values_up"] for client in result.clients}
    assert sent == {3 * (dim + classes)}  # in three rounds


def test_the_server_keeps_its_head_without_uploads():
    run = experiment("fedre", lost_uploads=1.0, rounds=1)
    before = {name: value.clone() for name, value in run.progress.server["head"].items()}
    run.execute()
    assert all(
        torch.equal(value, before[name]) for name, value in run.progress.server["head"].items()
    )


def test_architectures_may_differ_in_every_engine():
    assert_engines_agree("fedre", **MIX)
