"""The verdicts: differences against scipy's own tests, words against hand-made results, pages against their JSON."""

import json
from pathlib import Path

import pytest
from scipy import stats

from fedproto.reproduce.tables import markdown, summary
from fedproto.reproduce.verdicts import (
    Compared,
    Found,
    Paired,
    Verdict,
    best_lambda,
    fewer_rounds,
    judged,
    little_traffic,
    mixed_models,
    more_accurate,
    own_heads,
    page,
    pair,
    travel,
)

RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = ("n = 3, stdev 2", "n = 4, stdev 2")


def cell(method, column, means, score="head", values=4000.0, own=0.0, to_99=10, **more):
    """A cell with one number a seed, of two clients that lie a point on either side of it."""
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
        "rounds_to_99": [to_99] * len(means),
        "communication": {"values_per_round": values},
        "accuracy": {score: summary([run["accuracy"][score] for run in runs])},
        "runs": runs,
    }


def table(**methods):
    """The same means in both columns, FedProto by prototype."""
    names = {name.replace("_", "-"): means for name, means in methods.items()}
    return Found(
        [
            cell(name, column, means, "prototype" if name.startswith("FedProto") else "head")
            for name, means in names.items()
            for column in COLUMNS
        ]
    )


def test_a_pair_is_students_paired_test_over_the_seeds_means():
    first = {(column, seed): 90 + seed + shift for seed in range(4) for column, shift in (("a", 0), ("b", 2))}
    second = {key: 89 + 0.5 * key[1] ** 2 for key in first}
    found = pair(first, second)
    ours = [91 + seed for seed in range(4)]
    theirs = [89 + 0.5 * seed**2 for seed in range(4)]
    test = stats.ttest_rel(ours, theirs)
    assert found.mean == pytest.approx(sum(ours) / 4 - sum(theirs) / 4)
    assert found.chance == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert found.half == pytest.approx((high - low) / 2)
    assert (found.above, found.pairs, found.seeds) == (7, 8, 4)


def test_only_federations_that_both_have_are_compared():
    found = pair({("a", 0): 1.0, ("a", 1): 5.0, ("b", 0): 3.0}, {("a", 0): 0.0, ("b", 0): 1.0})
    assert (found.mean, found.pairs, found.seeds) == (1.5, 2, 1)
    assert found.sign is None and "one seed" in str(found)


@pytest.mark.parametrize(
    ("mean", "chance", "seeds", "sign"),
    [(1, 0.01, 5, 1), (-1, 0.01, 5, -1), (1, 0.2, 5, 0), (1, float("nan"), 1, None)],
)
def test_we_believe_in_a_difference_at_five_percent(mean, chance, seeds, sign):
    assert Paired(mean, 0.5, chance, 1, 2, seeds).sign == sign


@pytest.mark.parametrize(
    ("signs", "verdict"),
    [
        ({}, "not measured yet"),
        ({"A": None}, "not measured yet"),
        ({"A": 1, "B": 1}, "holds"),
        ({"A": 1}, "holds on A"),
        ({"A": 1, "B": None}, "holds on A"),
        ({"A": 1, "B": 0}, "holds under a condition: on A, not on B"),
        ({"A": 1, "B": -1, "C": 1}, "holds under a condition: on A and C, not on B"),
        ({"A": -1, "B": 0}, "does not hold"),
        ({"A": 0}, "does not hold: no difference seen"),
    ],
)
def test_words(signs, verdict):
    assert judged(signs) == verdict


def test_a_verdict_says_in_which_settings_it_is_not_seen():
    ours = {("n = 3", s): 95.0 + s for s in range(4)} | {("n = 5", s): 95.0 + s for s in range(4)}
    theirs = {("n = 3", s): 92.0 + s + 0.1 * s for s in range(4)} | {
        ("n = 5", s): 95.0 + s + (-1) ** s for s in range(4)
    }
    found = Compared.of("MNIST", ours, theirs)
    assert "settings above / level / below: 1 / 1 / 0" in str(found)
    assert found.verdict(1) == "holds under a condition: in the mean of the settings, not seen at n = 5"
    assert found.verdict(-1) == "does not hold"
    assert Compared.of("MNIST", ours, {}) is None


def test_the_same_difference_in_all_seeds_is_believed():
    same = pair({("a", s): 20.0 for s in range(5)}, {("a", s): 40.0 for s in range(5)})
    assert (same.mean, same.sign) == (-20, -1)
    assert pair({("a", s): 20.0 for s in range(5)}, {("a", s): 20.0 for s in range(5)}).sign == 0
    assert pair({}, {("a", 0): 1.0}) is None


def test_quick_versions_are_no_evidence(tmp_path):
    curve = {"round": [10], "prototype": [0.9], "head": [0.5]}
    content = {"quick": True, "cells": [cell("FedProto", c, [95, 96], "prototype", curve=curve) for c in COLUMNS]}
    content["cells"] += [cell("Local", c, [90, 91.5], curve=curve) for c in COLUMNS]
    (tmp_path / "table-mnist.json").write_text(json.dumps(content))
    assert "MNIST +" not in page(tmp_path)
    (tmp_path / "table-mnist.json").write_text(json.dumps(content | {"quick": False}))
    assert "MNIST +" in page(tmp_path)


