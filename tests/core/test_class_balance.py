"""Class weights and balanced sampling: by hand, by property, and as torch and scikit-learn do."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import experiment, finished
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.functional import cross_entropy

from fedproto.core import local_training, rng
from fedproto.core.class_balance import (
    balanced_weights,
    count_classes,
    draw_balanced,
    weigh_samples,
)
from fedproto.errors import ConfigError
from fedproto.runs.api import run

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def count(labels: list[int], classes: int = 6) -> torch.Tensor:
    y = torch.tensor(labels)
    return count_classes(y, torch.ones_like(y, dtype=torch.bool), classes)


# --- weights


def test_weights_by_hand() -> None:
    weights = balanced_weights(torch.tensor([3, 0, 1]), torch.float64)
    torch.testing.assert_close(weights, torch.tensor([4 / 6, 0, 4 / 2], dtype=torch.float64))


@given(LABELS)
def test_weights_are_scikit_learns(labels: list[int]) -> None:
    there = np.unique(labels)
    expected = compute_class_weight("balanced", classes=there, y=labels)
    weights = balanced_weights(count(labels), torch.float64)
    assert weights[torch.from_numpy(there)].numpy() == pytest.approx(expected, rel=1e-12)
    assert float(weights[torch.tensor(labels)].mean()) == pytest.approx(1)


@given(LABELS)
def test_a_mean_by_weighted_mask_is_torchs_weighted_cross_entropy(labels: list[int]) -> None:
    y = torch.tensor(labels)
    logits = torch.from_numpy(np.random.default_rng(len(labels)).normal(size=(len(labels), 6)))
    weights = balanced_weights(count([*labels, 0, 1, 1, 2]), torch.float64)
    mask = weigh_samples(torch.ones(len(y), dtype=torch.float64), weights[y])
    assert float(mask.sum()) == pytest.approx(len(labels))
    ours = (cross_entropy(logits, y, reduction="none") * mask).sum() / mask.sum()
    torch.testing.assert_close(ours, cross_entropy(logits, y, weight=weights))


# --- sampling


def draw(labels: list[int], seed: int = 0) -> torch.Tensor:
    y = torch.tensor(labels)
    keys = rng.keys(seed, ["balance", "shuffle"], 1)
    return draw_balanced(keys[0], keys[1], y, torch.tensor(len(y)), 6)


@given(LABELS, st.integers(0, 99))
def test_all_classes_come_equally_often(labels: list[int], seed: int) -> None:
    rows = draw(labels, seed)
    assert len(rows) == len(labels)
    counts = count([labels[row] for row in rows])
    there = counts[count(labels) > 0]
    assert int(there.max()) - int(there.min()) <= 1
    for label in set(labels):
        own = [row for row in range(len(labels)) if labels[row] == label]
        times = [int((rows == row).sum()) for row in own]
        assert max(times) - min(times) <= 1


def test_balanced_classes_are_only_shuffled() -> None:
    rows = draw([0, 1, 2] * 5)
    assert sorted(rows.tolist()) == list(range(15))
    assert rows.tolist() != sorted(rows.tolist())
    assert not torch.equal(rows, draw([0, 1, 2] * 5, seed=1))


def test_every_row_of_a_frequent_class_is_drawn_at_some_time() -> None:
    labels = [0] * 30 + [1] * 2
    drawn = torch.cat([draw(labels, seed) for seed in range(20)])
    assert set(drawn.tolist()) == set(range(32))


@given(st.lists(LABELS, min_size=1, max_size=4))
def test_a_client_in_a_stack_draws_what_it_draws_alone(clients: list[list[int]]) -> None:
    longest = max(len(labels) for labels in clients)
    padded = torch.tensor([labels + [0] * (longest - len(labels)) for labels in clients])
    lengths = torch.tensor([len(labels) for labels in clients])
    keys = rng.keys(torch.arange(len(clients)), ["balance", "shuffle"], 1)
    together = draw_balanced(keys[0], keys[1], padded, lengths, 6)
    for seed, labels in enumerate(clients):
        assert torch.equal(together[seed, : len(labels)], draw(labels, seed))


# --- in training


def test_prototypes_are_sent_of_all_rows_unweighted() -> None:
    """What is balanced is training: an upload still has the number and the mean of all rows."""
    prepared = experiment("fedproto", clients=1)
    (member,) = prepared.federation.members
    (training,) = prepared.engine.trainings
    received = prepared.algorithm.send(prepared.progress.server, prepared.federation.recipient(0))
    labels = member.train.y[member.train.rows]
    for change in ({"class_weights": "balanced"}, {"sampling": "balanced"}):
        changed = replace(training, **change)
        outcome = local_training.train(
            member, prepared.algorithm, member.initial, received, changed, round=1
        )
        counts = torch.bincount(labels, minlength=len(prepared.federation.classes))
        assert outcome.upload["prototypes"].weight.tolist() == counts.tolist()
        features, y = local_training.embed(member.module, outcome.state, member.train)
        for label in y.unique().tolist():
            sums = outcome.upload["prototypes"].sums["prototypes"][label]
            torch.testing.assert_close(sums, features[y == label].sum(0))


@pytest.mark.parametrize("change", [{"class_weights": "balanced"}, {"sampling": "balanced"}])
def test_a_rare_class_is_found(change: dict[str, Any]) -> None:
    """Of 200 rows 190 are of one class, whose values overlap with the other's."""
    draws = np.random.default_rng(0)
    y = np.repeat([0, 1], [190, 10])
    x = draws.normal(size=(200, 4)) + y[:, None]
    y_test = np.repeat([0, 1], [50, 50])
    x_test = draws.normal(size=(100, 4)) + y_test[:, None]
    settings: dict[str, Any] = {
        "model": "mlp(hidden=8,width=4)",
        "rounds": 15,
        "lr": 0.05,
        "engine": "reference",
    }
    client = (x, y, x_test, y_test)
    plain = run(algorithm="local", dataset=[client], **settings)
    balanced = run(algorithm="local", dataset=[client], **settings, **change)
    assert plain.data["accuracy"]["head"]["mean"] < 0.6
    assert balanced.data["accuracy"]["head"]["mean"] > 0.8


def test_both_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="class_weights and sampling"):
        finished("local", class_weights="balanced", sampling="balanced")


@pytest.mark.parametrize("setting", [{"class_weights": "inverse"}, {"sampling": "rare"}], ids=str)
def test_unknown_values_are_refused(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        finished("local", **setting)
