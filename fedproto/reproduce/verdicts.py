"""The paper's claims, and some it does not make, each judged by the numbers in the JSON files of the targets.

A claim is a family of comparisons (statistics.py): one per other method and data set, say.
`verdict_page.py` makes a page and a CSV of them. A claim whose target has not been made yet says so.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.core.files import read_json
from fedproto.errors import RunFolderError
from fedproto.reproduce.statistics import (
    ACCURACY_MARGIN,
    DEVIATION_MARGIN,
    ROUNDS_MARGIN,
    Comparison,
    Decision,
    Measurement,
    Outcome,
    compare,
    decide_family,
    exact,
)
from fedproto.reproduce.tables import PAPERS_START

TABLES = {"table-mnist": "MNIST", "table-femnist": "62 characters", "table-cifar10": "CIFAR-10"}
BASELINES = ("Local", "FeSEM", "FedProx", "FedPer", "FedAvg", "FedRep")
OURS = "FedProto"
MIXED = "FedProto-mh"
GOAL = 0.98  # of FedProto's last accuracy: what "needs fewer rounds" is about
START_MARGIN = (
    3.0  # points: the paper gives one number, without its spread, for the network before training
)
ALL_SETTINGS = "all settings"

HOLDS = "holds"
IN_PART = "holds in part"
FAILS = "does not hold"
UNDECIDED = "undecided"
NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Question:
    """Two methods that are to be compared, before the family is corrected."""

    data: str
    setting: str
    first: str
    second: str
    comparison: Comparison


@dataclass(frozen=True)
class Answer:
    """A question with its outcome."""

    data: str
    setting: str
    first: str
    second: str
    decision: Decision

    @property
    def outcome(self) -> Outcome:
        return self.decision.outcome

    @property
    def comparison(self) -> Comparison:
        return self.decision.comparison


@dataclass(frozen=True)
class Claim:
    """A sentence, its verdict, and the comparisons behind it.

    note     what was measured, and how
    figures  what a person would quote, where it is not the list of comparisons
    answers  one family: corrected together, and what the verdict follows from
    details  the same by setting, a family of its own
    digits   of the effects
    labels   what "better" and "worse" are called
    """

    key: str
    title: str
    verdict: str
    unit: str = "points"
    note: str = ""
    picture: str = ""
    answers: Sequence[Answer] = ()
    details: Sequence[Answer] = ()
    digits: int = 2
    figures: str = ""
    labels: tuple[str, str] = ("better", "worse")

    def label(self, outcome: Outcome) -> str:
        """The word for an outcome in this claim."""
        better, worse = self.labels
        return {Outcome.BETTER: better, Outcome.WORSE: worse}.get(outcome, outcome.value)


# --- results


Cell = dict[str, Any]
Run = dict[str, Any]
Value = Callable[[Cell, Run], float]
Measurements = dict[tuple[Any, int], Measurement]


@dataclass
class Results:
    """The cells of a target, by method and column."""

    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> Results:
        """Cells in which at least one run finished or diverged."""
        return cls(
            {
                (cell["method"], cell["column"]): cell
                for cell in cells
                if cell["runs"] or _diverged(cell)
            }
        )

    def has(self, *methods: str) -> bool:
        names = {method for method, _ in self.cells}
        return names.issuperset(methods)

    def measure(self, method: str, value: Value) -> Measurements:
        """One number per federation, by column and seed; its value is None if the run diverged."""
        found: Measurements = {}
        for (name, column), cell in self.cells.items():
            if name != method:
                continue
            for run in cell["runs"]:
                found[column, run["seed"]] = Measurement(value(cell, run))
            for seed in _diverged(cell):
                found[column, seed] = Measurement(None)
        return found

    def mean(self, method: str, value: Value) -> float:
        """The mean over the federations that finished."""
        values = [
            each.value for each in self.measure(method, value).values() if each.value is not None
        ]
        return statistics.fmean(values)


def _diverged(cell: Cell) -> list[int]:
    """Seeds whose training ended in numbers that are not finite."""
    return [each["seed"] for each in cell.get("diverged", [])]


def accuracy(key: str | None = None) -> Value:
    """The mean over clients of an accuracy, by default of what the method predicts by, in percent."""

    def value(cell: Cell, run: Run) -> float:
        return 100 * statistics.fmean(run["accuracy"][key or cell["score"]])

    return value


def deviation(cell: Cell, run: Run) -> float:
    """The standard deviation over clients of what the method predicts by, in points."""
    return 100 * float(np.std(run["accuracy"][cell["score"]]))


def read(folder: Path) -> dict[str, Results]:
    """The targets that were made; quick versions are not evidence."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if not isinstance(content, dict):
            raise RunFolderError(
                f"{path} is not what a target writes: delete it, or make its target again"
            )
        if "cells" in content and not content.get("quick"):
            found[path.stem] = _results(path, content["cells"])
    return found


