"""FedDyn's round by hand, and what its server and its clients agree on."""

import pytest
import torch
from helpers.engine_comparison import RAGGED, assert_engines_agree, make_clients, with_batch_norm
from helpers.tiny import build, finished, send, step

from fedproto.core.tensors import split_client, stack_uploads
from fedproto.core.types import Task

TASK = Task(classes=2, dim=2, clients=4, seed=0)
PARAMS = {
    "body.w": torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64),
    "head.v": torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64),
}
X = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
Y = torch.tensor([0, 1])


def moved(by):
    return {name: value + by for name, value in PARAMS.items()}


def test_a_round_of_two_of_four_clients_by_hand():
    algorithm = build("feddyn", mu=0.5)
    server = algorithm.init(PARAMS, TASK)
    received = send(algorithm, server, torch.ones(2))
    kept = algorithm.client_init(PARAMS, TASK)
    steps = [step(moved(by), received, X, Y, state=kept) for by in (1.0, 3.0)]
    linear_terms = [algorithm.client_update(each)["linear"]["body.w"] for each in steps]
    assert torch.equal(linear_terms[0], torch.full_like(linear_terms[0], -0.5))
    assert torch.equal(linear_terms[1], torch.full_like(linear_terms[1], -1.5))
    new = algorithm.aggregate(server, stack_uploads([algorithm.upload(each) for each in steps]))
    for name, value in PARAMS.items():
        # h = -0.5/4 (1 + 3), the mean of -0.5, -1.5, 0 and 0; w = mean(1, 3) - h/0.5 further on.
        assert torch.allclose(new["h"][name], torch.full_like(value, -0.5))
        assert torch.allclose(new["model"][name], value + 3)


def test_the_loss_by_hand():
    algorithm = build("feddyn", mu=0.5)
    linear = {name: torch.full_like(value, 0.25) for name, value in PARAMS.items()}
    now = step(moved(1.0), PARAMS, X, Y, state={"linear": linear})
    # 0.5/2 times 8 differences of 1, minus 0.25 times the sum of all weights, (2.5 + 4) + (0 + 4).
    regulariser = algorithm.loss(now)["regulariser"]
    assert float(regulariser) == pytest.approx(0.25 * 8 - 0.25 * 10.5)


def test_a_client_without_samples_counts_like_the_others():
    algorithm = build("feddyn")
    received = send(algorithm, algorithm.init(PARAMS, TASK), torch.ones(2))
    now = step(PARAMS, received, X, Y, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert float(algorithm.upload(now)["model"].weight) == 1


def test_clients_that_do_not_move_are_a_fixed_point():
    algorithm = build("feddyn")
    server = algorithm.init(PARAMS, TASK)
    received = send(algorithm, server, torch.ones(2))
    now = step(PARAMS, received, X, Y, state=algorithm.client_init(PARAMS, TASK))
    new = algorithm.aggregate(server, stack_uploads([algorithm.upload(now)] * 3))
    assert all(torch.equal(new["model"][name], value) for name, value in PARAMS.items())
    assert not any(value.any() for value in new["h"].values())


def test_h_is_the_mean_of_all_clients_linear_terms():
    run, _ = finished("feddyn", participation=0.5, stragglers=0.5, rounds=4)
    server = run.progress.server
    linear_terms = [split_client(state)[1]["linear"] for state in run.engine.states[0]]
    for name, value in server["h"].items():
        mean = torch.stack([linear[name] for linear in linear_terms]).mean(0)
        assert value.abs().max() > 0
        assert torch.allclose(value, mean, rtol=0, atol=1e-12)


def test_engines_agree_on_models_with_batch_norm():
    assert_engines_agree(
        "feddyn",
        modules=with_batch_norm(),
        data=make_clients(RAGGED),
        last_batch="keep",
        rounds=2,
    )
