"""Optimisers, clipping and schedules: torch's own numbers, and curves computed by hand."""

import math
from typing import Any

import pytest
import torch
from helpers.tiny import finished, scored_states
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedproto.core import rng
from fedproto.core.optimisers import RateSchedule
from fedproto.errors import ConfigError

TORCH_OPTIMISERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def train_by_torch(run: Any, rounds: int) -> list[torch.Tensor]:
    """Train the only client of a run as a tutorial would, with torch's optimiser and clipping."""
    config = run.config
    (member,) = run.federation.members
    (training,) = run.engine.trainings
    x = member.train.x[member.train.rows]
    y = member.train.y[member.train.rows]
    width = member.initial["body.fc1.weight"].shape[1]
    layers = [nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10)]
    model = nn.Sequential(*layers).double()
    model.load_state_dict(dict(zip(model.state_dict(), member.initial.values(), strict=True)))
    parameters = list(model.parameters())
    for round in range(1, rounds + 1):
        options = {"lr": training.rate(round), "weight_decay": config.weight_decay}
        if config.optimiser == "sgd":
            options["momentum"] = config.momentum
        optimiser = TORCH_OPTIMISERS[config.optimiser](parameters, **options)
        for epoch in range(config.epochs):
            order = rng.permutation(rng.key(0, "shuffle", round, 0, epoch), len(y))
            for rows in order.split(config.batch):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x[rows].flatten(1)), y[rows]).backward()
                if config.clip_norm:
                    nn.utils.clip_grad_norm_(parameters, config.clip_norm)
                optimiser.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("clip_norm", [0, 0.7])
@pytest.mark.parametrize("weight_decay", [0, 0.1])
@pytest.mark.parametrize("optimiser", TORCH_OPTIMISERS)
def test_one_client_is_trained_as_by_torch(
    optimiser: str, weight_decay: float, clip_norm: float
) -> None:
    run, _ = finished(
        "local",
        clients=1,
        rounds=3,
        batch=4,
        epochs=2,
        lr=0.01,
        optimiser=optimiser,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        schedule="cosine",
    )
    (state,) = scored_states(run)
    for ours, theirs in zip(state.values(), train_by_torch(run, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# --- schedules


def curve(name: Any, warmup: int = 0, rounds: int = 4) -> list[float]:
    schedule = RateSchedule(name, warmup, rounds)
    return [schedule.factor(round) for round in range(1, rounds + 1)]


def test_a_constant_rate_is_the_rate_itself() -> None:
    assert curve("constant") == [1.0] * 4


def test_schedules_by_hand() -> None:
    assert curve("linear") == [1, 0.75, 0.5, 0.25]
    root = math.sqrt(0.5)
    assert curve("cosine") == pytest.approx([1, (1 + root) / 2, 0.5, (1 - root) / 2])
    assert curve("step", rounds=8) == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_rate_rises_before_it_falls() -> None:
    assert curve("linear", warmup=2) == pytest.approx([1 / 3, 2 / 3, 1, 0.5])
    assert curve("constant", warmup=3) == [0.25, 0.5, 0.75, 1]


@given(
    st.sampled_from(["constant", "cosine", "linear", "step"]),
    st.integers(0, 20),
    st.integers(1, 50),
)
def test_every_rate_is_above_zero_and_at_most_the_run_s(
    name: str, warmup: int, rounds: int
) -> None:
    factors = curve(name, warmup, rounds)
    assert all(0 < factor <= 1 for factor in factors)
    after = factors[warmup:]
    assert after == sorted(after, reverse=True)
    assert factors[:warmup] == sorted(factors[:warmup])
    if after:
        assert after[0] == 1


# --- bad input


@pytest.mark.parametrize(
    "setting",
    [
        {"optimiser": "adagrad"},
        {"schedule": "exponential"},
        {"weight_decay": -0.1},
        {"clip_norm": -1},
        {"clip_norm": float("nan")},
        {"warmup": -1},
        {"warmup": 1.5},
        {"warmup": 3},
    ],
    ids=str,
)
def test_settings_that_are_refused(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        finished("local", **setting)
