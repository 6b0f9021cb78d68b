"""The benchmark of epsilons: what it measures is private, and its page shows what was measured."""

import math

import numpy as np
import pytest
from sklearn.datasets import load_digits

from benchmarks import privacy


@pytest.fixture(scope="module")
def rows():
    """The 8x8 digits in place of features and images; their side is that of the features."""
    digits = load_digits()
    x = (digits.images[:, None] / 16).astype(np.float32)
    arrays = (x[:1400], digits.target[:1400], x[1400:], digits.target[1400:])
    return privacy.Rows(arrays, arrays)


@pytest.mark.parametrize("method", privacy.METHODS, ids=privacy.label)
def test_every_method_keeps_its_budget(method, rows, monkeypatch):
    small = {"clients": 4, "shots": 10, "test_shots": 5}
    monkeypatch.setattr(privacy, "RELEASE", privacy.RELEASE | small)
    monkeypatch.setattr(privacy, "CLIENT", privacy.CLIENT | small)
    plain = privacy.measure(method, rows, math.inf, seed=0)
    noisy = privacy.measure(method, rows, 8.0, seed=0)
    assert plain["spent"] == 0 and 7.9 < noisy["spent"] <= 8.0
    assert 0 <= noisy["all"] <= noisy["own"] <= 1


def test_the_page_shows_means_over_seeds_and_what_is_missing(tmp_path):
    method = privacy.METHODS[0]
    runs = {}
    for seed, accuracy in enumerate((0.8, 0.9)):
        key = privacy.name_run("mnist", method, 2.0, seed)
        runs[key] = {"all": accuracy, "own": 0.95, "spent": 2.0}
    privacy.write_page({"runs": runs}, tmp_path)
    page = (tmp_path / "privacy.md").read_text()
    assert f"| {privacy.label(method)} | – | – | – | 85.0 ± 5.0 | – | – |" in page
    assert "fashion-mnist" not in page
    privacy.draw({"runs": runs}, tmp_path)
    assert (tmp_path / "privacy.png").stat().st_size > 10_000
