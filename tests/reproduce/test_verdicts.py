"""Verdicts on hand-made results, and the committed pages against their JSON."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedproto.errors import RunFolderError
from fedproto.reproduce.claims import choose_verdict
from fedproto.reproduce.evidence import Results
from fedproto.reproduce.methods.page import render_page as render_methods_page
from fedproto.reproduce.statistics import Outcome
from fedproto.reproduce.study_claims import (
    judge_best_lambda,
    judge_distance,
    judge_few_images,
    judge_options,
    judge_start,
    judge_travel,
)
from fedproto.reproduce.table_claims import (
    judge_accuracy,
    judge_mixed_models,
    judge_own_classes,
    judge_rounds,
    judge_traffic,
)
from fedproto.reproduce.table_page import render_page as render_table_page
from fedproto.reproduce.tables import summary
from fedproto.reproduce.verdict_page import render_csv, render_page, render_verdicts
from fedproto.reproduce.verdicts import judge_all

RESULTS = Path(__file__).parents[2] / "results"
COLUMNS = ("n = 3, stdev 2", "n = 4, stdev 2")
BETTER = Outcome.BETTER
WORSE = Outcome.WORSE
EQUIVALENT = Outcome.EQUIVALENT
UNDECIDED = Outcome.UNDECIDED


def cell(method, column, means, score="head", values=4000.0, own=0.0, diverged=(), **more):
    """Return a cell with one accuracy per seed; its two clients lie a point above and below it."""
    runs = []
    for seed, mean in enumerate(means):
        accuracy = {score: [mean / 100 - 0.01, mean / 100 + 0.01]}
        accuracy |= {f"{score}_own": [(mean + own) / 100] * 2}
        sent = {"values_per_round": values, "bytes_up": 1, "bytes_down": 1}
        runs.append({"seed": seed, "accuracy": accuracy, "communication": sent, **more})
    return {
        "method": method,
        "column": column,
        "score": score,
        "seeds": list(range(len(means))),
        "communication": {"values_per_round": values},
        "accuracy": {score: summary([run["accuracy"][score] for run in runs])},
        "runs": runs,
        "diverged": [{"seed": seed, "reason": "the loss is nan"} for seed in diverged],
    }


def mnist(**methods):
    """Return a table with these accuracies in both columns, FedProto's by prototype."""
    cells = []
    for method, means in methods.items():
        name = method.replace("_", "-")
        score = "prototype" if name.startswith("FedProto") else "head"
        cells += [cell(name, column, means, score) for column in COLUMNS]
    return {"table-mnist": Results.from_cells(cells)}


def outcomes(claim):
    return {answer.second: answer.outcome for answer in claim.answers}


@pytest.fixture(scope="module")
def committed():
    """All claims, judged by the committed results."""
    return judge_all(RESULTS)


# --- verdicts


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([], "not measured yet"),
        ([BETTER, BETTER], "holds"),
        ([BETTER, UNDECIDED], "holds in part"),
        ([BETTER, WORSE], "holds in part"),
        ([UNDECIDED, UNDECIDED], "undecided"),
        ([EQUIVALENT, UNDECIDED], "does not hold"),
        ([WORSE], "does not hold"),
    ],
)
def test_a_claim_holds_if_all_its_comparisons_do(answers, verdict):
    assert choose_verdict(answers, (BETTER,)) == verdict


# --- accuracy


def test_accuracy_is_judged_over_all_classes_and_among_own_classes():
    cells = [cell("FedProto", column, [95, 96.1, 97], "prototype", own=1) for column in COLUMNS]
    cells += [cell("FedAvg", column, [93, 94, 95.1], own=4) for column in COLUMNS]
    found = {"table-mnist": Results.from_cells(cells)}
    over_all = judge_accuracy(found)
    assert outcomes(over_all) == {"FedAvg": BETTER}
    assert over_all.answers[0].comparison.effect == pytest.approx(2.0)
    own = judge_own_classes(found)
    assert own.answers[0].comparison.effect == pytest.approx(2.0 + 1 - 4)
    assert outcomes(own) == {"FedAvg": WORSE}
    assert own.verdict == "does not hold"


