"""Ditto on paper, and its two models against Local's and FedAvg's."""

import pytest
import torch
from helpers.tiny import build, experiment, finished, send, step

from fedproto.core.tensors import split_client, stack_uploads
from fedproto.core.types import Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=2, seed=0)
PARAMS = {"body.w": torch.eye(2).double(), "head.v": torch.eye(2).double()}
X = torch.eye(2).double()
Y = torch.tensor([0, 1])


def shifted(amount):
    return {name: value + amount for name, value in PARAMS.items()}


def test_two_clients_by_hand():
    """The copies of the global model are at w + 1 and w + 4, with 2 and 1 samples: w + 2.

    The personal models, at w + 100, are not sent.
    """
    algorithm = build("ditto")
    server = algorithm.init(PARAMS, TASK)
    received = send(algorithm, server, torch.ones(2))
    uploads = []
    for amount, samples in ((1.0, 2), (4.0, 1)):
        kept = {"global": shifted(amount)}
        now = step(shifted(100.0), received, X[:samples], Y[:samples], state=kept)
        uploads.append(algorithm.upload(now))
    server = algorithm.aggregate(server, stack_uploads(uploads))
    for name, value in shifted(2.0).items():
        assert torch.allclose(server[name], value)


def test_the_losses_by_hand():
    """The personal model is 0.5 from the global one in eight weights: λ/2 · 8/4."""
    algorithm = build("ditto", lam=0.3)
    now = step(shifted(0.5), PARAMS, X, Y)
    assert algorithm.loss(now)["regulariser"].item() == pytest.approx(0.3 / 2 * 2)
    personal, copy = algorithm.phases
    assert personal.loss is None
    assert not personal.model
    assert copy.model == "global"
    assert copy.loss(now).keys() == {"supervised"}


def test_the_copy_starts_from_what_was_received_and_the_personal_model_from_itself():
    algorithm = build("ditto")
    kept = algorithm.client_start({"global": shifted(7.0)}, shifted(3.0))
    assert torch.equal(kept["global"]["body.w"], shifted(3.0)["body.w"])
    assert algorithm.adopt(PARAMS, shifted(3.0)) is PARAMS


@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_the_global_model_is_fedavgs(engine):
    """With one batch of everything: the copy is trained second, on other draws than FedAvg's."""
    ours, _ = finished("ditto", batch=1000, engine=engine)
    theirs, _ = finished("fedavg", batch=1000)
    for name, value in theirs.progress.server.items():
        assert torch.allclose(ours.progress.server[name], value, rtol=0, atol=1e-12)


def test_lambda_draws_the_personal_models_to_the_global_one():
    """Their distance to the copies of the global model falls as λ grows."""
    distances = []
    for lam in (0.0, 1.0, 10.0):
        run, _ = finished(f"ditto(lam={lam})", clients=2)
        total = 0.0
        for state in run.engine.states[0]:
            personal, kept = split_client(state)
            for name, value in kept["global"].items():
                total += float((personal[name] - value).square().sum())
        distances.append(total)
    assert distances[0] > distances[1] > distances[2]


def test_a_negative_lambda_is_refused():
    with pytest.raises(ConfigError, match="lam must be a number of at least 0"):
        experiment("ditto(lam=-1)")