def _results(path: Path, cells: Any) -> Results:
    try:
        return Results.of(cells)
    except (KeyError, TypeError) as error:
        raise RunFolderError(
            f"{path} is not a file of `fedproto reproduce`: make its target again"
        ) from error


# --- from comparisons to a verdict


def decide(questions: Sequence[Question]) -> list[Answer]:
    """Answer the questions of one family."""
    decisions = decide_family([question.comparison for question in questions])
    return [
        Answer(question.data, question.setting, question.first, question.second, decision)
        for question, decision in zip(questions, decisions, strict=True)
    ]


def judge(outcomes: Sequence[Outcome], good: Collection[Outcome]) -> str:
    """The verdict on a claim that all outcomes be good; what is undecided is never evidence."""
    fitting = sum(outcome in good for outcome in outcomes)
    undecided = outcomes.count(Outcome.UNDECIDED)
    if not outcomes:
        return NOT_MEASURED
    if fitting == len(outcomes):
        return HOLDS
    if fitting:
        return IN_PART
    return UNDECIDED if undecided == len(outcomes) else FAILS


def claim_of(
    key: str,
    title: str,
    questions: Sequence[Question],
    good: Collection[Outcome] = (Outcome.BETTER,),
    details: Sequence[Question] = (),
    **more: Any,
) -> Claim:
    """A claim that all questions of a family have good answers."""
    answers = decide(questions)
    verdict = judge([answer.outcome for answer in answers], good)
    return Claim(key, title, verdict, answers=answers, details=decide(details), **more)


def _tables(found: dict[str, Results], *methods: str) -> dict[str, Results]:
    """The tables in which these methods were run, by the name of their data."""
    there = {}
    for name, title in TABLES.items():
        if name in found and found[name].has(OURS, *methods):
            there[title] = found[name]
    return there


Pair = tuple[Measurements, Measurements]


def _against_baselines(
    found: dict[str, Results],
    pair: Callable[[Results, str], Pair],
    margin: float,
    smaller_is_better: bool = False,
) -> tuple[list[Question], list[Question]]:
    """FedProto against each other method on each data set: over all settings, and setting by setting."""
    whole = []
    details = []
    for data, table in _tables(found).items():
        for rival in BASELINES:
            if not table.has(rival):
                continue
            ours, theirs = pair(table, rival)
            comparison = compare(ours, theirs, margin=margin, smaller_is_better=smaller_is_better)
            whole.append(Question(data, ALL_SETTINGS, OURS, rival, comparison))
            for column in dict.fromkeys(column for column, _ in ours):
                mine = _only(ours, column)
                comparison = compare(
                    mine, theirs, margin=margin, smaller_is_better=smaller_is_better
                )
                details.append(Question(data, column, OURS, rival, comparison))
    return whole, details


def _only(numbers: Measurements, column: str) -> Measurements:
    return {key: value for key, value in numbers.items() if key[0] == column}


# --- the paper's claims