def test_who_gets_there_later_needs_more_rounds_and_who_never_does_is_counted():
    curve = {"round": [10, 20, 30], "prototype": [0.9, 0.95, 0.96], "head": [0.5, 0.8, 0.93]}
    cells = [cell("FedProto", "n = 3", [96, 96.1], "prototype", curve=curve)]
    cells.append(cell("Local", "n = 3", [93, 95], curve=curve))
    verdict = found_of(fewer_rounds({"table-mnist": Found(cells)}), "it needs fewer rounds than Local")
    assert "MNIST -10.00" in verdict.measured and verdict.measured.endswith("Local never got there in 2")
    assert verdict.verdict == "MNIST: holds"


def found_of(verdicts, start) -> Verdict:
    (one,) = [verdict for verdict in verdicts if verdict.claim.startswith(start)]
    return one


def test_accuracy_of_the_baselines_is_their_head_over_all_classes_and_then_over_their_own():
    columns = [cell("FedProto", c, [95, 96, 97], "prototype", own=1) for c in COLUMNS]
    columns += [cell("FedAvg", c, [93, 94.5, 95], own=4) for c in COLUMNS]
    found = {"table-mnist": Found(columns)}
    against = found_of(more_accurate(found), "FedProto is more accurate than FedAvg")
    assert against.verdict == "MNIST: holds" and "+1.83" in against.measured and "6 of 6" in against.measured
    own = found_of(own_heads(found), "FedProto is more accurate than FedAvg whose head")
    assert own.verdict == "MNIST: does not hold" and "-2.17" in own.measured
    both = found_of(own_heads(found), "FedProto is more accurate than FedAvg, both choosing among")
    assert both.verdict == "MNIST: does not hold" and "-1.17" in both.measured
    assert found_of(more_accurate(found), "FedProto is more accurate than FedRep").verdict == "not measured yet"


@pytest.mark.parametrize(("mixed", "verdict"), [([94.2, 95.2], "holds on MNIST"), ([93.9, 94.9], "does not hold")])
def test_mixed_models_may_lose_a_point(mixed, verdict):
    found = {"table-mnist": table(FedProto=[95, 96], FedProto_mh=mixed)}
    assert found_of(mixed_models(found), "mixed").verdict == verdict


@pytest.mark.parametrize(("sent", "holds"), [(4000, True), (3500, True), (8000, False)])
def test_traffic_is_judged_at_four_classes(sent, holds):
    cells = [cell("FedProto", "n = 3, stdev 2", [95], "prototype", values=3000.0)]
    cells.append(cell("FedProto", "n = 4, stdev 2", [95], "prototype", values=float(sent)))
    verdict = found_of(little_traffic({"table-mnist": Found(cells)}), "4,000 values a round on MNIST")
    assert verdict.verdict.startswith("holds" if holds else "does not") and f"{sent:,}" in verdict.measured


@pytest.mark.parametrize(
    ("at_two", "verdict"),
    [([90, 91, 92], "holds"), ([97, 98.1, 99], "does not hold"), ([95.2, 94, 98], "holds under a condition: no worse")],
)
def test_the_best_lambda(at_two, verdict):
    cells = [cell("lambda = 1", "c", [95, 95.1, 96.9], "prototype"), cell("lambda = 2", "c", at_two, "prototype")]
    assert next(best_lambda({"fig-lambda": Found(cells)})).verdict.startswith(verdict)


def test_knowledge_travels_where_a_clients_own_share_is_not_missed():
    kept = [{"id": 0, "with_own": 0.9, "without_own": 0.895}, {"id": 1, "with_own": 0.8, "without_own": 0.8}]
    lost = [{"id": 0, "with_own": 0.9, "without_own": 0.3}, {"id": 1, "with_own": 0.8, "without_own": 0.4}]
    cells = [cell("FedProto, own initial weights", "c", [95, 95], "prototype", travel=kept)]
    cells.append(cell("lambda = 0, own initial weights", "c", [95, 95], "prototype", travel=lost))
    verdicts = list(travel({"study-travel": Found(cells)}))
    own = found_of(verdicts, "knowledge travels, from a start of their own")
    assert own.verdict == "holds on MNIST"
    assert "weights 85.00 / 84.75; lambda = 0, own initial weights 85.00 / 35.00" in own.measured
    assert found_of(verdicts, "knowledge travels, from one shared start").verdict == "not measured yet"


def test_nothing_made_is_nothing_measured(tmp_path):
    lines = [line for line in page(tmp_path).splitlines() if line.startswith("| ") and not line.startswith("| claim")]
    assert len(lines) > 40 and all(line.endswith("| – | **not measured yet** |") for line in lines)


def test_the_committed_verdicts_are_what_the_committed_numbers_say():
    assert (RESULTS / "VERDICTS.md").read_text() == page(RESULTS)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*-*.json")), ids=lambda path: path.stem)
def test_the_committed_tables_are_what_the_committed_numbers_say(path):
    content = json.loads(path.read_text())
    if "cells" in content:
        assert path.with_suffix(".md").read_text() == markdown(content)
