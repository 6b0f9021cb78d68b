"""Runs by two engines, compared number by number, and small data and models for them."""

import functools
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.tiny import SETTINGS
from sklearn.datasets import load_digits
from torch import nn

from fedproto.config.settings import configure
from fedproto.core.tensors import flatten_state
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.vectorised import layers, recordings
from fedproto.engines.vectorised.engine import VectorisedEngine
from fedproto.models.resnet18 import Block
from fedproto.runs.experiment import Experiment

#: Everything that can go wrong in a round, with more than one epoch.
TROUBLE = {"clients": 6, "epochs": 2, "participation": 0.6, "stragglers": 0.5, "lost_uploads": 0.3}
#: Sizes that a batch of four does not divide; none leaves a last batch of one, as BatchNorm needs.
RAGGED = (10, 7, 15, 3, 12)
FULL = (12, 8, 12, 4, 4)


# --- runs


def prepare(algorithm, engine, data=None, modules=None, **settings):
    """Return an experiment with the settings of helpers.tiny and these ones."""
    config = configure(SETTINGS | {"algorithm": algorithm, "engine": engine} | settings)[0]
    return Experiment.prepare(config, data=data, modules=modules)


def finish(run):
    """Return an experiment and its result."""
    return run, run.execute()


def run_both(algorithm, **settings):
    """Return the finished runs of the reference engine and of the vectorised one."""
    reference = prepare(algorithm, "reference", **settings)
    vectorised = prepare(algorithm, "vectorised", **settings)
    assert type(reference.engine) is ReferenceEngine
    assert type(vectorised.engine) is VectorisedEngine, vectorised.notices
    with recording_at_once():
        return finish(reference), finish(vectorised)


def recording_at_once():
    """Return a context in which the first call is recorded and the third one replayed."""
    return mock.patch.object(recordings, "CALLS_BEFORE_RECORDING", 0)


def largest_difference(a, b):
    """Return the largest difference between two trees of equal names, shapes and types."""
    assert a.keys() == b.keys()
    largest = 0.0
    for name, value in a.items():
        other = b[name]
        assert (value.shape, value.dtype) == (other.shape, other.dtype)
        assert torch.isfinite(value).all() and torch.isfinite(other).all()
        difference = float((value.double() - other.double()).abs().max())
        largest = max(largest, difference)
    return largest


def assert_close(found, expected, where=""):
    """Compare metrics, however nested: numbers with a tolerance, everything else exactly."""
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for name, value in found.items():
            assert_close(value, expected[name], f"{where} {name}")
    elif isinstance(found, list):
        for number, (value, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(value, other, f"{where} {number}")
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=0, abs=1e-6, nan_ok=True), where
    else:
        assert found == expected, where


def assert_same_clients(clients, other_clients):
    """Compare the clients of two results: metrics with a tolerance, everything else exactly."""
    for client, other in zip(clients, other_clients, strict=True):
        assert client | {"metrics": 0} == other | {"metrics": 0}
        assert_close(client["metrics"], other["metrics"])


def assert_equal(first, second, tolerance=1e-8):
    """Compare clients, server, ledger, losses and accuracies of two finished runs."""
    run, result = first
    other_run, other_result = second
    for state, other_state in zip(result.states, other_result.states, strict=True):
        assert largest_difference(state, other_state) <= tolerance
    progress = run.progress
    other_progress = other_run.progress
    server = flatten_state(progress.server)
    assert largest_difference(server, flatten_state(other_progress.server)) <= tolerance
    assert torch.equal(progress.ledger.counts, other_progress.ledger.counts)
    last_round = progress.latest_uploads.last_round
    assert torch.equal(last_round, other_progress.latest_uploads.last_round)
    for line, other_line in zip(result.metrics, other_result.metrics, strict=True):
        for name in ("loss", "loss_std"):
            assert line[name] == pytest.approx(other_line[name], rel=0, abs=tolerance)
        not_exact = {"loss": 0, "loss_std": 0, "seconds": 0}
        assert line | not_exact == other_line | not_exact
    assert_same_clients(result.clients, other_result.clients)


