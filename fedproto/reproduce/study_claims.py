"""Claims that are judged by one figure or study each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedproto.core.files import read_json
from fedproto.reproduce.claims import (
    AS_GOOD,
    FAILS,
    HOLDS,
    NOT_MEASURED,
    UNDECIDED,
    Answer,
    Claim,
    Question,
    compare_methods,
    decide,
    judge,
)
from fedproto.reproduce.evidence import (
    Cell,
    Quantity,
    Results,
    measure_accuracy,
    measure_before,
    measure_distance,
    measure_gain,
    measure_travel,
    not_a_targets_file,
)
from fedproto.reproduce.statistics import ACCURACY_MARGIN, Outcome, compare, exact
from fedproto.reproduce.table_claims import BASELINES, OURS
from fedproto.reproduce.tables import PAPERS_START

#: Points. The paper gives one number, without its spread, for the network before training.
START_MARGIN = 3.0
DEFAULT_SETTING = "n = 3, stdev 2"
LAMBDA_PREFIX = "lambda = "
BEST_LAMBDA = "lambda = 1"
#: Rows of study-options, each of which changes one choice that the paper leaves open.
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


# --- fewer images, and unequal numbers of them


def judge_few_images(results: dict[str, Results]) -> Claim:
    """Judge how much accuracy is lost with 5 instead of 100 images per class."""
    table = results.get("fig-shots", Results())
    among_own = partial(measure_accuracy, score="head_own")
    rivals: list[tuple[str, str, Quantity]] = [
        ("FedAvg", "FedAvg", measure_accuracy),
        ("FedAvg", "FedAvg, among own classes", among_own),
        ("Local", "Local", measure_accuracy),
    ]
    questions = []
    for rival, name, quantity in rivals:
        questions += _compare_gains(
            table,
            rival,
            columns=("k = 5", "k = 100"),
            setting="from 100 to 5 images",
            name=name,
            quantity=quantity,
            smaller_is_better=True,
        )
    return judge(
        "fewer images",
        "With fewer training images it loses less accuracy",
        questions,
        picture="fig-shots.png",
        note="Accuracy lost from 100 to 5 images per class after 100 rounds, when FedAvg is still "
        "learning; less is better.",
    )


def judge_imbalance(results: dict[str, Results]) -> Claim:
    """Judge the change in accuracy when clients have unequal numbers of images."""
    table = results.get("study-imbalance", Results())
    questions = []
    for rival in BASELINES:
        questions += _compare_gains(
            table,
            rival,
            columns=("k = 100", "k = 50 to 150"),
            setting="50 to 150 images against 100",
        )
    return judge(
        "imbalance",
        "It copes better with clients of unequal size",
        questions,
        picture="study-imbalance.png",
        note="The change in accuracy when clients have 50 to 150 images per class instead of 100.",
    )


def _compare_gains(
    table: Results,
    rival: str,
    *,
    columns: tuple[str, str],
    setting: str,
    name: str | None = None,
    quantity: Quantity = measure_accuracy,
    smaller_is_better: bool = False,
) -> list[Question]:
    """Compare what FedProto and a rival gain from the first column to the second.

    Returns no question if one of both was not run. The rival is called `name` in the question, if
    given, and measured by `quantity`.
    """
    if not table.has(OURS, rival):
        return []
    before, after = columns
    ours = measure_gain(table, OURS, before, after)
    theirs = measure_gain(table, rival, before, after, quantity)
    comparison = compare(ours, theirs, margin=ACCURACY_MARGIN, smaller_is_better=smaller_is_better)
    return [Question("MNIST", setting, OURS, name or rival, comparison)]


# --- lambda


def judge_best_lambda(results: dict[str, Results]) -> Claim:
    """Judge lambda = 1 against every other lambda."""
    table = results.get("fig-lambda", Results())
    questions = []
    means = []
    for name in table.methods():
        means.append(f"{name.removeprefix(LAMBDA_PREFIX)}: {_mean_text(table, name)}")
        if name != BEST_LAMBDA and table.has(BEST_LAMBDA):
            comparison = compare_methods(table, BEST_LAMBDA, name)
            questions.append(
                Question("62 characters", DEFAULT_SETTING, BEST_LAMBDA, name, comparison)
            )
    claim = judge(
        "best lambda",
        "Lambda = 1 is the best of 0 to 4",
        questions,
        good=AS_GOOD,
        picture="fig-lambda.png",
        note=f"Accuracy in percent by lambda: {', '.join(means)}." if means else "",
    )
    if any(answer.outcome is Outcome.WORSE for answer in claim.answers):
        return replace(claim, verdict=FAILS)  # one better lambda is enough
    return claim


def _mean_text(table: Results, method: str) -> str:
    """Return the mean accuracy of a method, or that all of its runs diverged."""
    mean = table.mean(method, measure_accuracy)
    return "diverged" if mean is None else f"{mean:.2f}"


def judge_distance(results: dict[str, Results]) -> Claim:
    """Judge whether embeddings lie closer to their prototypes with every next larger lambda."""
    table = results.get("fig-lambda", Results())
    names = {float(name.removeprefix(LAMBDA_PREFIX)): name for name in table.methods()}
    positive = sorted(lam for lam in names if lam > 0)
    distances = []
    for lam in positive:
        mean = table.mean(names[lam], partial(measure_distance, lam=lam))
        if mean is not None:
            distances.append(f"{mean:.4f} at {lam:g}")
    questions = []
    for smaller, larger in itertools.pairwise(positive):
        ours = table.measure(names[larger], partial(measure_distance, lam=larger))
        theirs = table.measure(names[smaller], partial(measure_distance, lam=smaller))
        comparison = compare(ours, theirs, margin=None, smaller_is_better=True)
        questions.append(
            Question("62 characters", DEFAULT_SETTING, names[larger], names[smaller], comparison)
        )
    figures = f"Mean squared distance per dimension, by lambda: {', '.join(distances)}."
    return judge(
        "distance",
        "A larger lambda brings embeddings closer to their prototypes",
        questions,
        unit="mean squared distance per dimension",
        digits=4,
        labels=("closer", "farther"),
        picture="fig-lambda.png",
        figures=figures if distances else "",
        note="Each lambda is compared with the next smaller one.",
    )


# --- the network before training


def judge_start(results: dict[str, Results]) -> Claim:
    """Judge the accuracies before training: one equivalent way to load and score is enough."""
    table = results.get("study-before", Results())
    papers_accuracy = 100 * PAPERS_START
    questions = []
    for (method, column), cell in table.cells.items():
        for score in _scores_before(cell):
            ours = {}
            for run in cell["runs"]:
                ours[column, run["seed"]] = measure_before(cell, run, score)
            theirs = dict.fromkeys(ours, papers_accuracy)
            comparison = compare(exact(ours), exact(theirs), margin=START_MARGIN)
            first = f"{method}; {score.replace('_own', ' among own classes')}"
            questions.append(Question("CIFAR-10", column, first, "the paper", comparison))
    answers = decide(questions)
    return Claim(
        "before training",
        f"The pre-trained network has {papers_accuracy:.2f}% on CIFAR-10 before training",
        _start_verdict(answers),
        answers=answers,
        labels=("higher", "lower"),
        picture="study-before.png",
        figures=_describe_nearest(answers),
        note="Our accuracy minus the paper's, for three ways to load the weights and four ways to "
        f"score; equivalent means within {START_MARGIN:g} points, because the paper gives one "
        "number without its spread.",
    )


def _scores_before(cell: Cell) -> list[str]:
    """Return the accuracies that were measured before training in all runs of a cell."""
    if not all("before" in run for run in cell["runs"]):
        return []
    return list(cell.get("before", {}))


def _start_verdict(answers: list[Answer]) -> str:
    """Return the verdict: one way that is equivalent to the paper's number is enough."""
    outcomes = [answer.outcome for answer in answers]
    if not outcomes:
        return NOT_MEASURED
    if Outcome.EQUIVALENT in outcomes:
        return HOLDS
    if Outcome.UNDECIDED in outcomes:
        return UNDECIDED
    return FAILS


