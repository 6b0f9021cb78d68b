"""Claims on which method is best, judged by hand-made cells of the benchmark."""

import pytest

from fedproto.reproduce.claims import FAILS, HOLDS, IN_PART, NOT_MEASURED
from fedproto.reproduce.evidence import Results
from fedproto.reproduce.methods.claims import find_best_sums, judge_methods, list_cells
from fedproto.reproduce.statistics import Outcome


def cell(method, values, validation=0.5, dataset="mnist", shares_weights=False, k=20):
    """A cell whose seeds have these accuracies over own classes, in percent."""
    runs = []
    for seed, value in enumerate(values):
        accuracy = {"head": [0.1], "head_own": [value / 100]}
        runs.append({"seed": seed, "accuracy": accuracy, "validation": validation})
    return {
        "method": method,
        "column": f"{dataset}, nway3, equal, k = {k}",
        "dataset": dataset,
        "architecture": "equal",
        "k": k,
        "score": "head",
        "shares_weights": shares_weights,
        "runs": runs,
        "diverged": [],
    }


SUMS = [99.0, 99.1, 98.9, 99.05, 98.95]


def judge(cells):
    return judge_methods({"table-methods-cpu": Results.from_cells(cells)})


def test_the_best_by_validation_is_judged_against_all_others():
    """By 4 points better than FedAvg, which leaves 2 of the lead; equal to its twin."""
    cells = [
        cell("Sums", SUMS, validation=0.9),
        cell("Twin", [value + 0.01 * (-1) ** n for n, value in enumerate(SUMS)]),
        cell("FedAvg", [value - 4 - 0.1 * n for n, value in enumerate(SUMS)], shares_weights=True),
        cell("Shared", SUMS, validation=1.0, shares_weights=True),
    ]
    assert find_best_sums(cells) == "Sums"  # not the one that shares weights
    best, lead, _ = judge(cells[:3])
    assert best.verdict == HOLDS
    outcomes = {answer.second: answer.outcome for answer in best.answers}
    assert outcomes == {"Twin": Outcome.EQUIVALENT, "FedAvg": Outcome.BETTER}
    assert lead.verdict == HOLDS
    (answer,) = lead.answers
    assert answer.comparison.effect == pytest.approx(4.2 - 2)


def test_a_lead_of_less_than_two_points_does_not_count():
    close = [value - 1 - 0.05 * n for n, value in enumerate(SUMS)]
    far = [value - 3 - 0.05 * n for n, value in enumerate(SUMS)]
    cells = [
        cell("Sums", SUMS, validation=0.9),
        cell("FedAvg", close, shares_weights=True),
        cell("Sums", SUMS, validation=0.9, dataset="chars74k"),
        cell("FedAvg", far, shares_weights=True, dataset="chars74k"),
    ]
    best, lead, _ = judge(cells)
    assert best.verdict == HOLDS
    assert lead.verdict == IN_PART
    outcomes = {answer.data: answer.outcome for answer in lead.answers}
    assert outcomes == {"MNIST": Outcome.WORSE, "62 characters": Outcome.BETTER}
    assert "the effects" not in lead.title


def test_prototypes_are_compared_with_fedper():
    fedper = cell("FedPer", [96.0, 96.2, 96.1], shares_weights=True)
    level = cell("Contrast", [96.05, 96.22, 96.12])
    lower = cell("Contrast", [95.0, 95.3, 95.05])
    assert judge([fedper, level])[2].verdict == HOLDS
    assert judge([fedper, lower])[2].verdict == FAILS


def test_what_was_not_run_everywhere_is_not_chosen():
    cells = [
        cell("Sums", SUMS, validation=0.9),
        cell("Other", SUMS, validation=0.8),
        cell("Other", SUMS, validation=0.8, dataset="cifar10"),
    ]
    assert find_best_sums(cells) == "Other"
    assert [claim.verdict for claim in judge([])] == [NOT_MEASURED] * 3


def test_a_data_set_that_the_whole_benchmark_lacks_is_taken_from_the_small_form() -> None:
    whole = [cell("Sums", [91, 92]), cell("FedAvg", [90, 91], shares_weights=True)]
    small = [cell("Sums", [50, 51]), cell("FedAvg", [60, 61], shares_weights=True)]
    small += [
        cell("Sums", [70, 71], dataset="cifar10"),
        cell("FedAvg", [60, 61], dataset="cifar10", shares_weights=True),
    ]
    results = {
        "table-methods": Results.from_cells(whole),
        "table-methods-cpu": Results.from_cells(small),
    }
    found = list_cells(results)
    assert found == [*whole, *small[2:]]


def test_a_method_that_diverged_in_a_setting_is_not_the_best() -> None:
    diverged = cell("Sums", []) | {"diverged": [{"seed": 0}, {"seed": 1}]}
    assert find_best_sums([diverged, cell("Other", [50, 51])]) == "Other"
