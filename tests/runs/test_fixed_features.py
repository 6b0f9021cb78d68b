"""Closed forms over tables and texts, whose feature map is chosen by the kind of data."""

import numpy as np
import pytest

import fedproto
from fedproto.errors import ConfigError


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
