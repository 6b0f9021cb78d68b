"""Frozen bodies: features are computed once, and results are those of the slow way."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.engine_comparison import finish, largest_difference, prepare
from torch import nn

import fedproto
from fedproto.errors import ConfigError, RunFolderError
from fedproto.models import Classifier
from fedproto.runs.frozen_bodies import freeze_bodies

GENERATOR = np.random.default_rng(0)
X = GENERATOR.random((60, 1, 8, 8), np.float32)
Y = np.arange(60) % 3
X[:, 0, 0, :3] += np.eye(3, dtype=np.float32)[Y]
CLIENTS = [(X[:40], Y[:40]), (X[20:], Y[20:])]
SETTINGS = {"rounds": 3, "lr": 0.1, "checkpoint_every": 1, "device": "cpu"}


def make_convolutional():
    """A module of torchvision's shape: convolutions, pooling, dropout, a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def make_classifier():
    """A body, and a head with dropout."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh())
    return Classifier(body, nn.Sequential(nn.Dropout(0.5), nn.Linear(10, 3)))


def make_wrapped():
    return fedproto.wrap(make_convolutional(), head="4")


def without_gradients(module):
    """Return the module for the slow way: its body has no gradients, and runs at every step."""
    module = copy.deepcopy(module)
    module.body.requires_grad_(False)
    return module


@pytest.mark.parametrize("engine", ["reference", "vectorised", "processes"])
@pytest.mark.parametrize(
    ("make", "algorithm", "dim"),
    [
        (make_wrapped, "fedproto", 5),
        (make_wrapped, "fedavg", None),
        (make_classifier, "fedproto", None),
        (make_classifier, "fedper", None),
    ],
)
def test_results_are_those_of_the_slow_way(engine, make, algorithm, dim):
    settings = {"data": CLIENTS, "clients": 2, "dim": dim, "batch": 8}
    _, slow = finish(prepare(algorithm, "reference", modules=without_gradients(make()), **settings))
    _, fast = finish(prepare(algorithm, engine, modules=make(), freeze="body", **settings))
    for state, expected in zip(fast.states, slow.states, strict=True):
        assert largest_difference(state, {name: expected[name] for name in state}) <= 1e-10
        assert state.keys() == expected.keys()
    for line, expected in zip(fast.metrics, slow.metrics, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-10)
    assert fast.accuracy == slow.accuracy


def test_nothing_of_the_body_travels_or_changes():
    module = make_wrapped()
    frozen = fedproto.run(
        algorithm="fedavg", dataset=CLIENTS, model=module, freeze="body", **SETTINGS
    )
    head = sum(value.numel() for value in module.head.parameters())
    assert frozen.communication["values_per_round"] == 2 * head
    for name, value in module.body.named_parameters():
        assert torch.equal(frozen.states[0][f"body.{name}"], value)


def test_statistics_stay_and_dropout_of_the_body_drops_nothing():
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Dropout(0.9))
    module = Classifier(body, nn.Linear(6, 3))
    with torch.no_grad():
        module(torch.from_numpy(X))  # statistics that are not those of a new layer
    result = fedproto.run(dataset=CLIENTS, model=module, freeze="body", **SETTINGS)
    assert torch.equal(result.states[0]["body.2.running_mean"], module.body[2].running_mean)
    classifier = fedproto.Classifier.of(result, client=0)
    features, _ = module.eval()(torch.from_numpy(X))
    assert torch.allclose(classifier.trained.forward_raw(X).features, features, atol=1e-6)


def test_the_projection_of_a_built_in_model_is_trained():
    settings = {"dataset": "digits", "clients": 2, "shots": 5, "rounds": 2, "dim": 7}
    result = fedproto.run(model="mlp(hidden=8,width=6)", freeze="body", **settings)
    first, second = result.states
    assert torch.equal(first["body.fc1.weight"], second["body.fc1.weight"])
    assert not torch.equal(first["body.project.weight"], second["body.project.weight"])


def test_a_frozen_run_is_resumed_classified_and_exported_as_a_whole(tmp_path):
    whole = fedproto.run(
        dataset=CLIENTS, model=make_wrapped(), freeze="body", out=tmp_path / "a", **SETTINGS
    )
    rounds = fedproto.stream(
        dataset=CLIENTS, model=make_wrapped(), freeze="body", out=tmp_path / "b", **SETTINGS
    )
    next(rounds)
    rounds.close()
    other = make_wrapped()
    torch.nn.init.zeros_(other.body[0].weight)
    with pytest.raises(RunFolderError, match="other"):
        fedproto.resume(tmp_path / "b", dataset=CLIENTS, model=other)
    resumed = fedproto.resume(tmp_path / "b", dataset=CLIENTS, model=make_wrapped())
    read = fedproto.resume(tmp_path / "a")
    for one, two, three in zip(whole.states, resumed.states, read.states, strict=True):
        assert one.keys() == two.keys() == three.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert all(torch.equal(one[name], three[name]) for name in one)
    at_hand = fedproto.Classifier.of(whole, client=1)
    stored = fedproto.Classifier.of(tmp_path / "a", client=1, module=make_wrapped())
    exported = fedproto.Classifier.load(
        whole.export(tmp_path / "c", client=1, onnx=False), module=make_wrapped()
    )
    for classifier in (stored, exported):
        assert np.array_equal(classifier.predict_proba(X), at_hand.predict_proba(X))
        assert np.allclose(classifier.calibration_, at_hand.calibration_, atol=1e-6)


class Own(nn.Module):
    """A module without a body."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x):
        return x.flatten(1), self.layer(x.flatten(1))


def test_images_that_change_in_every_epoch_are_refused():
    run = prepare("fedproto", "reference", data=CLIENTS, modules=make_wrapped(), clients=2)
    augmented = [replace(member, border=torch.zeros(1)) for member in run.federation.members]
    with pytest.raises(ConfigError, match="cropped and mirrored anew in every epoch"):
        freeze_bodies(replace(run.federation, members=augmented))


def test_modules_without_a_body_and_other_parts_are_refused():
    with pytest.raises(ConfigError, match="models with a body and a head, and client 0's Own"):
        fedproto.run(dataset=CLIENTS, model=Own(), freeze="body", **SETTINGS)
    with pytest.raises(ConfigError, match="unknown value of freeze 'head'"):
        fedproto.run(dataset=CLIENTS, model=make_wrapped(), freeze="head", **SETTINGS)