def test_a_large_p_is_undecided_and_not_equivalent():
    found = mnist(FedProto=[95, 97, 91, 99, 94], FedPer=[96, 93, 95, 94, 98])
    claim = judge_accuracy(found)
    assert outcomes(claim) == {"FedPer": UNDECIDED}
    assert claim.verdict == "undecided"


def test_all_methods_and_data_sets_of_a_claim_are_one_family():
    """Alone, FedProto beats Local; beside five comparisons without a difference it is undecided."""
    ours = [95.0, 96.0, 97.0, 98.0, 99.0]
    local = [94.5, 95.8, 96.2, 97.8, 98.1]
    noise = [93.0, 99.0, 95.0, 99.9, 97.0]
    alone = judge_accuracy(mnist(FedProto=ours, Local=local))
    assert outcomes(alone) == {"Local": BETTER}
    rest = dict.fromkeys(("FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep"), noise)
    together = judge_accuracy(mnist(FedProto=ours, Local=local, **rest))
    assert outcomes(together)["Local"] is UNDECIDED
    assert together.answers[0].decision.p_difference == pytest.approx(
        6 * alone.answers[0].decision.p_difference
    )


def test_settings_are_a_family_of_their_own():
    found = mnist(FedProto=[95, 96.1, 97], Local=[93, 94, 95.1])
    claim = judge_accuracy(found)
    assert [answer.setting for answer in claim.details] == list(COLUMNS)
    assert [answer.setting for answer in claim.answers] == ["all settings"]


# --- mixed models: equivalence, not a large margin


@pytest.mark.parametrize(
    ("mixed", "verdict"),
    [
        # Within 0.3 points.
        ([95.02, 95.99, 97.0, 94.01, 93.0], "holds"),
        # 0.8 points less.
        ([94.2, 95.2, 96.3, 93.2, 92.2], "does not hold"),
        # The mean is within the margin, its interval is not.
        ([95.9, 95.2, 97.6, 93.1, 93.1], "undecided"),
        # Better.
        ([96.0, 97.1, 98.0, 95.0, 94.1], "holds"),
    ],
)
def test_mixed_models_are_as_good_as_equal_ones_within_the_margin(mixed, verdict):
    claim = judge_mixed_models(mnist(FedProto=[95, 96, 97, 94, 93], FedProto_mh=mixed))
    assert claim.verdict == verdict


# --- rounds


def test_methods_that_never_reach_the_goal_are_counted():
    curve = {"round": [10, 20, 30], "prototype": [0.9, 0.95, 0.96], "head": [0.5, 0.8, 0.93]}
    cells = [cell("FedProto", "n = 3", [96, 97.9, 96.1], "prototype", curve=curve)]
    cells.append(cell("Local", "n = 3", [93, 95, 93], curve=curve))
    claim = judge_rounds({"table-mnist": Results.from_cells(cells)})
    (answer,) = claim.answers
    comparison = answer.comparison
    assert (comparison.censored_first, comparison.censored_second, comparison.bounded) == (0, 3, -1)
    assert comparison.effect == pytest.approx((-10 + 0 - 10) / 3)  # at most
    assert "Never reached the goal: Local in 3 of 3 federations." in render_page([claim], [])
    assert "≤ -6.7" in render_page([claim], [])


def test_a_range_of_effects_says_that_some_are_bounds():
    curve = {"round": [10, 20, 30], "prototype": [0.9, 0.95, 0.96], "head": [0.5, 0.8, 0.93]}
    cells = [cell("FedProto", "n = 3", [96, 97.9, 96.1], "prototype", curve=curve)]
    cells += [cell(name, "n = 3", [93, 95, 93], curve=curve) for name in ("Local", "FedAvg")]
    claim = judge_rounds({"table-mnist": Results.from_cells(cells)})
    assert "(-6.7 to -6.7 rounds, some of them bounds)" in render_page([claim], [])


