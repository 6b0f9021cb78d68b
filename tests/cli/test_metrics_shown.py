"""What a run says about its metrics: in result.json and on the terminal."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import fedproto
from sklearn.datasets import load_breast_cancer

SMALL = ("--rounds", "2", "--clients", "3", "--partition", "iid")


@pytest.fixture(scope="module")
def imbalanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 357 benign and 12 malignant cases."""
    bunch = load_breast_cancer()
    benign = np.flatnonzero(bunch.target == 1)
    malignant = np.flatnonzero(bunch.target == 0)[:12]
    rows = np.random.default_rng(0).permutation(np.concatenate([benign, malignant]))
    lines = [",".join(f"f{number}" for number in range(30)) + ",diagnosis"]
    for row in rows:
        label = "benign" if bunch.target[row] else "malignant"
        lines.append(",".join(f"{value:g}" for value in bunch.data[row]) + f",{label}")
    path = tmp_path_factory.mktemp("table") / "imbalanced.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def run_of_imbalanced(imbalanced: Path) -> tuple[str, dict]:
    out = imbalanced.parent / "run"
    dataset = f"csv:{imbalanced}"
    answer = fedproto("run", "--dataset", dataset, "--algorithm", "fedavg", *SMALL, "--out", out)
    assert answer.code == 0, answer.err
    return answer.out, json.loads((out / "result.json").read_text())


def test_a_run_says_that_it_is_no_better_than_the_majority_class(run_of_imbalanced) -> None:
    shown, result = run_of_imbalanced
    head = result["metrics"]["head"]
    assert result["accuracy"]["head"]["mean"] == pytest.approx(0.973, abs=0.001)
    assert head["balanced_accuracy"]["mean"] == 0.5
    assert head["sensitivity"] == {"benign": 1.0, "malignant": 0.0}
    assert head["classes"] == ["benign", "malignant"]
    assert head["confusion"][1][1] == 0 and head["confusion"][0][1] == 0
    majority = result["baselines"]["majority"]
    assert majority["class"] == "benign"
    assert majority["accuracy"]["mean"] == result["accuracy"]["head"]["mean"]
    assert (
        "warning: fedavg: the accuracy by head 97.3% (balanced 50.0%) is not above 97.3%, which is "
        "what always predicting each client's most frequent class gets"
    ) in shown
    assert "majority class" in shown


def test_clients_have_their_metrics_and_means_are_over_them(run_of_imbalanced) -> None:
    _, result = run_of_imbalanced
    for way, metrics in result["metrics"].items():
        for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "brier", "ece"):
            values = [client["metrics"][way][name] for client in result["clients"]]
            assert metrics[name]["mean"] == pytest.approx(np.mean(values), abs=1e-12)
            assert metrics[name]["std"] == pytest.approx(np.std(values), abs=1e-12)
            is_error = name in ("brier", "ece")
            worst = max(values) if is_error else min(values)
            assert metrics[name]["worst"] == worst
            assert values[metrics[name]["worst_client"]] == worst
        accuracies = [client["accuracy"][way] for client in result["clients"]]
        assert accuracies == [client["metrics"][way]["accuracy"] for client in result["clients"]]
        assert np.sum(metrics["confusion"]) == sum(client["test"] for client in result["clients"])
