"""Claims that are judged by the three tables: FedProto beside the other methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fedproto.reproduce.claims import (
    AS_GOOD,
    FAILS,
    HOLDS,
    NOT_MEASURED,
    Claim,
    Question,
    compare_methods,
    judge,
)
from fedproto.reproduce.evidence import (
    MeasuredRuns,
    Quantity,
    Results,
    measure_accuracy,
    measure_deviation,
    measure_rounds,
)
from fedproto.reproduce.statistics import (
    ACCURACY_MARGIN,
    DEVIATION_MARGIN,
    ROUNDS_MARGIN,
    compare,
)

#: The data of each table, as the verdicts name it.
TABLES = {"table-mnist": "MNIST", "table-femnist": "62 characters", "table-cifar10": "CIFAR-10"}
BASELINES = ("Local", "FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep")
OURS = "FedProto"
MIXED = "FedProto-mh"
ALL_SETTINGS = "all settings"
#: "Needs fewer rounds" is about reaching this fraction of FedProto's last accuracy.
GOAL_FRACTION = 0.98
#: Values per round that the paper says FedProto sends.
PAPERS_VALUES = {"table-mnist": 4_000, "table-femnist": 4_000, "table-cifar10": 41_000}
#: What is sent agrees with the paper up to this fraction of the paper's number.
VALUES_TOLERANCE = 0.15

#: The measurements of FedProto and of a baseline in a table.
MeasurePair = Callable[[Results, str], tuple[MeasuredRuns, MeasuredRuns]]


def _tables_with(results: dict[str, Results], *methods: str) -> dict[str, Results]:
    """Return the tables in which FedProto and these methods were run, by the name of their data."""
    tables = {}
    for name, data in TABLES.items():
        if name in results and results[name].has(OURS, *methods):
            tables[data] = results[name]
    return tables


def _pair(ours: Quantity, theirs: Quantity) -> MeasurePair:
    """Return the function that measures FedProto by one quantity and a baseline by the other."""

    def measure_pair(table: Results, baseline: str) -> tuple[MeasuredRuns, MeasuredRuns]:
        return table.measure(OURS, ours), table.measure(baseline, theirs)

    return measure_pair


def _compare_with_baselines(
    results: dict[str, Results],
    measure_pair: MeasurePair,
    margin: float,
    smaller_is_better: bool = False,
) -> tuple[list[Question], list[Question]]:
    """Compare FedProto with each baseline on each data set.

    Returns the comparisons over all settings, and those setting by setting.
    """
    over_all = []
    by_setting = []
    for data, table in _tables_with(results).items():
        for baseline in BASELINES:
            if not table.has(baseline):
                continue
            ours, theirs = measure_pair(table, baseline)
            comparison = compare(ours, theirs, margin=margin, smaller_is_better=smaller_is_better)
            over_all.append(Question(data, ALL_SETTINGS, OURS, baseline, comparison))
            for column in dict.fromkeys(column for column, _ in ours):
                in_column = {key: value for key, value in ours.items() if key[0] == column}
                comparison = compare(
                    in_column, theirs, margin=margin, smaller_is_better=smaller_is_better
                )
                by_setting.append(Question(data, column, OURS, baseline, comparison))
    return over_all, by_setting


# --- the paper's claims


def judge_accuracy(results: dict[str, Results]) -> Claim:
    """Judge the accuracy over all classes."""
    questions, details = _compare_with_baselines(
        results, _pair(measure_accuracy, measure_accuracy), ACCURACY_MARGIN
    )
    return judge(
        "accuracy",
        "FedProto is more accurate than the other methods",
        questions,
        details=details,
        picture="table-mnist.png",
        note="Scored over all classes: FedProto by the nearest prototype, the others by their "
        "head.",
    )


def judge_deviation(results: dict[str, Results]) -> Claim:
    """Judge how much accuracies vary between the clients of a federation."""
    questions, details = _compare_with_baselines(
        results,
        _pair(measure_deviation, measure_deviation),
        DEVIATION_MARGIN,
        smaller_is_better=True,
    )
    return judge(
        "deviation",
        "Its accuracy varies less between clients",
        questions,
        details=details,
        note="Standard deviation over the 20 clients of a federation; less is better.",
    )


def judge_rounds(results: dict[str, Results]) -> Claim:
    """Judge the rounds to a fraction of FedProto's last accuracy."""
    questions, details = _compare_with_baselines(
        results, _measure_rounds_to_goal, ROUNDS_MARGIN, smaller_is_better=True
    )
    return judge(
        "rounds",
        "It needs fewer rounds",
        questions,
        details=details,
        unit="rounds",
        digits=1,
        note=f"Rounds to {GOAL_FRACTION:.0%} of FedProto's own last accuracy, over all classes; "
        "fewer is better. A method that never reached it needs more rounds than it was given, so "
        "its difference is a bound (≤).",
    )