def test_rounds_to_a_goal_that_was_reached_are_exact():
    quick = {"round": [10, 20, 30], "prototype": [0.95, 0.96, 0.96], "head": [0.5, 0.95, 0.96]}
    cells = [cell("FedProto", "n = 3", [96, 96, 96], "prototype", curve=quick)]
    cells.append(cell("Local", "n = 3", [93, 95, 93], curve=quick))
    (answer,) = judge_rounds({"table-mnist": Results.from_cells(cells)}).answers
    assert answer.comparison.bounded == 0 and answer.comparison.effect == -10
    assert answer.outcome is UNDECIDED  # the same in every seed


# --- the rest


@pytest.mark.parametrize(
    ("sent", "verdict"),
    [
        (4000, "holds for clients with 4 classes"),
        (3500, "holds for clients with 4 classes"),
        (8000, "does not hold"),
    ],
)
def test_traffic_is_judged_at_four_classes(sent, verdict):
    cells = [cell("FedProto", "n = 3, stdev 2", [95], "prototype", values=3000.0)]
    cells.append(cell("FedProto", "n = 4, stdev 2", [95], "prototype", values=float(sent)))
    claim = judge_traffic({"table-mnist": Results.from_cells(cells)})
    assert claim.verdict == verdict
    assert f"{sent:,}" in claim.figures


@pytest.mark.parametrize(
    ("at_two", "verdict"),
    [
        ([90, 90.2, 91.8], "holds"),
        ([97, 97.2, 98.8], "does not hold"),
        ([95.05, 95.1, 96.85], "holds"),  # equivalent
        ([95.2, 93, 98.9], "undecided"),
    ],
)
def test_lambda_1_is_compared_with_others(at_two, verdict):
    cells = [
        cell("lambda = 1", "c", [95, 95.1, 96.9], "prototype"),
        cell("lambda = 2", "c", at_two, "prototype"),
    ]
    assert judge_best_lambda({"fig-lambda": Results.from_cells(cells)}).verdict == verdict


def test_one_better_lambda_refutes_the_claim():
    cells = [
        cell("lambda = 0", "c", [50, 50.1, 51.9], "prototype"),
        cell("lambda = 1", "c", [95, 95.1, 96.9], "prototype"),
        cell("lambda = 2", "c", [97, 97.2, 98.8], "prototype"),
    ]
    assert judge_best_lambda({"fig-lambda": Results.from_cells(cells)}).verdict == "does not hold"


def test_the_distance_is_the_regulariser_divided_by_lambda():
    cells = []
    for lam, losses in ((1, [0.10, 0.11, 0.12]), (2, [0.10, 0.12, 0.13]), (4, [0.80, 0.81, 0.83])):
        made = cell(f"lambda = {lam}", "c", [95, 95, 95], "prototype")
        for run, loss in zip(made["runs"], losses, strict=True):
            run["loss"] = {"regulariser": loss}
        cells.append(made)
    claim = judge_distance({"fig-lambda": Results.from_cells(cells)})
    effects = {answer.first: answer.comparison.effect for answer in claim.answers}
    assert effects == {
        "lambda = 2": pytest.approx((0.05 + 0.06 + 0.065 - 0.33) / 3),
        "lambda = 4": pytest.approx((0.2 + 0.2025 + 0.2075 - 0.175) / 3),
    }
    assert claim.verdict == "holds in part"


def test_knowledge_travels_if_prototypes_work_without_the_clients_share():
    cells = []
    for name, level in (
        ("FedProto, own initial weights", 0.85),
        ("lambda = 0, own initial weights", 0.35),
    ):
        made = cell(name, "c", [95, 95, 95], "prototype")
        for run in made["runs"]:
            shift = 0.001 * run["seed"] * level
            run["travel"] = [
                {"id": 0, "without_own": level + shift},
                {"id": 1, "without_own": level - 0.1},
            ]
        cells.append(made)
    claim = judge_travel({"study-travel": Results.from_cells(cells)})
    assert claim.verdict == "holds" and "80.0% against 30.0% from own starts" in claim.figures
    assert claim.figures.startswith("Among a client's own classes")


