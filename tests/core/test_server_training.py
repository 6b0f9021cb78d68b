"""A server's own gradient steps: by hand, and what they depend on."""

import pytest
import torch

from fedproto.core import rng
from fedproto.core.server_training import list_single_values, train_on_server
from fedproto.core.types import Group

TARGETS = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
START = {"w": torch.tensor(0.0, dtype=torch.float64)}
OPTIONS = {"key": rng.key(0, "test"), "epochs": 1, "batch": 4, "lr": 0.25}


def loss(params, rows):
    return (params["w"] - TARGETS[rows]).square().mean()


def test_one_step_on_all_samples_by_hand():
    """The gradient of the mean of (w - t)² at 0 is -2 times the mean of t, which is 3."""
    trained = train_on_server(START, loss, 4, **OPTIONS)
    assert float(trained["w"]) == pytest.approx(0.25 * 2 * 3)
    assert float(START["w"]) == 0


def test_two_epochs_of_two_batches_are_four_steps():
    """In the order that is drawn from the key and the number of the epoch."""
    w = 0.0
    for epoch in range(2):
        order = rng.permutation(rng.key(OPTIONS["key"], "server training", epoch), 4)
        assert sorted(order.tolist()) == [0, 1, 2, 3]
        for rows in (order[:3], order[3:]):
            w -= 0.25 * 2 * (w - float(TARGETS[rows].mean()))
    trained = train_on_server(START, loss, 4, **OPTIONS | {"epochs": 2, "batch": 3})
    assert float(trained["w"]) == pytest.approx(w)


def test_the_same_key_gives_the_same_bits_and_another_key_another_order():
    options = OPTIONS | {"batch": 1}
    first = train_on_server(START, loss, 4, **options)["w"]
    torch.manual_seed(7)  # torch's own generator plays no part
    assert torch.equal(first, train_on_server(START, loss, 4, **options)["w"])
    others = set()
    for seed in range(5):
        key = rng.key(seed, "other")
        others.add(float(train_on_server(START, loss, 4, **options | {"key": key})["w"]))
    assert len(others) > 1


@pytest.mark.parametrize(("samples", "epochs"), [(0, 3), (4, 0)])
def test_nothing_to_do_changes_nothing(samples, epochs):
    trained = train_on_server(START, loss, samples, **OPTIONS | {"epochs": epochs})
    assert torch.equal(trained["w"], START["w"])


def test_gradients_are_computed_where_they_are_switched_off():
    with torch.no_grad():
        trained = train_on_server(START, loss, 4, **OPTIONS)
    assert float(trained["w"]) == pytest.approx(1.5)
    assert not trained["w"].requires_grad


def test_a_parameter_that_the_loss_does_not_use_stays():
    params = START | {"idle": torch.tensor(5.0, dtype=torch.float64)}
    assert float(train_on_server(params, loss, 4, **OPTIONS)["idle"]) == 5


def test_single_values_are_those_with_a_weight():
    weight = torch.tensor([[2.0, 0.0, 1.0], [0.0, 4.0, 0.0]])
    values = torch.arange(12.0).reshape(2, 3, 2)
    group = Group({"means": weight[..., None] * values}, weight)
    singles, classes = list_single_values(group, "means")
    assert classes.tolist() == [0, 2, 1]
    assert singles.tolist() == [[0, 1], [4, 5], [8, 9]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_trains_in_the_same_order():
    on_gpu = {name: value.cuda() for name, value in START.items()}

    def loss_there(params, rows):
        return (params["w"] - TARGETS.cuda()[rows]).square().mean()

    trained = train_on_server(on_gpu, loss_there, 4, **OPTIONS | {"batch": 1})
    expected = train_on_server(START, loss, 4, **OPTIONS | {"batch": 1})
    assert trained["w"].is_cuda
    assert float(trained["w"]) == pytest.approx(float(expected["w"]))
