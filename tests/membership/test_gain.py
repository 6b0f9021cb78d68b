"""What joining is worth in points, with an interval for the choice of test rows."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedproto
from fedproto.membership.gain import measure_gain


def gain_of(both: int, only_joined: int, only_alone: int, neither: int):
    joined = [True] * both + [True] * only_joined + [False] * only_alone + [False] * neither
    alone = [True] * both + [False] * only_joined + [True] * only_alone + [False] * neither
    return measure_gain(torch.tensor(joined, dtype=torch.bool), torch.tensor(alone).bool())


def test_the_interval_of_a_hand_computed_example() -> None:
    """Of 98 rows, 20 are won and 8 lost: 12 / 98; with half a row per cell, 12 / 100 ± ..."""
    gain = gain_of(50, 20, 8, 20)
    assert gain.rows == 98
    assert gain.difference == pytest.approx(12 / 98)
    variance = (29 / 100 - 0.12**2) / 100
    assert gain.low == pytest.approx(0.12 - 1.959964 * math.sqrt(variance), abs=1e-6)
    assert gain.high == pytest.approx(0.12 + 1.959964 * math.sqrt(variance), abs=1e-6)
    assert gain.low > 0
    assert "joining gained 12.2 points" in gain.describe()
    assert "98 test rows), more than the choice of test rows explains" in gain.describe()


def test_equal_models_gain_nothing_and_the_interval_says_how_little_is_known() -> None:
    gain = gain_of(5, 0, 0, 5)
    assert gain.difference == 0
    assert gain.low == -gain.high < 0
    assert "may be the choice of test rows alone" in gain.describe()


def test_without_test_rows_nothing_is_claimed() -> None:
    assert "no test rows" in gain_of(0, 0, 0, 0).describe()


@given(*[st.integers(0, 30)] * 4)
def test_changing_sides_changes_the_sign(both, only_joined, only_alone, neither) -> None:
    gain = gain_of(both, only_joined, only_alone, neither)
    other = gain_of(both, only_alone, only_joined, neither)
    assert gain.difference == -other.difference
    assert gain.low == pytest.approx(-other.high)
    assert -1 <= gain.low <= gain.high <= 1


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """2,000 draws of 60 rows from known cells: 95% should cover a difference of 0.1."""
    generator = np.random.default_rng(0)
    draws = generator.multinomial(60, [0.5, 0.2, 0.1, 0.2], size=2000)
    covered = 0
    for cells in draws:
        gain = gain_of(*cells.tolist())
        covered += gain.low <= 0.1 <= gain.high
    assert 0.94 <= covered / len(draws) <= 0.975


def test_a_newcomers_gain_is_that_of_its_last_epoch(tmp_path) -> None:
    run = tmp_path / "run"
    settings = {"dataset": "digits", "clients": 4, "shots": 5, "rounds": 2, "lr": 0.1}
    fedproto.run(**settings, model="mlp(hidden=16,width=8)", out=run)
    joined = fedproto.join(run, "digits", classes="1,5", shots=10, epochs=2, out=tmp_path / "new")
    last = joined.epochs[-1]
    assert joined.gain.difference == pytest.approx(last.joined["head"] - last.alone["head"])
    assert joined.gain.low <= joined.gain.difference <= joined.gain.high
    told = json.loads((tmp_path / "new" / "join.json").read_text())
    assert told["gain"] == joined.gain._asdict()