def more_accurate(found: dict[str, Results]) -> Claim:
    def pair(table: Results, rival: str) -> Pair:
        return table.measure(OURS, accuracy()), table.measure(rival, accuracy())

    whole, details = _against_baselines(found, pair, ACCURACY_MARGIN)
    return claim_of(
        "accuracy",
        "FedProto is more accurate than the other methods",
        whole,
        details=details,
        picture="table-mnist.png",
        note="Scored over all classes: FedProto by the nearest prototype, the others by their head.",
    )


def less_varied(found: dict[str, Results]) -> Claim:
    def pair(table: Results, rival: str) -> Pair:
        return table.measure(OURS, deviation), table.measure(rival, deviation)

    whole, details = _against_baselines(found, pair, DEVIATION_MARGIN, smaller_is_better=True)
    return claim_of(
        "deviation",
        "Its accuracy varies less between clients",
        whole,
        details=details,
        note="Standard deviation over the 20 clients of a federation; less is better.",
    )


def fewer_rounds(found: dict[str, Results]) -> Claim:
    def pair(table: Results, rival: str) -> Pair:
        last = table.measure(OURS, accuracy())
        goals = {
            key: GOAL * each.value / 100 for key, each in last.items() if each.value is not None
        }
        return rounds_to(table, OURS, goals), rounds_to(table, rival, goals)

    whole, details = _against_baselines(found, pair, ROUNDS_MARGIN, smaller_is_better=True)
    return claim_of(
        "rounds",
        "It needs fewer rounds",
        whole,
        details=details,
        unit="rounds",
        digits=1,
        note=f"Rounds to {GOAL:.0%} of FedProto's own last accuracy, over all classes; fewer is better. A method that "
        "never got there needs more rounds than it was given, so its difference is a bound (≤).",
    )


def rounds_to(table: Results, method: str, goals: dict[tuple[Any, int], float]) -> Measurements:
    """The first evaluated round in which each federation reached its goal, or more than all of its rounds."""
    reached: Measurements = {}
    for (name, column), cell in table.cells.items():
        if name != method:
            continue
        for run in cell["runs"]:
            key = column, run["seed"]
            if key in goals:
                reached[key] = _first_round(run["curve"], cell["score"], goals[key])
        for seed in _diverged(cell):
            reached[column, seed] = Measurement(None)
    return reached


def _first_round(curve: dict[str, list[Any]], score: str, goal: float) -> Measurement:
    for number, value in zip(curve["round"], curve[score], strict=True):
        if value >= goal:
            return Measurement(float(number))
    return Measurement(float(curve["round"][-1]), at_least=True)


def little_traffic(found: dict[str, Results]) -> Claim:
    """What is sent is counted, not estimated: there is nothing to test."""
    title = "It sends 4,000 values per round (41,000 on CIFAR-10)"
    figures = []
    is_near = []
    for name, papers in (
        ("table-mnist", 4_000),
        ("table-femnist", 4_000),
        ("table-cifar10", 41_000),
    ):
        if name not in found or not found[name].has(OURS):
            continue
        cells = {
            column: cell for (method, column), cell in found[name].cells.items() if method == OURS
        }
        sent = {column: cell["communication"]["values_per_round"] for column, cell in cells.items()}
        at_four = [value for column, value in sent.items() if column.startswith("n = 4")]
        figures.append(f"{TABLES[name]} {min(sent.values()):,.0f} to {max(sent.values()):,.0f}")
        if at_four:
            is_near.append(all(abs(value / papers - 1) < 0.15 for value in at_four))
    if not is_near:
        verdict = NOT_MEASURED
    elif all(is_near):
        verdict = f"{HOLDS} for clients with 4 classes"
    else:
        verdict = FAILS
    return Claim(
        "traffic",
        title,
        verdict,
        unit="values",
        figures=f"{'; '.join(figures)}." if figures else "",
        picture="table-mnist.png",
        note="Counted, so there is no interval. It grows with the number of classes per client.",
    )


