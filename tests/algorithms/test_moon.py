"""MOON's contrastive loss by hand, and what its clients keep."""

import math

import numpy as np
import pytest
import torch
from helpers.engine_comparison import RAGGED, assert_engines_agree, make_clients, with_batch_norm
from helpers.tiny import build, experiment, finished, scored_states, send, step

from fedproto.core.tensors import split_client
from fedproto.core.types import Task

TASK = Task(classes=2, dim=2, clients=2, seed=0)
IDENTITY = torch.eye(2, dtype=torch.float64)
PARAMS = {"body.w": IDENTITY, "head.v": IDENTITY}
X = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
Y = torch.tensor([0, 1])


def matrix(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_the_contrast_of_two_samples_by_hand():
    """The global model swaps the axes, the previous one keeps the first and drops the second."""
    received = {"body.w": matrix([[0.0, 1.0], [1.0, 0.0]]), "head.v": IDENTITY}
    previous = {"body.w": matrix([[1.0, 0.0], [0.0, 0.0]]), "head.v": IDENTITY}
    now = step(PARAMS, received, X, Y, state={"previous": previous})
    terms = build("moon", mu=2.0, temperature=0.5).loss(now)
    # Cosines to (global, previous): of (1, 0) with (0, 1) and (1, 0), of (3, 4) with (4, 3) and
    # (3, 0).
    cosines = [(0.0, 1.0), (24 / 25, 3 / 5)]
    losses = []
    for near, far in cosines:
        shares = [math.exp(near / 0.5), math.exp(far / 0.5)]
        losses.append(-math.log(shares[0] / sum(shares)))
    assert float(terms["regulariser"]) == pytest.approx(2 * np.mean(losses))


def test_a_first_round_has_the_contrast_log_2_and_no_gradient_of_it():
    """The previous model and the global one are the same then."""
    algorithm = build("moon")
    received = send(algorithm, algorithm.init(PARAMS, TASK), torch.ones(2))
    params = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    now = step(params, received, X, Y, state=algorithm.client_init(PARAMS, TASK))
    contrast = algorithm.loss(now)["regulariser"]
    assert contrast.item() == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad(contrast, [params["body.w"]])
    assert gradient.abs().max() < 1e-12


def test_a_client_keeps_the_model_it_trained():
    run, _ = finished("moon", rounds=2)
    for state in run.engine.states[0]:
        params, kept = split_client(state)
        assert all(torch.equal(kept["previous"][name], value) for name, value in params.items())


def test_without_contrast_it_is_fedavg_to_the_last_bit():
    settings = {"participation": 0.5, "lost_uploads": 0.3, "stragglers": 0.5}
    first = finished("moon(mu=0)", **settings)[0]
    second = finished("fedavg", **settings)[0]
    for state, other in zip(scored_states(first), scored_states(second), strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)


def test_the_contrast_changes_the_model_from_round_2_on():
    runs = {}
    for rounds in (1, 2):
        for name in ("moon", "fedavg"):
            run = experiment(name, rounds=rounds)
            run.execute()
            runs[name, rounds] = scored_states(run)[0]["body.fc1.weight"]
    assert (runs["moon", 1] - runs["fedavg", 1]).abs().max() < 1e-12
    assert (runs["moon", 2] - runs["fedavg", 2]).abs().max() > 1e-6


def test_engines_agree_on_models_with_batch_norm():
    assert_engines_agree(
        "moon",
        modules=with_batch_norm(),
        data=make_clients(RAGGED),
        last_batch="keep",
        rounds=2,
    )
