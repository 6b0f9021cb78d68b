"""Calibrated probabilities: one temperature, fitted on validation rows."""

import json
import math

import numpy as np
import pytest
import torch
from helpers.inference_runs import DIGITS
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import log_loss

import fedproto
from fedproto import Classifier
from fedproto.errors import FedProtoError
from fedproto.inference.export.read import read_exported
from fedproto.inference.export.write import export_client
from fedproto.inference.temperature import fit_temperature
from fedproto.runs.folder import RunFolder
from fedproto.runs.stored_clients import ClientModels


def draw_rows(rows: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, and labels that are drawn from the softmax of these scores."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(scores.softmax(1), 1, generator=generator).flatten()
    return scores, labels


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 5.0])
def test_the_temperature_undoes_scores_that_are_too_sharp(sharpness: float) -> None:
    scores, labels = draw_rows(20_000, 4, seed=1)
    assert fit_temperature(scores * sharpness, labels) == pytest.approx(sharpness, rel=0.05)


@given(st.integers(0, 1000), st.integers(2, 5), st.integers(10, 60))
def test_the_temperature_minimises_the_log_loss_with_platts_targets(seed, classes, rows) -> None:
    scores, labels = draw_rows(rows, classes, seed)
    targets = np.full((rows, classes), 1 / (rows + 2) / (classes - 1))
    targets[np.arange(rows), labels] = 1 - 1 / (rows + 2)

    def loss(log_temperature: float) -> float:
        log_probabilities = (scores / math.exp(log_temperature)).log_softmax(1).numpy()
        return -(targets * log_probabilities).sum(1).mean()

    best = minimize_scalar(loss, bounds=(-6.9, 6.9), method="bounded", options={"xatol": 1e-9})
    fitted = fit_temperature(scores, labels)
    assert loss(math.log(fitted)) <= best.fun + 1e-9


def test_rows_that_are_all_correct_do_not_make_the_classifier_infinitely_sure() -> None:
    scores = torch.eye(3).repeat(10, 1)
    labels = torch.arange(3).repeat(10)
    fitted = fit_temperature(scores, labels)
    sure = (scores / fitted).softmax(1).amax(1)
    assert torch.allclose(sure, torch.full((30,), 1 - 1 / 32, dtype=sure.dtype), atol=1e-6)


def test_too_few_rows_or_classes_give_no_temperature() -> None:
    assert fit_temperature(torch.zeros(9, 3), torch.zeros(9, dtype=torch.long)) is None
    assert fit_temperature(torch.zeros(50, 1), torch.zeros(50, dtype=torch.long)) is None


# --- trained clients


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "validated"
    settings = {"clients": 2, "shots": 40, "ways": 4, "stdev": 0, "validation": 0.4, "rounds": 2}
    fedproto.run(**DIGITS | settings, out=folder)
    return folder


@pytest.mark.parametrize("by", ["prototype", "head"])
def test_calibrated_probabilities_have_the_smaller_log_loss_on_validation_rows(run, by) -> None:
    classifier = Classifier.of(run, client=0, by=by, among="own")
    trained = classifier.trained
    stored = ClientModels.open(RunFolder.open(run)).read(0)
    outputs = stored.held_out.validation
    scores = trained.score(by, "own", outputs)
    names = np.array(trained.classes)[stored.held_out.validation_labels.numpy()]
    losses = []
    for temperature in (1.0, classifier.temperature_):
        probabilities = (scores.double() / temperature).softmax(1).numpy()
        losses.append(log_loss(names, probabilities, labels=list(classifier.classes_)))
    assert losses[1] <= losses[0] + 1e-6
    assert classifier.temperature_ != 1.0


def test_temperatures_change_no_answer_and_survive_export(run, tmp_path) -> None:
    classifier = Classifier.of(run, client=0)
    export_client(classifier.trained, tmp_path / "exported", onnx=False)
    exported = read_exported(tmp_path / "exported")
    assert exported.temperatures == classifier.trained.temperatures != {}
    x = np.random.default_rng(0).integers(0, 17, (5, 8, 8)).astype(np.float32)
    probabilities = classifier.predict_proba(x)
    assert np.array_equal(classifier.classes_[probabilities.argmax(1)], classifier.predict(x))
    uncalibrated = (-torch.from_numpy(classifier.distances(x)).double()).softmax(1).numpy()
    assert not np.allclose(probabilities, uncalibrated)


@pytest.mark.parametrize("wrong", [{"head all": 0}, {"head": 1.0}, {"head all": "1"}, None, [1.0]])
def test_a_manifest_with_wrong_temperatures_is_refused(run, tmp_path, wrong) -> None:
    folder = tmp_path / "exported"
    export_client(Classifier.of(run, client=0).trained, folder, onnx=False)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["temperatures"] = wrong
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FedProtoError, match="temperatures"):
        read_exported(folder)