def mixed_models(found: dict[str, Results]) -> Claim:
    questions = []
    for data, table in _tables(found, MIXED).items():
        comparison = compare(
            table.measure(MIXED, accuracy()),
            table.measure(OURS, accuracy()),
            margin=ACCURACY_MARGIN,
        )
        questions.append(Question(data, ALL_SETTINGS, MIXED, OURS, comparison))
    return claim_of(
        "mixed models",
        "Clients with different models do as well as clients with equal ones",
        questions,
        good=(Outcome.BETTER, Outcome.EQUIVALENT),
        note="Mixed minus equal architectures, by the nearest prototype over all classes.",
    )


def fewer_samples(found: dict[str, Results]) -> Claim:
    questions = []
    table = found.get("fig-shots", Results())
    rivals = (
        ("FedAvg", None, "FedAvg"),
        ("FedAvg", "head_own", "FedAvg, among own classes"),
        ("Local", None, "Local"),
    )
    for rival, key, name in rivals:
        if table.has(OURS, rival):
            ours = change(table, OURS, "k = 5", "k = 100")
            theirs = change(table, rival, "k = 5", "k = 100", key)
            comparison = compare(ours, theirs, margin=ACCURACY_MARGIN, smaller_is_better=True)
            questions.append(Question("MNIST", "from 100 to 5 images", OURS, name, comparison))
    return claim_of(
        "fewer images",
        "With fewer training images it loses less accuracy",
        questions,
        picture="fig-shots.png",
        note="What is lost from 100 to 5 images per class after 100 rounds, when FedAvg still learns; less is better.",
    )


def imbalance(found: dict[str, Results]) -> Claim:
    questions = []
    table = found.get("study-imbalance", Results())
    for rival in BASELINES:
        if table.has(OURS, rival):
            ours = change(table, OURS, "k = 100", "k = 50 to 150")
            theirs = change(table, rival, "k = 100", "k = 50 to 150")
            comparison = compare(ours, theirs, margin=ACCURACY_MARGIN)
            questions.append(
                Question("MNIST", "50 to 150 images against 100", OURS, rival, comparison)
            )
    return claim_of(
        "imbalance",
        "It copes better with clients of unequal size",
        questions,
        picture="study-imbalance.png",
        note="The change in accuracy when clients have 50 to 150 images per class instead of 100.",
    )


def change(
    table: Results, method: str, before: str, after: str, key: str | None = None
) -> Measurements:
    """What an accuracy gains from one column to another; nothing is known where one of both diverged."""
    numbers = table.measure(method, accuracy(key))
    gains: Measurements = {}
    for column, seed in numbers:
        if column != before or (after, seed) not in numbers:
            continue
        old = numbers[before, seed].value
        new = numbers[after, seed].value
        gains[before, seed] = Measurement(None if old is None or new is None else new - old)
    return gains


def best_lambda(found: dict[str, Results]) -> Claim:
    table = found.get("fig-lambda", Results())
    questions = []
    means = []
    for name in dict.fromkeys(name for name, _ in table.cells):
        means.append(f"{name.removeprefix('lambda = ')}: {table.mean(name, accuracy()):.2f}")
        if name != "lambda = 1" and table.has("lambda = 1"):
            comparison = compare(
                table.measure("lambda = 1", accuracy()),
                table.measure(name, accuracy()),
                margin=ACCURACY_MARGIN,
            )
            questions.append(
                Question("62 characters", "n = 3, stdev 2", "lambda = 1", name, comparison)
            )
    claim = claim_of(
        "best lambda",
        "Lambda = 1 is the best of 0 to 4",
        questions,
        good=(Outcome.BETTER, Outcome.EQUIVALENT),
        picture="fig-lambda.png",
        note=f"Accuracy in percent by lambda: {', '.join(means)}." if means else "",
    )
    if any(answer.outcome is Outcome.WORSE for answer in claim.answers):
        return _with_verdict(claim, FAILS)  # one that is better is enough
    return claim


def _with_verdict(claim: Claim, verdict: str) -> Claim:
    return Claim(**(vars(claim) | {"verdict": verdict}))