def _measure_rounds_to_goal(table: Results, baseline: str) -> tuple[MeasuredRuns, MeasuredRuns]:
    """Return the rounds of FedProto and of a baseline to the goal in each federation."""
    goals = {}
    for key, accuracy in table.measure(OURS, measure_accuracy).items():
        if accuracy.value is not None:
            goals[key] = GOAL_FRACTION * accuracy.value / 100
    return measure_rounds(table, OURS, goals), measure_rounds(table, baseline, goals)


def judge_traffic(results: dict[str, Results]) -> Claim:
    """Judge the values sent per round, which are counted: there is nothing to test."""
    figures = []
    is_near = []
    for name, papers_values in PAPERS_VALUES.items():
        values = _values_per_round(results.get(name, Results()))
        if not values:
            continue
        figures.append(f"{TABLES[name]} {min(values.values()):,.0f} to {max(values.values()):,.0f}")
        for column, value in values.items():
            if column.startswith("n = 4"):
                is_near.append(abs(value / papers_values - 1) < VALUES_TOLERANCE)
    if not is_near:
        verdict = NOT_MEASURED
    elif all(is_near):
        verdict = f"{HOLDS} for clients with 4 classes"
    else:
        verdict = FAILS
    return Claim(
        "traffic",
        "It sends 4,000 values per round (41,000 on CIFAR-10)",
        verdict,
        unit="values",
        figures=f"{'; '.join(figures)}." if figures else "",
        picture="table-mnist.png",
        note="These are counts, so there is no interval. They grow with the classes per client.",
    )


def _values_per_round(table: Results) -> dict[str, float]:
    """Return the values that FedProto sent per round, by column, where a run finished."""
    values = {}
    for column, cell in table.columns_of(OURS):
        if cell["runs"]:
            values[column] = cell["communication"]["values_per_round"]
    return values


def judge_mixed_models(results: dict[str, Results]) -> Claim:
    """Judge FedProto with mixed architectures against FedProto with equal ones."""
    questions = []
    for data, table in _tables_with(results, MIXED).items():
        comparison = compare_methods(table, MIXED, OURS)
        questions.append(Question(data, ALL_SETTINGS, MIXED, OURS, comparison))
    return judge(
        "mixed models",
        "Clients with different models do as well as clients with equal ones",
        questions,
        good=AS_GOOD,
        note="Mixed minus equal architectures, by the nearest prototype over all classes.",
    )


# --- what the paper does not claim


def judge_own_classes(results: dict[str, Results]) -> Claim:
    """Judge the accuracy among the client's own classes."""
    by_prototype = partial(measure_accuracy, score="prototype_own")
    by_head = partial(measure_accuracy, score="head_own")
    questions, details = _compare_with_baselines(
        results, _pair(by_prototype, by_head), ACCURACY_MARGIN
    )
    return judge(
        "own classes",
        "FedProto is more accurate when each client chooses among its own classes only",
        questions,
        details=details,
        picture="table-cifar10.png",
        note="As the paper's own code scored FedProto.",
    )
