"""Models that cannot be stacked are trained by the reference engine."""

import warnings

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto
from helpers.engine_comparison import (
    RAGGED,
    assert_falls_back,
    make_clients,
    prepare,
    with_batch_norm,
)
from torch import nn

import fedproto as package


class Choosy(nn.Module):
    """Branches on the values of its features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        features = self.first(x.flatten(1))
        features = torch.tanh(features) if features.sum() > 0 else torch.relu(features)
        return features, self.head(features)


def test_a_model_that_looks_at_values_is_trained_by_the_reference_engine():
    assert_falls_back(
        "Choosy cannot be run for many clients at once", modules=Choosy(), data=make_clients(RAGGED)
    )


@pytest.mark.parametrize(
    "sizes",
    [
        (9, 8),
        (10, 9, 8),
        pytest.param((8, 9)),
    ],
)
def test_batchnorm_over_a_last_batch_of_one_image_is_left_to_the_reference_engine(sizes):
    settings = {"modules": with_batch_norm(), "last_batch": "keep", "data": make_clients(sizes)}
    assert_falls_back("Net has BatchNorm, and a client's last batch has one image", **settings)


class Mixing(nn.Module):
    """Lets the images of a batch affect each other."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.fc = nn.Linear(64, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        features = self.fc(x.flatten(1))
        features = features - features.mean(0) if self.how == "mean" else features * len(x)
        return features, self.head(features)


@pytest.mark.parametrize("how", ["mean", "size"])
def test_a_model_whose_images_affect_each_other_is_not_stacked(how):
    assert_falls_back(
        "Mixing scores an image differently", modules=Mixing(how), data=make_clients(RAGGED)
    )


def test_batchnorm_over_other_last_batches_is_stacked():
    settings = {"modules": with_batch_norm(), "last_batch": "keep"}
    assert not prepare("local", "vectorised", data=make_clients((8, 10)), **settings).notices
    assert not prepare(
        "local", "vectorised", data=make_clients((8, 9)), modules=with_batch_norm()
    ).notices  # dropped
    assert not prepare(
        "local", "vectorised", data=make_clients((8, 9)), last_batch="keep"
    ).notices  # no BatchNorm


def test_run_warns_of_an_obstacle_in_one_sentence():
    settings = {
        "dataset": make_clients(RAGGED),
        "model": Choosy(),
        "rounds": 1,
        "engine": "vectorised",
    }
    with pytest.warns(UserWarning, match="Choosy cannot be run for many clients at once") as caught:
        package.run(**settings)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package.run(**settings | {"engine": "reference"})


def test_the_command_line_prints_the_obstacle(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(40, 3, 16, 16)), y=np.arange(40) % 2)
    model = ("--model", 'resnet18(strides="1,1")')
    data = ("--dataset", f"npz:{tmp_path / 'a.npz'}", "--ways", "1", "--shots", "5", "--stdev", "0")
    training = ("--clients", "2", "--rounds", "1", "--batch", "4", "--set", "last_batch=keep")
    out = ("--engine", "vectorised", "--out", tmp_path / "run")
    answer = fedproto("run", *data, *model, *training, *out)
    assert answer.code == 0, answer.err
    obstacle = 'resnet18(strides="1,1") has BatchNorm, and a client\'s last batch has one image'
    assert f"{obstacle}: the reference" in answer.out
