"""FedAvgM and FedAdam on paper: two clients, one weight, and its running mean."""

import pytest
import torch
from helpers.tiny import build, experiment, finished, largest_difference, send

from fedproto.core.tensors import flatten_state, make_group, stack_uploads
from fedproto.core.types import Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=2, seed=0)
START = {"w": torch.tensor(10.0).double(), "bn.running_mean": torch.tensor(2.0).double()}


def after(algorithm, server, *values):
    """The server's state after clients with 3 and 1 samples sent these weights."""
    uploads = []
    for count, value in zip((3.0, 1.0), values, strict=True):
        tree = {"w": torch.tensor(value).double(), "bn.running_mean": torch.tensor(4.0).double()}
        uploads.append({"model": make_group(tree, torch.tensor(count).double())})
    return algorithm.aggregate(server, stack_uploads(uploads))


def test_fedavgm_by_hand():
    """The means are 11 and 12: Δ = 1, v = 1, w = 10.5; then Δ = 1.5, v = 2.4, w = 11.7."""
    algorithm = build("fedavgm", server_lr=0.5, server_momentum=0.9)
    server = after(algorithm, algorithm.init(START, TASK), 10.0, 14.0)
    assert server["model"]["w"].item() == pytest.approx(10.5)
    assert server["momentum"]["w"].item() == pytest.approx(1.0)
    server = after(algorithm, server, 11.0, 15.0)
    assert server["momentum"]["w"].item() == pytest.approx(2.4)
    assert server["model"]["w"].item() == pytest.approx(10.5 + 0.5 * 2.4)


def test_fedadams_first_two_steps_by_hand():
    """Δ = 1: m = 0.1, v = 0.99 · τ² + 0.01; then the mean is 12, and Δ is what is missing to it."""
    algorithm = build("fedadam", server_lr=0.2, tau=0.1)
    server = after(algorithm, algorithm.init(START, TASK), 10.0, 14.0)
    square = 0.99 * 0.01 + 0.01
    first = 10 + 0.2 * 0.1 / (square**0.5 + 0.1)
    assert server["mean"]["w"].item() == pytest.approx(0.1)
    assert server["square"]["w"].item() == pytest.approx(square)
    assert server["model"]["w"].item() == pytest.approx(first)
    server = after(algorithm, server, 11.0, 15.0)
    mean = 0.9 * 0.1 + 0.1 * (12 - first)
    square = 0.99 * square + 0.01 * (12 - first) ** 2
    second = first + 0.2 * mean / (square**0.5 + 0.1)
    assert server["model"]["w"].item() == pytest.approx(second)


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_running_statistics_are_averaged_and_only_the_model_is_sent(name):
    algorithm = build(name)
    server = algorithm.init(START, TASK)
    kept = {key for key in flatten_state(server) if not key.startswith("model/")}
    assert not any("running" in key for key in kept)
    server = after(algorithm, server, 10.0, 14.0)
    assert server["model"]["bn.running_mean"].item() == 4
    received = send(algorithm, server, torch.ones(2))
    assert received.keys() == START.keys()
    assert received["w"] is server["model"]["w"]


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_the_server_of_a_run_that_was_stopped_goes_on_with_its_moments(name, tmp_path):
    whole, _ = finished(name, clients=2)
    stopped, _ = finished(name, clients=2, rounds=2)
    resumed = experiment(name, clients=2)
    resumed.progress.restore(stopped.progress.export(), 2)
    resumed.engine.restore(0, stopped.engine.export(0))
    resumed.execute()
    assert largest_difference(whole, resumed) == 0
    theirs = flatten_state(resumed.progress.server)
    for key, value in flatten_state(whole.progress.server).items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize(
    "choice",
    [
        "fedavgm(server_momentum=1)",
        "fedavgm(server_lr=0)",
        "fedadam(beta1=1)",
        "fedadam(beta2=-0.1)",
        "fedadam(tau=0)",
        "fedadam(server_lr=-1)",
    ],
)
def test_bad_options_are_refused(choice):
    option = choice.partition("(")[2].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{option} must be a number"):
        experiment(choice)
