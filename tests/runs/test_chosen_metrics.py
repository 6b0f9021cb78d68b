"""Metrics of the setting `metric`: those of the package, and plug-ins from outside."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import SETTINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

import fedproto
from fedproto.config import plugins
from fedproto.config.config_file import read_toml
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core.metrics import compute_probabilities
from fedproto.errors import ConfigError
from fedproto.runs.chosen_metrics import choose_metrics

CODE = """
import numpy as np

def certainty(probabilities, y, classes, *, power: int = 1):
    assert len(classes) == probabilities.shape[1]
    return (probabilities.max(1) ** power).mean()

calls = []

def gap(probabilities, y, classes):
    return float(1 - probabilities[np.arange(len(y)), y].mean())

gap.lower_is_better = True

def fails(probabilities, y, classes):
    return probabilities["x"]

def text(probabilities, y, classes):
    return "good"

def fails_late(probabilities, y, classes):
    calls.append(len(y))
    if len(calls) > 1:
        raise ValueError("there are too few rows")
    return 1.0

def narrow(probabilities):
    return 1.0

def accuracy(probabilities, y, classes):
    return 1.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"metrics_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 5), st.integers(1, 30), st.integers(0, 2**32 - 1), st.sampled_from([0.3, 3, 50])
)
def test_metrics_of_the_package_are_those_of_scikit_learn(
    classes: int, rows: int, seed: int, scale: float
) -> None:
    generator = np.random.default_rng(seed)
    scores = (generator.normal(size=(rows, classes)) * scale).round(1)
    probabilities = compute_probabilities(scores)
    y = generator.integers(0, classes, rows)
    names = tuple(map(str, range(classes)))
    found = {}
    for name in plugins.names("metric"):
        found[name] = plugins.build("metric", Part(name), probabilities, y, names)
    labels = list(range(classes))
    eye = np.eye(classes)
    predicted = probabilities.argmax(1)
    assert found["matthews"] == pytest.approx(sk.matthews_corrcoef(y, predicted), abs=1e-9)
    expected = sk.log_loss(y, probabilities, labels=labels)
    assert found["log-loss"] == pytest.approx(expected, abs=1e-6)  # scikit-learn rescales rows
    occurring = np.unique(y)
    if len(occurring) == 1:
        assert np.isnan(found["average-precision"])
    else:
        chosen = [1] if classes == 2 else occurring
        areas = [sk.average_precision_score(eye[y][:, k], probabilities[:, k]) for k in chosen]
        assert found["average-precision"] == pytest.approx(np.mean(areas), abs=1e-9)


def test_further_metrics_are_everywhere_in_the_result(module: str) -> None:
    names = f"log-loss,{module}:certainty(power=2),{module}:gap"
    run = {**SETTINGS, "algorithm": "fedavg", "rounds": 1, "metric": names}
    result = fedproto.run(**run)
    metrics = result.data["metrics"]["head"]
    for name in ("log_loss", "certainty(power=2)", "gap"):
        values = [client["metrics"]["head"][name] for client in result.clients]
        assert metrics[name]["mean"] == pytest.approx(np.mean(values))
        assert metrics[name]["pooled"] is not None
    gaps = [client["metrics"]["head"]["gap"] for client in result.clients]
    assert metrics["gap"]["worst"] == max(gaps)
    assert "failures" not in metrics


def test_a_setting_written_out_is_read_back(module: str, tmp_path: Path) -> None:
    for text in ("matthews", f"log-loss,{module}:certainty(power=2)", ""):
        chosen = {"dataset": "digits", "metric": text}
        plugins.trust_chosen(chosen)
        (config,) = configure(chosen)
        path = tmp_path / "config.toml"
        path.write_text(config.toml())
        (again,) = configure(read_toml(path))
        assert again.metric == config.metric


def test_a_plug_in_that_a_file_names_is_not_run() -> None:
    with pytest.raises(ConfigError, match="metric 'nobody:evil', a plug-in whose Python code"):
        plugins.refuse_plugins({"metric": "log-loss,nobody:evil"}, "config.toml")
    with pytest.raises(ConfigError, match="if you trust it"):
        configure({"dataset": "digits", "metric": "nobody:evil"})


BAD = {
    "no-such": "unknown metric 'no-such'",
    "matthews*2": "a count has no meaning here",
    "matthews,matthews": "there is another metric named matthews",
    "matthews(beta=2)": "unknown option of metric matthews 'beta'|has no option",
    "MODULE:fails": r"metric 'MODULE:fails' failed \(MODULE.py, line \d+\): IndexError",
    "MODULE:text": "metric 'MODULE:text' returned str, where numbers.Real is wanted",
    "MODULE:narrow": "metric 'MODULE:narrow' must take 3 positional arguments",
    "MODULE:accuracy": "there is another metric named accuracy",
    "MODULE:missing": "metric 'MODULE:missing' cannot be loaded",
}


@pytest.mark.parametrize("text", BAD)
def test_a_metric_that_cannot_work_is_refused_before_training(text: str, module: str) -> None:
    settings = {"dataset": "digits", "metric": text.replace("MODULE", module)}
    plugins.trust_chosen(settings)
    with pytest.raises(ConfigError, match=BAD[text].replace("MODULE", module)):
        (config,) = configure(settings)
        choose_metrics(config.metric, ("a", "b"))


def test_one_that_fails_at_the_end_costs_no_result(module: str) -> None:
    metric = f"{module}:fails_late"
    result = fedproto.run(**{**SETTINGS, "algorithm": "local", "rounds": 1, "metric": metric})
    metrics = result.data["metrics"]["head"]
    assert metrics["fails_late"]["mean"] is None and metrics["fails_late"]["clients"] == 0
    (sentence,) = metrics["failures"]
    assert "fails_late" in sentence and sentence.endswith("there are too few rows")
