"""The metrics of predictions, against scikit-learn's functions and by hand."""

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from fedproto.core.calibration_metrics import BINS
from fedproto.core.measurement import (
    METRICS,
    MeasuredClient,
    Metric,
    Rows,
    collect_accuracies,
    measure_predictions,
    measure_scores,
    pool_measurements,
    summarise_values,
)
from fedproto.core.metrics import NO_CLASS, compute_probabilities, predict_classes
from fedproto.errors import DataError

EXACT = 1e-9


@st.composite
def scored_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Scores and classes of some rows; often few rows, few distinct scores, missing classes."""
    classes = draw(st.integers(2, 6))
    rows = draw(st.integers(1, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = generator.normal(size=(rows, classes)) * draw(st.sampled_from([0.1, 1, 30]))
    if draw(st.booleans()):
        scores = scores.round()  # ties
    occurring = draw(st.integers(1, classes))
    return scores, generator.integers(0, occurring, rows)


def names_of(classes: int) -> list[str]:
    return [f"class {number}" for number in range(classes)]


@settings(max_examples=60, deadline=None)
@given(scored_rows())
def test_metrics_are_those_of_scikit_learn(example: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = example
    classes = scores.shape[1]
    probabilities = compute_probabilities(scores)
    predicted = probabilities.argmax(1)
    measured = measure_predictions(probabilities, y, names_of(classes))
    values = measured.values
    labels = range(classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that do not occur
        expected = {
            "accuracy": sk.accuracy_score(y, predicted),
            "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
            "macro_f1": sk.f1_score(y, predicted, average="macro"),
        }
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, abs=EXACT), name
    confusions = sk.confusion_matrix(y, predicted, labels=labels)
    assert measured.describe()["confusion"] == confusions.tolist()
    assert measured.describe()["unpredicted"] == [0] * classes
    described = measured.describe_values()
    for label in np.unique(y):
        sensitivity = sk.recall_score(y == label, predicted == label)
        assert described["sensitivity"][f"class {label}"] == pytest.approx(sensitivity, abs=EXACT)
        specificity = described["specificity"][f"class {label}"]
        if (y != label).any():
            value = sk.recall_score(y != label, predicted != label)
            assert specificity == pytest.approx(value, abs=EXACT)
        else:
            assert specificity is None
    assert list(described["sensitivity"]) == [f"class {label}" for label in np.unique(y)]


@settings(max_examples=60, deadline=None)
@given(scored_rows())
def test_auroc_is_that_of_scikit_learn(example: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = example
    classes = scores.shape[1]
    probabilities = compute_probabilities(scores)
    auroc = measure_predictions(probabilities, y, names_of(classes)).values["auroc"]
    occurring = np.unique(y)
    if len(occurring) == 1:
        assert math.isnan(auroc)
    elif classes == 2:
        assert auroc == pytest.approx(sk.roc_auc_score(y, probabilities[:, 1]), abs=EXACT)
    else:
        areas = [sk.roc_auc_score(y == label, probabilities[:, label]) for label in occurring]
        assert auroc == pytest.approx(np.mean(areas), abs=EXACT)
        if len(occurring) == classes:
            together = sk.roc_auc_score(y, probabilities, multi_class="ovr", average="macro")
            assert auroc == pytest.approx(together, abs=EXACT)


@settings(max_examples=60, deadline=None)
@given(scored_rows())
def test_calibration_is_that_of_scikit_learn(example: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = example
    classes = scores.shape[1]
    probabilities = compute_probabilities(scores)
    measured = measure_predictions(probabilities, y, names_of(classes))
    targets = np.eye(classes)[y]
    if classes == 2:
        brier = sk.brier_score_loss(y, probabilities[:, 1], pos_label=1)
    else:
        brier = sk.mean_squared_error(targets, probabilities) * classes
    assert measured.values["brier"] == pytest.approx(brier, abs=EXACT)
    confidence = probabilities.max(1)
    is_correct = probabilities.argmax(1) == y
    accuracies, confidences = calibration_curve(is_correct, confidence, n_bins=BINS)
    bins = measured.describe_bins()
    assert [bin["accuracy"] for bin in bins] == pytest.approx(accuracies, abs=EXACT)
    assert [bin["confidence"] for bin in bins] == pytest.approx(confidences, abs=EXACT)
    weights = np.array([bin["rows"] for bin in bins]) / len(y)
    assert measured.values["ece"] == pytest.approx(
        float(weights @ np.abs(accuracies - confidences)), abs=EXACT
    )


def test_metrics_by_hand() -> None:
    """357 benign, 12 malignant, all called benign with 90%: accuracy says 97%, others do not."""
    probabilities = np.tile([0.9, 0.1], (369, 1))
    y = np.array([0] * 357 + [1] * 12)
    measured = measure_predictions(probabilities, y, ["benign", "malignant"])
    values = measured.values
    assert values["accuracy"] == pytest.approx(357 / 369)
    assert values["balanced_accuracy"] == 0.5
    assert values["macro_f1"] == pytest.approx((2 * 357 / (2 * 357 + 12)) / 2)
    assert values["auroc"] == 0.5
    assert values["brier"] == pytest.approx((357 * 0.01 + 12 * 0.81) / 369)
    assert values["ece"] == pytest.approx(357 / 369 - 0.9)
    described = measured.describe()
    assert described["sensitivity"] == {"benign": 1.0, "malignant": 0.0}
    assert described["specificity"] == {"benign": 0.0, "malignant": 1.0}
    assert described["confusion"] == [[357, 0], [12, 0]]


def test_what_is_not_defined_is_null_in_json() -> None:
    one_row = measure_predictions([[0.2, 0.8]], [1], ["a", "b"]).describe()
    assert one_row["auroc"] is None and one_row["accuracy"] == 1.0
    assert one_row["sensitivity"] == {"b": 1.0} and one_row["specificity"] == {"b": None}
    no_rows = measure_predictions(np.zeros((0, 2)), np.zeros(0, int), ["a", "b"]).describe()
    assert {no_rows[name] for name in METRICS} == {None}
    assert no_rows["rows"] == 0 and no_rows["calibration"] == []
    json.dumps([one_row, no_rows], allow_nan=False)


def test_a_row_without_any_score_is_wrong_and_predicts_nothing() -> None:
    scores = np.array([[-np.inf, -np.inf], [-np.inf, 2.0], [np.nan, 1.0]])
    assert predict_classes(scores).tolist()[:2] == [NO_CLASS, 1]
    assert compute_probabilities(scores).tolist() == [[0, 0], [0, 1], [0, 0]]
    measured = measure_scores({"prototype": scores[:2]}, np.array([0, 1]), [0, 1], ("a", "b"))
    described = measured["prototype"].describe()
    assert described["accuracy"] == 0.5
    assert described["confusion"] == [[0, 0], [0, 1]] and described["unpredicted"] == [1, 0]
    again = measure_predictions(compute_probabilities(scores[:2]), [0, 1], ["a", "b"]).describe()
    assert again == described


def test_own_classes_are_chosen_among_and_have_all_the_probability() -> None:
    scores = np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    measured = measure_scores({"head": scores}, np.array([1, 2]), [1, 2], ("a", "b", "c"))
    assert list(measured) == ["head", "head_own"]
    assert measured["head"].values["accuracy"] == 0.5
    assert measured["head_own"].values["accuracy"] == 1.0
    top = 1 / (1 + math.exp(-1))
    assert measured["head_own"].values["brier"] == pytest.approx(2 * (1 - top) ** 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(scored_rows(), min_size=1, max_size=4))
def test_pooled_metrics_are_those_of_all_rows(parts: list[tuple[np.ndarray, np.ndarray]]) -> None:
    classes = max(scores.shape[1] for scores, _ in parts)
    names = tuple(names_of(classes))
    tables = []
    for scores, _ in parts:
        padded = np.full((len(scores), classes), -np.inf)
        padded[:, : scores.shape[1]] = scores
        tables.append(compute_probabilities(padded))
    measured = []
    for table, (_, y) in zip(tables, parts, strict=True):
        measured.append(measure_predictions(table, y, names))
    rows = Rows(np.concatenate(tables), np.concatenate([y for _, y in parts]))
    together = measure_predictions(rows.probabilities, rows.y, names)
    pooled = pool_measurements(measured, rows)
    assert pooled.values == pytest.approx(together.values, abs=EXACT, nan_ok=True)
    assert (pooled.confusions == together.confusions).all()
    without_rows = pool_measurements(measured, None)
    assert math.isnan(without_rows.values["auroc"])
    assert without_rows.values["brier"] == pytest.approx(together.values["brier"], abs=EXACT)


def test_the_worst_client_has_the_smallest_value_or_the_largest_error() -> None:
    values = [0.5, float("nan"), 0.25, 0.25]
    assert summarise_values(values) == {
        "mean": pytest.approx(1 / 3),
        "std": pytest.approx(np.std([0.5, 0.25, 0.25])),
        "worst": 0.25,
        "worst_client": 2,
        "clients": 3,
    }
    assert summarise_values(values, lower_is_better=True)["worst_client"] == 0
    undefined = summarise_values([float("nan")])
    assert undefined["clients"] == 0 and undefined["mean"] is None


def test_accuracies_are_collected_by_client() -> None:
    right = measure_predictions([[0.9, 0.1], [0.6, 0.4]], [0, 1], ["a", "b"])
    measured = {
        0: MeasuredClient({"head": right}, None, None),
        1: MeasuredClient({}, None, None),  # has no rows
    }
    assert collect_accuracies(measured)["head"].tolist() == [0.5, 0.0]
    assert collect_accuracies({0: measured[1]}) == {}


def test_a_further_metric_is_computed_and_one_that_fails_is_null_with_a_sentence() -> None:
    def worst_probability(probabilities: np.ndarray, y: np.ndarray, classes: tuple) -> float:
        return probabilities[np.arange(len(y)), y].min()

    def broken(probabilities: np.ndarray, y: np.ndarray, classes: tuple) -> float:
        raise KeyError("no such class")

    further = [Metric("worst_probability", worst_probability), Metric("broken", broken)]
    measured = measure_predictions([[0.9, 0.1], [0.3, 0.7]], [0, 0], ["a", "b"], further)
    assert list(measured.values) == [*METRICS, "worst_probability", "broken"]
    assert measured.values["worst_probability"] == 0.3
    assert measured.describe()["broken"] is None
    (sentence,) = measured.failures
    assert sentence.startswith("metric broken failed (") and "no such class" in sentence


BAD = {
    "columns": ([[0.5, 0.5]], [0], ["a"], "one column per class"),
    "rows": ([[0.5, 0.5]], [0, 1], ["a", "b"], "one class per row"),
    "names": ([[0.5, 0.5]], ["a"], ["a", "b"], "numbers of classes"),
    "range": ([[0.5, 0.5]], [2], ["a", "b"], "from 0 to 1"),
    "scores": ([[-3.0, 5.0]], [0], ["a", "b"], "scores are converted first"),
    "nan": ([[math.nan, 0.5]], [0], ["a", "b"], "numbers from 0 to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_predictions_are_refused(case: str) -> None:
    probabilities, y, classes, sentence = BAD[case]
    with pytest.raises(DataError, match=sentence):
        measure_predictions(probabilities, y, classes)
