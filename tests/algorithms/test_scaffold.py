"""SCAFFOLD on paper, against FedAvg, and where FedAvg stops short of the minimum."""

from dataclasses import replace

import pytest
import torch
from helpers.tiny import build, experiment, finished, largest_difference, send, step

from fedproto.algorithms import path_length, scaffold
from fedproto.core.local_training import train
from fedproto.core.tensors import flatten_state, split_client, stack_uploads
from fedproto.core.types import Batch, Step, Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=4, seed=0)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def after_training(w, samples, received, control, steps=2, lr=0.5, momentum=0.0):
    """The step of a client whose one weight, and running mean, ended at w."""
    batch = Batch(torch.empty(0), torch.zeros(samples).long(), torch.ones(samples).double())
    params = {"w": number(w), "bn.running_mean": number(w)}
    empty = torch.empty(0).double()
    return Step(
        params,
        empty,
        empty,
        batch,
        received,
        {"control": {"w": number(control)}},
        lr=number(lr),
        steps=torch.tensor(steps),
        momentum=number(momentum),
    )


def test_two_clients_by_hand():
    """From 10, two steps of 0.5 to 8 and to 9 were gradients of 2 and 1; two of four spoke."""
    algorithm = build("scaffold")
    server = algorithm.init({"w": number(10.0), "bn.running_mean": number(10.0)}, TASK)
    received = send(algorithm, server, torch.ones(2))
    first = after_training(8.0, 3, received, control=0.0)
    second = after_training(9.0, 1, received, control=0.0)
    assert algorithm.client_update(first)["control"]["w"].item() == 2
    assert algorithm.client_update(second)["control"]["w"].item() == 1
    uploads = stack_uploads([algorithm.upload(first), algorithm.upload(second)])
    server = algorithm.aggregate(server, uploads)
    assert server["model"]["w"].item() == (3 * 8 + 9) / 4
    assert server["model"]["bn.running_mean"].item() == (3 * 8 + 9) / 4
    assert server["control"] == {"w": number((2 + 1) / 4)}
    # In the next round the first client ends at 8 once more: 0.25 in two steps of 0.5.
    received = send(algorithm, server, torch.ones(2))
    first = after_training(8.0, 3, received, control=2.0)
    upload = algorithm.upload(first)["control"]
    assert upload.sums["w"].item() == pytest.approx(0.25 - 0.75)
    assert algorithm.client_update(first)["control"]["w"].item() == pytest.approx(1.5)


def test_the_server_moves_weights_by_its_rate_and_averages_running_statistics():
    algorithm = build("scaffold", server_lr=1.5)
    server = algorithm.init({"w": number(10.0), "bn.running_mean": number(10.0)}, TASK)
    received = send(algorithm, server, torch.ones(2))
    upload = algorithm.upload(after_training(8.0, 3, received, control=0.0))
    server = algorithm.aggregate(server, stack_uploads([upload]))
    assert server["model"]["w"].item() == pytest.approx(7)
    assert server["model"]["bn.running_mean"].item() == 8


def test_the_correction_by_hand():
    """⟨c − c_i, w − w_g⟩ over eight weights: (3 − 1) · 0.5 each."""
    start = {"body.w": torch.eye(2).double(), "head.v": torch.eye(2).double()}
    params = {name: value + 0.5 for name, value in start.items()}
    ones = {name: torch.ones_like(value) for name, value in start.items()}
    received = {"model": start, "control": {name: 3 * value for name, value in ones.items()}}
    now = step(params, received, torch.eye(2).double(), torch.tensor([0, 1]))
    terms = build("scaffold").loss(now._replace(state={"control": ones}))
    assert terms["regulariser"].item() == pytest.approx(8 * 2 * 0.5)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_path_length_is_that_of_sgd_along_a_constant_gradient(steps, momentum):
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        moved += 0.5 * velocity
    now = after_training(0.0, 1, {}, 0.0, steps, 0.5, momentum)
    assert path_length(now).item() == pytest.approx(moved, rel=1e-3 if momentum == 1 else 1e-9)


