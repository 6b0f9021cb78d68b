"""Modules that draw by themselves, as by `F.dropout`, are noticed before they are trained."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedproto

X = np.random.default_rng(0).random((24, 6), np.float32)
Y = np.arange(24) % 3
CLIENTS = [(X, Y), (X, Y)]


class Net(nn.Module):
    """Embeds in eight values; `drop` is what it does to them in training."""

    def __init__(self, drop):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.layer = nn.Dropout(0.5)
        self.drop = drop
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        features = self.drop(self, self.body(x))
        return features, self.head(features)


def functional(net, x):
    return F.dropout(x, 0.3, training=net.training)


def twice(net, x):
    return net.layer(net.layer(x))


def noise(net, x):
    return x + torch.rand_like(x) if net.training else x


@pytest.mark.parametrize("drop", [functional, twice, noise])
@pytest.mark.parametrize("engine", ["reference", "vectorised"])
def test_draws_of_torchs_generator_are_noticed(drop, engine):
    net = Net(drop)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="Net draws random numbers of its own in training"):
        fedproto.run(dataset=CLIENTS, model=net, rounds=1, engine=engine)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("drop", [lambda net, x: x, lambda net, x: net.layer(x)])
def test_draws_that_are_handed_in_are_not(drop):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedproto.run(dataset=CLIENTS, model=Net(drop), rounds=1, engine="reference")
