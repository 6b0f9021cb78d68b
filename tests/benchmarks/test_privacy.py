"""The benchmark of epsilons: what it measures is private, and its page shows what was measured."""

import json
import math

import numpy as np
import pytest
from sklearn.datasets import load_digits

from benchmarks import privacy, privacy_page
from benchmarks.privacy_lines import METHODS, Method, label, name_cell, name_run
from fedproto.data import Source, Split

#: Of private training one method is enough: it is the slow part.
QUICK_METHODS = [each for each in METHODS if each.privacy != "training"]
PRIVATELY_TRAINED = next(each for each in METHODS if each.privacy == "training")


@pytest.fixture(scope="module")
def rows() -> privacy.Rows:
    """The 8x8 digits in place of features and images; their side is that of the features."""
    digits = load_digits()
    x = (digits.images[:, None] / 16).astype(np.float32)
    return privacy.Rows(x[:1400], digits.target[:1400], x[1400:], digits.target[1400:])


@pytest.mark.parametrize("method", [*QUICK_METHODS, PRIVATELY_TRAINED], ids=label)
def test_every_method_keeps_its_budget(
    method: Method, rows: privacy.Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"clients": 4, "shots": 10, "test_shots": 5}
    monkeypatch.setattr(privacy, "RECORD", privacy.RECORD | small)
    monkeypatch.setattr(privacy, "CLIENT", privacy.CLIENT | small)
    tuned = {"lr": 0.1, "rounds": 2} if method.is_tuned else None
    plain = privacy.measure(method, rows, math.inf, 0, tuned)
    assert plain["spent"] == 0
    assert 0 <= plain["all"] <= plain["own"] <= 1
    if 8.0 in method.epsilons:
        noisy = privacy.measure(method, rows, 8.0, 0, tuned)
        assert 7.9 < noisy["spent"] <= 8.0


def test_settings_are_chosen_on_rows_that_nothing_else_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every image carries its own number, so that it can be followed."""
    train = np.arange(30, dtype=np.float32)[:, None, None] * np.ones((1, 28, 28), np.float32)
    test = train[:4] + 100
    source = Source(
        "numbered",
        tuple("0123456789"),
        Split(train / 1000, np.arange(30) % 10),
        Split(test / 1000, np.arange(4)),
        mean=(0.0,),
        std=(1.0,),
    )
    monkeypatch.setitem(privacy.LOADERS, "numbered", lambda _: source)
    monkeypatch.setattr(privacy, "TRAIN_ROWS", 10)
    monkeypatch.setattr(privacy, "TEST_ROWS", 3)
    measured = privacy.load_images("numbered")
    tuned_on = privacy.load_images("numbered", is_tuning=True)
    parts = (measured.x, measured.x_test, tuned_on.x, tuned_on.x_test)
    groups = [set(x[:, 0, 0, 0].tolist()) for x in parts]
    assert [len(group) for group in groups] == [10, 3, 10, 3]
    assert len(set.union(*groups)) == 26
    assert min(groups[1]) >= np.float32(0.1)  # only what is reported is of the test set


def test_the_best_try_is_chosen_and_all_tries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(method, rows, epsilon, seed, chosen):
        return {"all": 1.0 if chosen == {"rounds": 8, "lr": 0.3} else 0.5}

    monkeypatch.setattr(privacy, "measure", measure)
    monkeypatch.setattr(privacy, "load_rows", lambda *_, **__: None)
    found = privacy.tune(PRIVATELY_TRAINED, 8.0)
    assert found["settings"] == {"rounds": 8, "lr": 0.3}
    assert len(found["tries"]) == 6


def test_what_is_in_the_file_is_not_measured_again(tmp_path, monkeypatch) -> None:
    calls = []

    def measure(method, rows, epsilon, seed, chosen):
        calls.append(name_run("mnist", method, epsilon, seed))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"all": 0.5, "own": 0.5, "spent": 0.0}

    monkeypatch.setattr(privacy, "METHODS", METHODS[:1])
    monkeypatch.setattr(privacy, "measure", measure)
    monkeypatch.setattr(privacy, "load_rows", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        privacy.measure_all(tmp_path, ["mnist"], [0])
    kept = json.loads((tmp_path / "privacy.json").read_text())["runs"]
    assert list(kept) == calls[:2]
    privacy.measure_all(tmp_path, ["mnist"], [0])
    assert calls[3] == calls[2] and len(set(calls)) == len(METHODS[0].epsilons)


def test_the_page_shows_means_over_seeds_and_what_is_missing(tmp_path) -> None:
    method = METHODS[0]
    runs = {}
    for seed, accuracy in enumerate((0.8, 0.9)):
        key = name_run("mnist", method, 2.0, seed)
        runs[key] = {"all": accuracy, "own": 0.95, "spent": 2.0}
    trained = PRIVATELY_TRAINED
    for seed in range(5):
        key = name_run("mnist", trained, 8.0, seed)
        runs[key] = {"all": 0.7, "own": 0.8, "spent": 8.0, "head all": 0.9, "head own": 0.9}
    tuned = {name_cell(trained, 8.0): {"settings": {"rounds": 2, "lr": 0.3}}}
    found = {"runs": runs, "tuned": tuned}
    privacy_page.write_page(found, tmp_path)
    page = (tmp_path / "privacy.md").read_text()
    assert f"| {label(method)} | – | – | – | 85.0 ± 5.0 (2) | – | – |" in page
    assert f"| {label(trained)} | – | 70.0 ± 0.0 | – | – | – | – |" in page
    assert f"| {label(trained)}, by its head | – | 90.0 ± 0.0 | – | – | – | – |" in page
    assert f"| {label(trained)} | 8 | 2 | 0.3 |" in page
    assert "## fashion-mnist" not in page
    privacy_page.draw(found, tmp_path)
    assert (tmp_path / "privacy.png").stat().st_size > 10_000
