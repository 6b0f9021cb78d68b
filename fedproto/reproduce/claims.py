"""What a claim is, and how its verdict follows from a family of comparisons (statistics.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fedproto.reproduce.evidence import Quantity, Results, measure_accuracy
from fedproto.reproduce.statistics import (
    ACCURACY_MARGIN,
    Comparison,
    Decision,
    Outcome,
    compare,
    decide_family,
)

HOLDS = "holds"
IN_PART = "holds in part"
FAILS = "does not hold"
UNDECIDED = "undecided"
NOT_MEASURED = "not measured yet"

AS_GOOD = (Outcome.BETTER, Outcome.EQUIVALENT)


@dataclass(frozen=True)
class Question:
    """Two methods that are compared, before the family is corrected."""

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
        """What the comparison says about the first method, after correction."""
        return self.decision.outcome

    @property
    def comparison(self) -> Comparison:
        """The comparison itself."""
        return self.decision.comparison


@dataclass(frozen=True)
class Claim:
    """A sentence, its verdict, and the comparisons behind it.

    key      its name in the CSV
    unit     of the effects
    note     what was measured, and how
    picture  the file name of the figure that shows it
    answers  one family: corrected together, and what the verdict follows from
    details  the same by setting, a family of its own
    digits   of the effects
    figures  what a person would quote, where it is not the list of comparisons
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
        """Return the word for an outcome in this claim."""
        better, worse = self.labels
        if outcome is Outcome.BETTER:
            return better
        if outcome is Outcome.WORSE:
            return worse
        return outcome.value


def compare_methods(
    table: Results, first: str, second: str, quantity: Quantity = measure_accuracy
) -> Comparison:
    """Return the comparison of two methods of a table, within the margin of accuracies."""
    ours = table.measure(first, quantity)
    theirs = table.measure(second, quantity)
    return compare(ours, theirs, margin=ACCURACY_MARGIN)


def decide(questions: Sequence[Question]) -> list[Answer]:
    """Return the answers to the questions of one family."""
    decisions = decide_family([question.comparison for question in questions])
    answers = []
    for question, decision in zip(questions, decisions, strict=True):
        answer = Answer(question.data, question.setting, question.first, question.second, decision)
        answers.append(answer)
    return answers


def choose_verdict(outcomes: Sequence[Outcome], good: Collection[Outcome]) -> str:
    """Return the verdict on a claim that all outcomes are good.

    What is undecided is never evidence.
    """
    if not outcomes:
        return NOT_MEASURED
    good_count = sum(outcome in good for outcome in outcomes)
    if good_count == len(outcomes):
        return HOLDS
    if good_count > 0:
        return IN_PART
    if all(outcome is Outcome.UNDECIDED for outcome in outcomes):
        return UNDECIDED
    return FAILS


def judge(
    key: str,
    title: str,
    questions: Sequence[Question],
    good: Collection[Outcome] = (Outcome.BETTER,),
    details: Sequence[Question] = (),
    **texts: Any,
) -> Claim:
    """Return the claim that all questions of a family have good answers, with its verdict.

    `texts` are further fields of the claim.
    """
    answers = decide(questions)
    verdict = choose_verdict([answer.outcome for answer in answers], good)
    return Claim(key, title, verdict, answers=answers, details=decide(details), **texts)