def assert_engines_agree(algorithm, tolerance=1e-8, **settings):
    """Compare a run of the reference engine with one of the vectorised engine; return both."""
    reference, vectorised = run_both(algorithm, **settings)
    assert_equal(reference, vectorised, tolerance)
    return reference, vectorised


def assert_falls_back(notice, **settings):
    """Check that the reference engine trains a model instead, and that one notice says why."""
    run = prepare("fedproto", "vectorised", **settings)
    assert isinstance(run.engine, ReferenceEngine)
    (sentence,) = run.notices
    assert notice in sentence
    assert sentence.endswith(": the reference engine trains one client after the other")
    assert "\n" not in sentence
    reference = prepare("fedproto", "reference", **settings)
    assert reference.notices == []
    assert_equal(finish(reference), finish(run), 0.0)


def convolve_by_columns(info, in_dims, x, weight, bias, stride, padding, dilation, groups):
    """Convolve as a GPU would; in place of the vmap of a stacked convolution."""
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    return layers.convolve(x, weight, bias, stride, padding), 0


# --- data


@functools.cache
def load_images():
    bunch = load_digits()
    return (bunch.images / 16).astype(np.float64), bunch.target


def make_clients(sizes, tests=(9, 4, 6, 5, 7), classes=4):
    """Return arrays for each client: `sizes` 8x8 digits for training, and `tests` for testing."""
    images, labels = load_images()
    chosen = labels < classes
    images = images[chosen]
    labels = labels[chosen]
    clients = []
    start = 0
    for size, test in zip(sizes, tests, strict=False):
        middle = start + size
        end = middle + test
        training = (images[start:middle], labels[start:middle])
        clients.append((*training, images[middle:end], labels[middle:end]))
        start = end
    return clients


def make_noise(sizes, shape=(3, 16, 16)):
    """Return arrays for each client: noise of two classes, and two test images."""
    rng = np.random.default_rng(0)
    clients = []
    for size in sizes:
        x = rng.normal(size=(size, *shape))
        x_test = rng.normal(size=(2, *shape))
        clients.append((x, np.arange(size) % 2, x_test, np.arange(2)))
    return clients


# --- models


class Net(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def network(*body_layers, seed=0, classes=4, shape=(1, 8, 8)):
    """Return a module with these layers as a body that embeds in six values, and a head."""
    torch.manual_seed(seed)
    for layer in nn.Sequential(*body_layers).modules():
        if hasattr(layer, "reset_parameters"):  # it was drawn before the seed was set
            layer.reset_parameters()
    with torch.no_grad():
        width = nn.Sequential(*body_layers).eval()(torch.zeros(1, *shape)).flatten(1).shape[1]
    body = nn.Sequential(*body_layers, nn.Flatten(), nn.Linear(width, 6), nn.Tanh())
    return Net(body, nn.Linear(6, classes))


def with_dropout(**options):
    return network(
        nn.Conv2d(1, 3, 3),
        nn.Dropout2d(0.4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        **options,
    )


def with_batch_norm(seed=0, classes=4, **options):
    return network(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3, **options),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
        seed=seed,
        classes=classes,
    )


def with_flat_batch_norm(seed=0, **options):
    norm = nn.BatchNorm1d(10, **options)
    return network(nn.Flatten(), nn.Linear(64, 10), norm, nn.ReLU(), seed=seed)


def narrow_resnet(strides=(2, 2), classes=2, shape=(3, 16, 16)):
    """Return a ResNet with the layers of ResNet18 but few channels, which trains much faster."""
    return network(
        nn.Conv2d(shape[0], 4, 7, strides[0], 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(3, strides[1], 1),
        nn.Sequential(Block(4, 4, 1), Block(4, 4, 1)),
        nn.Sequential(Block(4, 6, 2), Block(6, 6, 1)),
        nn.Sequential(Block(6, 8, 2), Block(8, 8, 1)),
        nn.AdaptiveAvgPool2d(1),
        classes=classes,
        shape=shape,
    )