def test_the_control_variate_of_a_constant_gradient_is_that_gradient():
    """Whatever the momentum, here 0.5: without regard to it, the variate would be twice that."""
    run = experiment("scaffold")
    received = run.algorithm.send(run.progress.server, run.federation.recipient(0))

    def loss(now):
        return {"supervised": 3 * sum(value.sum() for value in now.params.values())}

    algorithm = replace(run.algorithm, loss=loss)
    member, training = run.federation.members[0], run.engine.trainings[0]
    outcome = train(member, algorithm, run.engine.states[0][0], received, training, 1)
    for value in split_client(outcome.state)[1]["control"].values():
        assert torch.allclose(value, torch.full_like(value, 3.0))


def without_variates():
    """SCAFFOLD whose control variates stay at zero."""
    algorithm = build("scaffold")

    def upload(now):
        groups = algorithm.upload(now)
        control = groups["control"]
        zeros = {name: torch.zeros_like(value) for name, value in control.sums.items()}
        return groups | {"control": control._replace(sums=zeros)}

    return replace(algorithm, upload=upload, client_update=lambda now: now.state)


@pytest.mark.parametrize("faults", [{}, {"participation": 0.5, "stragglers": 0.5}])
def test_without_control_variates_it_is_fedavg_to_the_last_bit(monkeypatch, faults):
    frozen = without_variates()
    monkeypatch.setattr(scaffold, "scaffold", lambda: frozen)
    ours, _ = finished("scaffold", **faults)
    theirs, _ = finished("fedavg", **faults)
    assert ours.algorithm is frozen
    assert largest_difference(ours, theirs) == 0


def follow(algorithm, rounds):
    """The server's weight after rounds of two clients with losses 1/2 w² and 5 (w − 1)²."""
    curvatures, minima = (1.0, 10.0), (0.0, 1.0)
    start = {"w": number(3.0)}
    server = algorithm.init(start, TASK._replace(clients=2))
    kept = [algorithm.client_init(start, TASK) for _ in range(2)]
    for _ in range(rounds):
        received = send(algorithm, server, torch.ones(2))
        uploads = []
        for client in range(2):
            w = algorithm.adopt(start, received)["w"].clone().requires_grad_()
            for _ in range(5):
                now = after_training(0.0, 1, received, 0.0)._replace(
                    params={"w": w},
                    state=kept[client],
                    logits=torch.zeros(1, 2).double(),
                    steps=torch.tensor(5),
                    lr=number(0.05),
                )
                loss = curvatures[client] / 2 * (w - minima[client]).square()
                loss = loss + sum(algorithm.loss(now).values())
                (gradient,) = torch.autograd.grad(loss, w)
                w = (w - 0.05 * gradient).detach().requires_grad_()
            now = now._replace(params={"w": w.detach()})
            uploads.append(algorithm.upload(now))
            kept[client] = algorithm.client_update(now)
        server = algorithm.aggregate(server, stack_uploads(uploads))
    return send(algorithm, server, torch.ones(2))


def test_it_finds_the_minimum_of_the_sum_where_fedavg_does_not():
    """The minimum of 1/2 w² + 5 (w − 1)² is at 10/11; drift keeps FedAvg away from it."""
    assert follow(build("scaffold"), 200)["model"]["w"].item() == pytest.approx(10 / 11, abs=1e-9)
    assert abs(follow(build("fedavg"), 200)["w"].item() - 10 / 11) > 0.05


@pytest.mark.parametrize("name", ["scaffold", "ditto"])
def test_a_run_that_was_stopped_goes_on_with_what_its_clients_keep(name):
    whole, _ = finished(name, clients=2)
    stopped, _ = finished(name, clients=2, rounds=2)
    resumed = experiment(name, clients=2)
    resumed.progress.restore(stopped.progress.export(), 2)
    resumed.engine.restore(0, stopped.engine.export(0))
    resumed.execute()
    ours = whole.engine.export(0) | flatten_state(whole.progress.server)
    theirs = resumed.engine.export(0) | flatten_state(resumed.progress.server)
    assert any("client/" in key for key in ours)
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_a_server_rate_of_zero_is_refused():
    with pytest.raises(ConfigError, match="server_lr must be a number above 0"):
        experiment("scaffold(server_lr=0)")