def test_accuracy_lost_with_few_images_is_compared():
    cells = [cell("FedProto", "k = 100", [95, 96, 97]), cell("FedProto", "k = 5", [90, 91.1, 92])]
    cells += [cell("Local", "k = 100", [95, 96, 97]), cell("Local", "k = 5", [80, 81, 82.2])]
    (answer,) = judge_few_images({"fig-shots": Results.from_cells(cells)}).answers
    assert answer.outcome is BETTER
    assert answer.comparison.effect == pytest.approx((5 + 4.9 + 5) / 3 - (15 + 15 + 14.8) / 3)


def test_a_start_near_the_papers_holds():
    made = cell("as in the paper", "c", [50, 50, 50])
    made["before"] = {"head": {}}
    for run, value in zip(made["runs"], (0.27, 0.275, 0.28), strict=True):
        run["before"] = [{"id": 0, "head": value}]
    claim = judge_start({"study-before": Results.from_cells([made])})
    assert claim.verdict == "holds"
    assert claim.figures == "Closest to it: as in the paper; head, -0.05 ± 1.24 points."


# --- seeds that diverged


def test_a_diverged_seed_counts_against_its_method():
    default = cell("default", "c", [98.5, 98.6, 98.4, 98.5, 98.6], "prototype")
    broken = cell("distance l1", "c", [78.5, 77.4, 76.4, 75.6], "prototype", diverged=[4])
    claim = judge_options({"study-options": Results.from_cells([default, broken])})
    (answer,) = claim.answers
    assert (answer.comparison.seeds, answer.comparison.diverged_first) == (5, 1)
    assert answer.outcome is WORSE
    assert "Diverged: distance l1 in 1 of 5 federations." in render_page([], [claim])


def test_a_method_that_always_diverged_is_undecided():
    default = cell("default", "c", [98.5, 98.6], "prototype")
    lost = cell("distance l1", "c", [98.0], "prototype", diverged=[0, 1]) | {"runs": []}
    claim = judge_options({"study-options": Results.from_cells([default, lost])})
    (answer,) = claim.answers
    assert answer.outcome is UNDECIDED and answer.comparison.diverged_first == 2
    assert "Diverged: distance l1 in 2 of 2 federations." in render_page([], [claim])


def test_the_committed_study_has_a_diverged_seed():
    content = json.loads((RESULTS / "study-options.json").read_text())
    claim = judge_options({"study-options": Results.from_cells(content["cells"])})
    answers = {answer.first: answer for answer in claim.answers}
    answer = answers["distance sql2, lambda 1"]
    assert answer.comparison.seeds == 5
    assert answer.comparison.diverged_first == 1
    assert answer.outcome is not EQUIVALENT


def diverged_cell(method, column, score="prototype"):
    """Return a cell of which both seeds diverged, as tables.py writes it."""
    lost = cell(method, column, [98.0], score, diverged=[0, 1])
    for key in ("accuracy", "communication"):
        del lost[key]
    return lost | {"runs": [], "seeds": []}


def test_a_lambda_that_always_diverged_is_named():
    cells = [cell("lambda = 1", "c", [95, 95.1], "prototype"), diverged_cell("lambda = 4", "c")]
    for run in cells[0]["runs"]:
        run["loss"] = {"regulariser": 0.1}
    results = {"fig-lambda": Results.from_cells(cells)}
    assert (
        judge_best_lambda(results).note == "Accuracy in percent by lambda: 1: 95.05, 4: diverged."
    )
    figures = "Mean squared distance per dimension, by lambda: 0.1000 at 1."
    assert judge_distance(results).figures == figures