def closer_with_lambda(found: dict[str, Results]) -> Claim:
    """The regulariser in the last round is lambda times the distance."""
    table = found.get("fig-lambda", Results())
    names = {float(name.removeprefix("lambda = ")): name for name, _ in table.cells}
    positive = sorted(lam for lam in names if lam > 0)
    ends = [
        f"{table.mean(names[lam], distance_to_prototypes(lam)):.4f} at {lam:g}" for lam in positive
    ]
    questions = []
    for smaller, larger in itertools.pairwise(positive):
        ours = table.measure(names[larger], distance_to_prototypes(larger))
        theirs = table.measure(names[smaller], distance_to_prototypes(smaller))
        comparison = compare(ours, theirs, margin=None, smaller_is_better=True)
        setting = "n = 3, stdev 2"
        questions.append(
            Question("62 characters", setting, names[larger], names[smaller], comparison)
        )
    return claim_of(
        "distance",
        "A larger lambda brings embeddings closer to their prototypes",
        questions,
        unit="mean squared distance per dimension",
        digits=4,
        labels=("closer", "farther"),
        picture="fig-lambda.png",
        figures=f"Mean squared distance per dimension, by lambda: {', '.join(ends)}."
        if ends
        else "",
        note="Each lambda is compared with the next smaller one.",
    )


def distance_to_prototypes(lam: float) -> Value:
    return lambda cell, run: run["loss"]["regulariser"] / lam


def before_training(found: dict[str, Results]) -> Claim:
    table = found.get("study-before", Results())
    papers = 100 * PAPERS_START
    questions = []
    for (method, column), cell in table.cells.items():
        ways = [
            key for key in cell.get("before", {}) if all("before" in run for run in cell["runs"])
        ]
        for way in ways:
            ours = {(column, run["seed"]): _mean_before(run, way) for run in cell["runs"]}
            theirs = dict.fromkeys(ours, papers)
            comparison = compare(exact(ours), exact(theirs), margin=START_MARGIN)
            scored = f"{method}; {way.replace('_own', ' among own classes')}"
            questions.append(Question("CIFAR-10", column, scored, "the paper", comparison))
    answers = decide(questions)
    equivalent = [answer for answer in answers if answer.outcome is Outcome.EQUIVALENT]
    if not answers:
        verdict = NOT_MEASURED
    elif equivalent:
        verdict = HOLDS
    elif all(answer.outcome is not Outcome.UNDECIDED for answer in answers):
        verdict = FAILS
    else:
        verdict = UNDECIDED
    nearest = min(answers, key=lambda answer: abs(answer.comparison.effect), default=None)
    closest = (
        ""
        if nearest is None
        else f"Nearest to it: {nearest.first}, {nearest.comparison.text()} points."
    )
    return Claim(
        "before training",
        f"The pre-trained network has {papers:.2f}% on CIFAR-10 before training",
        verdict,
        answers=answers,
        labels=("higher", "lower"),
        picture="study-before.png",
        figures=closest,
        note="Ours minus the paper's, for three ways to load the weights and four ways to score; equivalent would be "
        f"within {START_MARGIN:g} points, since the paper gives one number without its spread.",
    )


def _mean_before(run: Run, way: str) -> float:
    return 100 * statistics.fmean(client[way] for client in run["before"])


def _measures(path: Path) -> dict[str, Any]:
    content = read_json(path)
    measures = content.get("measures") if isinstance(content, dict) else None
    if not isinstance(measures, dict) or not all(
        isinstance(each, dict) for each in measures.values()
    ):
        raise RunFolderError(
            f"{path} is not what a target writes: delete it, or make its target again"
        )
    return measures


def separable(folder: Path) -> Claim:
    """One seed, so nothing is decided."""
    title = "Embeddings cluster by class, and within a class by client"
    path = folder / "fig-tsne-measures.json"
    measures = _measures(path) if path.exists() else {}
    names = ("silhouette_class", "silhouette_client_within_class")
    figures = []
    for method, found in measures.items():
        if all(found.get(name) is not None for name in names):
            by_class, by_client = (found[name] for name in names)
            figures.append(f"{method} {by_class:.2f} / {by_client:.2f}")
    return Claim(
        "clusters",
        title,
        f"{UNDECIDED}: one seed" if figures else NOT_MEASURED,
        unit="silhouette",
        figures=f"Silhouettes by class / by client: {', '.join(figures)}." if figures else "",
        picture="fig-tsne.png",
        note="A silhouette of 1 is tight clusters, 0 none; MNIST.",
    )


