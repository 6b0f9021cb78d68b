"""Closed forms over tables and texts, whose feature map is chosen by the kind of data."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedproto
from fedproto.config.settings import configure
from fedproto.core.federation import Examples
from fedproto.errors import ConfigError
from fedproto.feature_maps import FeatureMap
from fedproto.runs.experiment import Experiment
from fedproto.runs.fixed_features import add_fixed_features


def test_a_table_is_solved_over_fourier_features():
    """Two classes that no straight line separates: inside and outside of a circle."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 2)).astype(np.float32)
    y = (np.square(x).sum(1) > 1.4).astype(np.int64)
    clients = []
    for start in range(0, 600, 200):
        train = slice(start, start + 100)
        test = slice(start + 100, start + 200)
        clients.append((x[train], y[train], x[test], y[test]))
    settings = {"algorithm": "closed-form", "dataset": clients, "model": "mlp", "rounds": 1}
    result = fedproto.run(**settings)
    assert result.accuracy["teacher"]["mean"] > 0.9
    straight = fedproto.run(**settings, feature_map="flat")
    assert straight.accuracy["teacher"]["mean"] < 0.7


def test_texts_are_solved_over_hashed_words(tmp_path):
    words = {"good": ["fine", "great", "lovely"], "bad": ["poor", "dull", "awful"]}
    generator = np.random.default_rng(0)
    lines = ["text,label"]
    for label, own_words in words.items():
        for _ in range(40):
            chosen = generator.choice([*own_words, "film", "plot", "the"], 5)
            lines.append(f"{' '.join(chosen)},{label}")
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(lines) + "\n")
    result = fedproto.run(algorithm="closed-form", dataset=f"text:{path}", clients=2, rounds=1)
    assert result.accuracy["teacher"]["mean"] > 0.8


def test_clients_whose_features_differ_in_number_are_refused():
    """With the inputs themselves as features, images of two sizes cannot be added."""
    generator = np.random.default_rng(0)
    clients = []
    for side in (8, 10):
        x = generator.normal(size=(12, 1, side, side)).astype(np.float32)
        y = np.arange(12) % 2
        clients.append((x[:8], y[:8], x[8:], y[8:]))
    with pytest.raises(ConfigError, match="flat has 64 values for client 0 and 100 for client 1"):
        fedproto.run(
            algorithm="closed-form", dataset=clients, model="mlp", feature_map="flat", rounds=1
        )


def test_features_of_training_rows_that_nobody_has_are_not_computed():
    """Of 40 training rows two clients have 12; of the test rows all are needed."""
    generator = np.random.default_rng(0)
    train_x = torch.from_numpy(generator.normal(size=(40, 1, 8, 8)).astype(np.float32))
    test_x = torch.from_numpy(generator.normal(size=(10, 1, 8, 8)).astype(np.float32))
    (config,) = configure({"algorithm": "closed-form", "dataset": "digits", "clients": 2})
    federation = Experiment.prepare(config).federation
    members = []
    seen = []
    for number, member in enumerate(federation.members):
        rows = torch.arange(6) + 20 * number
        train = Examples(train_x, torch.zeros(40, dtype=torch.long), rows)
        test = Examples(test_x, torch.zeros(10, dtype=torch.long), torch.arange(3))
        members.append(replace(member, train=train, test=test, validation=None))

    def build(inputs):
        def compute(x):
            seen.append(len(x))
            return x.flatten(1)

        return compute

    counted = FeatureMap("counted", lambda inputs: 64, build)
    found = add_fixed_features(replace(federation, members=tuple(members)), counted)
    assert seen == [12, 10]
    for member in found.members:
        rows = member.train.rows
        assert torch.equal(member.train.fixed[rows], train_x[rows].flatten(1))
        assert torch.equal(member.test.fixed, test_x.flatten(1))
    assert torch.count_nonzero(found.members[0].train.fixed[6:20]) == 0