def test_comparisons_without_a_finished_run_have_no_effect():
    cells = [cell("default", "c", [98.5, 98.6], "prototype")]
    cells.append(cell("distance l2", "c", [97.5, 97.7], "prototype"))
    cells.append(diverged_cell("distance l1", "c"))
    claim = judge_options({"study-options": Results.from_cells(cells)})
    page = render_page([], [claim])
    assert "undecided (-0.95 ± 0.64 points): distance l2; distance l1." in page
    assert "nan" not in page
    (answer,) = [answer for answer in claim.answers if answer.first == "distance l1"]
    alone = replace(claim, answers=[answer])
    assert "MNIST: 1 undecided (no effect measured)" in render_page([], [alone])


def test_traffic_is_that_of_columns_with_a_finished_run():
    cells = [cell("FedProto", "n = 4, stdev 2", [95], "prototype")]
    cells.append(diverged_cell("FedProto", "n = 5, stdev 2"))
    claim = judge_traffic({"table-mnist": Results.from_cells(cells)})
    assert claim.figures == "MNIST 4,000 to 4,000."


def test_knowledge_does_not_travel_if_everything_diverged():
    cells = [diverged_cell("FedProto", "c"), diverged_cell("lambda = 0", "c")]
    claim = judge_travel({"study-travel": Results.from_cells(cells)})
    assert (claim.verdict, claim.figures) == ("undecided", "")


# --- pages


def test_quick_versions_are_not_evidence(tmp_path):
    curve = {"round": [10], "prototype": [0.9], "head": [0.5]}
    cells = [cell("FedProto", column, [95, 96], "prototype", curve=curve) for column in COLUMNS]
    cells += [cell("Local", column, [90, 91.5], curve=curve) for column in COLUMNS]
    (tmp_path / "table-mnist.json").write_text(json.dumps({"quick": True, "cells": cells}))
    assert "On MNIST: " not in render_verdicts(tmp_path)["VERDICTS.md"]
    (tmp_path / "table-mnist.json").write_text(json.dumps({"quick": False, "cells": cells}))
    assert "On MNIST: " in render_verdicts(tmp_path)["VERDICTS.md"]


@pytest.mark.parametrize("content", ['{"cells": [1]}', '{"cells": [{}]}', "{", "[" * 5000])
def test_a_damaged_file_is_refused(content, tmp_path):
    (tmp_path / "table-mnist.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"table-mnist\.json is not "):
        render_verdicts(tmp_path)


def test_an_empty_folder_has_no_measured_claim(tmp_path):
    papers, further = judge_all(tmp_path)
    assert len(papers) + len(further) == 24
    assert {claim.verdict for claim in (*papers, *further)} == {"not measured yet"}
    assert render_verdicts(tmp_path)["VERDICTS.md"].count("not measured yet") == 2 * 24


def test_the_summary_fits_on_one_screen():
    summary = (RESULTS / "VERDICTS.md").read_text().partition("## Claim by claim")[0]
    assert len(summary.splitlines()) < 36
    assert "Local" not in summary  # counts and effects; the names follow below


def test_every_comparison_of_the_page_is_in_the_csv(committed):
    papers, further = committed
    rows = list(csv.DictReader(render_csv([*papers, *further]).splitlines()))
    comparisons = [len(claim.answers) + len(claim.details) for claim in (*papers, *further)]
    assert len(rows) == sum(comparisons)
    families = {row["family"] for row in rows}
    assert {"accuracy", "accuracy, by setting", "own classes", "rounds", "options"} <= families
    assert not any("averaging" in row["claim"].lower() for row in rows)


def test_the_committed_verdicts_follow_from_the_committed_numbers(committed):
    papers, further = committed
    assert (RESULTS / "VERDICTS.md").read_text() == render_page(papers, further)
    assert (RESULTS / "verdicts.csv").read_text() == render_csv([*papers, *further])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*-*.json")), ids=lambda path: path.stem)
def test_the_committed_tables_follow_from_the_committed_numbers(path):
    content = json.loads(path.read_text())
    if "cells" in content:
        render = render_methods_page if "trials" in content else render_table_page
        assert path.with_suffix(".md").read_text() == render(content)