# --- what the paper does not claim


def among_own_classes(found: dict[str, Results]) -> Claim:
    def pair(table: Results, rival: str) -> Pair:
        return table.measure(OURS, accuracy("prototype_own")), table.measure(
            rival, accuracy("head_own")
        )

    whole, details = _against_baselines(found, pair, ACCURACY_MARGIN)
    return claim_of(
        "own classes",
        "FedProto is more accurate when each client chooses among its own classes only",
        whole,
        details=details,
        picture="table-cifar10.png",
        note="As the paper's own code scored FedProto.",
    )


def travel(found: dict[str, Results]) -> Claim:
    """The nearest prototype with the client's own share removed, beside members that never regularised."""
    table = found.get("study-travel", Results())
    starts = (
        ("one shared start", "FedProto", "lambda = 0"),
        ("own starts", "FedProto, own initial weights", "lambda = 0, own initial weights"),
    )
    questions = []
    shown = []
    for start, ours, never in starts:
        if not table.has(ours, never):
            continue
        mine = table.measure(ours, travelled)
        theirs = table.measure(never, travelled)
        comparison = compare(mine, theirs, margin=ACCURACY_MARGIN)
        questions.append(Question("MNIST", start, ours, never, comparison))
        shown.append(
            f"{table.mean(ours, travelled):.1f}% against {table.mean(never, travelled):.1f}% from {start}"
        )
    return claim_of(
        "travel",
        "Knowledge travels: FedProto's prototypes serve a client that did not contribute to them",
        questions,
        picture="study-travel.png",
        figures=f"Among a client's own classes, {' and '.join(shown)}." if shown else "",
        note="Accuracy of the nearest global prototype, with the client's own share removed from the prototypes; "
        "lambda = 1 against lambda = 0.",
    )


def travelled(cell: Cell, run: Run) -> float:
    """Accuracy without the client's own share, among its own classes, in percent."""
    return 100 * statistics.fmean(client["without_own"] for client in run["travel"])


OPTIONS = (
    "weighting uniform",
    "weighting eq6 (as printed)",
    "distance l2",
    "distance sql2, lambda 1/50",
    "distance sql2, lambda 1",
    "distance l1",
    "distance emd",
    "distance cosine",
    "regularise class (Eq. 8)",
    "collect during",
    "own initial weights",
    "test 40 images a class",
    "test 15 images a class",
)


def options(found: dict[str, Results]) -> Claim:
    table = found.get("study-options", Results())
    questions = []
    for option in OPTIONS:
        if table.has("default", option):
            comparison = compare(
                table.measure(option, accuracy()),
                table.measure("default", accuracy()),
                margin=ACCURACY_MARGIN,
            )
            questions.append(Question("MNIST", "n = 3, stdev 2", option, "the default", comparison))
    return claim_of(
        "options",
        "What the paper leaves open does not change FedProto's accuracy",
        questions,
        good=(Outcome.EQUIVALENT,),
        picture="study-options.png",
        note="Each choice changed alone. A run that diverged counts as badly as the worst run that finished.",
    )


def judge_all(folder: Path) -> tuple[list[Claim], list[Claim]]:
    """The paper's claims and further ones, from the results in a folder."""
    found = read(folder)
    papers = [
        more_accurate(found),
        less_varied(found),
        fewer_rounds(found),
        little_traffic(found),
        mixed_models(found),
        fewer_samples(found),
        imbalance(found),
        best_lambda(found),
        closer_with_lambda(found),
        before_training(found),
        separable(folder),
    ]
    further = [among_own_classes(found), travel(found), options(found)]
    return papers, further
