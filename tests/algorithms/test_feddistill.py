"""FedDistill on paper: two clients, two classes, and both distances."""

import math

import pytest
import torch
from helpers.tiny import build, experiment, finished, send, step

from fedproto.core.tensors import stack_uploads
from fedproto.core.types import Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=2, seed=0)
IDENTITY = {"body.w": torch.eye(2).double(), "head.v": torch.eye(2).double()}


def client_step(rows, y, received):
    """A step whose logits are the rows themselves."""
    x = torch.tensor(rows, dtype=torch.float64)
    return step(IDENTITY, received, x, torch.tensor(y))


def test_two_clients_by_hand():
    """Class 0: means (2, 0) of two samples and (0, 4) of one give (1, 2). Class 1: one holder."""
    algorithm = build("feddistill")
    server = algorithm.init(IDENTITY, TASK)
    received = send(algorithm, server, torch.ones(2))
    first = algorithm.upload(client_step([[1, 0], [3, 0], [5, 6]], [0, 0, 1], received))
    second = algorithm.upload(client_step([[0, 4]], [0], received))
    server = algorithm.aggregate(server, stack_uploads([first, second]))
    assert server["logits"].tolist() == [[1, 2], [5, 6]]
    assert server["known"].tolist() == [1, 1]


def test_a_class_in_no_upload_keeps_its_logits():
    algorithm = build("feddistill")
    server = {"logits": torch.tensor([[7.0, 8], [9, 9]]), "known": torch.ones(2)}
    received = send(algorithm, server, torch.ones(2))
    upload = algorithm.upload(client_step([[0, 4]], [0], received))
    server = algorithm.aggregate(server, stack_uploads([upload]))
    assert server["logits"].tolist() == [[0, 4], [9, 9]]


def test_the_loss_by_hand():
    """Logits (1, 0) of class 0 are (1, 2) away from (2, 2): γ (1 + 4) / 2, over two samples.

    The other sample is of class 1, of which there are no logits yet.
    """
    received = {"logits": torch.tensor([[2.0, 2.0], [9.0, 9.0]]), "known": torch.tensor([1.0, 0])}
    now = client_step([[1, 0], [5, 6]], [0, 1], received)
    terms = build("feddistill", gamma=0.4).loss(now)
    assert terms["regulariser"].item() == pytest.approx(0.4 * 2.5 / 2)
    terms = build("feddistill", gamma=0.4, distil="cross-entropy").loss(now)
    entropy = -(math.log(1 / (1 + math.exp(-1))) + math.log(1 / (1 + math.e))) / 2
    assert terms["regulariser"].item() == pytest.approx(0.4 * entropy / 2)


def test_a_client_is_sent_the_logits_of_its_own_classes_only():
    server = {"logits": torch.ones(2, 2), "known": torch.ones(2)}
    received = send(build("feddistill"), server, torch.tensor([0.0, 1.0]))
    assert received["known"].tolist() == [0, 1]


def test_the_cross_entropy_has_the_gradient_of_its_finite_difference():
    received = {"logits": torch.tensor([[2.0, 1.0], [0.5, 3.0]]).double(), "known": torch.ones(2)}
    algorithm = build("feddistill", distil="cross-entropy")
    x = torch.tensor([[1.0, 0.5], [-1.0, 2.0]], dtype=torch.float64)

    def loss(w):
        now = step(IDENTITY | {"body.w": w}, received, x, torch.tensor([0, 1]))
        return sum(algorithm.loss(now).values())

    assert torch.autograd.gradcheck(loss, (IDENTITY["body.w"].clone().requires_grad_(),))


def test_clients_of_different_architectures_agree_in_both_engines():
    """Only logits travel, so the models may differ; a class is a row of 10 logits."""
    mixed = {"model": "mlp(hidden=5),mlp(hidden=9)", "rounds": 2}
    reference, result = finished("feddistill", **mixed)
    vectorised, _ = finished("feddistill", engine="vectorised", **mixed)
    theirs = vectorised.engine.export(0)
    for name, value in reference.engine.export(0).items():
        assert torch.allclose(value, theirs[name], rtol=0, atol=1e-12), name
    logits = vectorised.progress.server["logits"]
    assert torch.allclose(reference.progress.server["logits"], logits, rtol=0, atol=1e-12)
    held = int(reference.federation.own_classes.sum())
    assert result.communication["values_per_round"] == 10 * held


@pytest.mark.parametrize("options", ["gamma=-1", "distil=l7"])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=options.partition("=")[0]):
        experiment(f"feddistill({options})")