def _describe_nearest(answers: list[Answer]) -> str:
    """Return the answer whose effect is nearest to 0, as a sentence."""
    if not answers:
        return ""
    nearest = min(answers, key=lambda answer: abs(answer.comparison.effect))
    return f"Closest to it: {nearest.first}, {nearest.comparison.text()} points."


# --- clusters of embeddings


def judge_clusters(folder: Path) -> Claim:
    """Report the silhouettes of fig-tsne; they are of one seed, so nothing is decided."""
    figures = []
    for method, measures in _read_measures(folder / "fig-tsne-measures.json").items():
        by_class = measures.get("silhouette_class")
        by_client = measures.get("silhouette_client_within_class")
        if by_class is not None and by_client is not None:
            figures.append(f"{method} {by_class:.2f} / {by_client:.2f}")
    return Claim(
        "clusters",
        "Embeddings cluster by class, and within a class by client",
        f"{UNDECIDED}: one seed" if figures else NOT_MEASURED,
        unit="silhouette",
        figures=f"Silhouettes by class / by client: {', '.join(figures)}." if figures else "",
        picture="fig-tsne.png",
        note="On MNIST; a silhouette of 1 means tight clusters, 0 means none.",
    )


def _read_measures(path: Path) -> dict[str, dict[str, Any]]:
    """Return the measures of each method, or nothing if the figure was not made."""
    if not path.exists():
        return {}
    content = read_json(path)
    measures = content.get("measures") if isinstance(content, dict) else None
    if not isinstance(measures, dict):
        raise not_a_targets_file(path)
    if not all(isinstance(each, dict) for each in measures.values()):
        raise not_a_targets_file(path)
    return measures


# --- what the paper does not claim


def judge_travel(results: dict[str, Results]) -> Claim:
    """Judge the nearest prototype without the client's own share, with and without lambda."""
    table = results.get("study-travel", Results())
    starts = (
        ("one shared start", "FedProto", "lambda = 0"),
        ("own starts", "FedProto, own initial weights", "lambda = 0, own initial weights"),
    )
    questions = []
    figures = []
    for start, ours, unregularised in starts:
        if not table.has(ours, unregularised):
            continue
        comparison = compare_methods(table, ours, unregularised, measure_travel)
        questions.append(Question("MNIST", start, ours, unregularised, comparison))
        our_mean = table.mean(ours, measure_travel)
        their_mean = table.mean(unregularised, measure_travel)
        if our_mean is not None and their_mean is not None:
            figures.append(f"{our_mean:.1f}% against {their_mean:.1f}% from {start}")
    return judge(
        "travel",
        "Knowledge travels: FedProto's prototypes serve a client that did not contribute to them",
        questions,
        picture="study-travel.png",
        figures=f"Among a client's own classes, {' and '.join(figures)}." if figures else "",
        note="Accuracy of the nearest global prototype, with the client's own share removed from "
        "the prototypes; lambda = 1 against lambda = 0.",
    )


def judge_options(results: dict[str, Results]) -> Claim:
    """Judge each choice that the paper leaves open against the default."""
    table = results.get("study-options", Results())
    questions = []
    for option in OPTIONS:
        if table.has("default", option):
            comparison = compare_methods(table, option, "default")
            questions.append(Question("MNIST", DEFAULT_SETTING, option, "the default", comparison))
    return judge(
        "options",
        "What the paper leaves open does not change FedProto's accuracy",
        questions,
        good=(Outcome.EQUIVALENT,),
        picture="study-options.png",
        note="Each choice is changed alone. A run that diverged counts like the worst run that "
        "finished.",
    )
