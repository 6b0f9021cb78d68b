"""The judged claims as a page and as a CSV with every comparison.

The page begins with a summary of one screen.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from fedproto.reproduce.claims import NOT_MEASURED, Answer, Claim
from fedproto.reproduce.markdown import format_table
from fedproto.reproduce.statistics import ACCURACY_MARGIN, DEVIATION_MARGIN, ROUNDS_MARGIN, Outcome
from fedproto.reproduce.verdicts import judge_all

PAGE = "VERDICTS.md"
TABLE = "verdicts.csv"

_INTRODUCTION = """# What the numbers say about the paper's claims

Made by `fedproto reproduce verdicts` from the JSON files beside this page."""

_HOW = f"""## How to read this

- **Effect.** A difference is the first method minus the second in the same federations (same
  partition, same seed): the mean over seeds ± the half-width of its 95% interval.
- **Outcomes.** *better* and *worse*: Student's paired test over seeds (the mean of a seed's
  settings is one number). *equivalent*: the difference lies within a margin, by two one-sided
  tests; even a real difference counts as equivalent if it is certainly smaller than the margin.
  *undecided*: neither was shown. These seeds cannot tell, which does not mean that there is no
  difference.
- **Margins.** {ACCURACY_MARGIN} points of accuracy (in the median of the paper's settings FedProto
  leads the best other method by 0.8 points; about a third of that does not matter),
  {DEVIATION_MARGIN} points of deviation between clients (over 20 clients it is not known more
  precisely), {ROUNDS_MARGIN:.0f} rounds (a tenth of FedProto's). They were set after these results
  existed.
- **Many comparisons.** Each claim is one family. Holm's method keeps the chance of any wrong
  *better* or *worse* in it at 5%, and likewise that of any wrong *equivalent*. The intervals are
  not corrected.
- **One seed, or the same difference in every seed,** is undecided.
- **Goals that were never reached.** A method that never reached the goal needs more rounds than
  it was given. Its difference is then a bound (≤), which can show that FedProto is faster, but
  not that it is slower or equivalent.
- **Diverged runs.** A run that diverged counts like the worst run that finished, so the effect
  is then a bound, too.
- **Data.** "62 characters" is Chars74K's computer fonts, which stand in for FEMNIST. ResNet18
  starts from Tiny-ImageNet weights, which stand in for ImageNet's. MNIST and 62 characters have
  5 seeds, CIFAR-10 has 3. Seeds were fixed in advance, the last round counts, nothing was
  selected on test data, and quick versions do not count."""

#: How a sentence about an outcome goes on, before the name of the second method.
_WORDS = {
    Outcome.BETTER: "better than",
    Outcome.WORSE: "worse than",
    Outcome.EQUIVALENT: "equivalent to",
    Outcome.UNDECIDED: "undecided against",
}


def render_verdicts(folder: Path) -> dict[str, str]:
    """Return the contents of the page and of the CSV, by file name.

    They are made from the JSON files in the folder.
    """
    papers, further = judge_all(folder)
    return {PAGE: render_page(papers, further), TABLE: render_csv([*papers, *further])}


# --- the page


def render_page(papers: Sequence[Claim], further: Sequence[Claim]) -> str:
    """Return a summary of one screen, a paragraph per claim, how to read it, and the tables."""
    claims = [*papers, *further]
    parts = [_INTRODUCTION, _summary(papers, further), "## Claim by claim"]
    for number, claim in enumerate(claims, 1):
        parts.append(_paragraph(number, claim))
    parts.append(_HOW)
    parts.append("## Every comparison")
    parts.append(
        f"[{TABLE}]({TABLE}) has them by setting and with p-values, too. Decided outcomes are bold."
    )
    parts += [_answers_table(claim) for claim in claims if claim.answers]
    return "\n\n".join(parts) + "\n"


def _data_sets(claim: Claim) -> list[str]:
    """Return the data sets of a claim, in the order of its answers."""
    return list(dict.fromkeys(answer.data for answer in claim.answers))


def _answers_on(claim: Claim, data: str) -> list[Answer]:
    return [answer for answer in claim.answers if answer.data == data]


# --- its summary


def _summary(papers: Sequence[Claim], further: Sequence[Claim]) -> str:
    """Return the table of all claims with their verdicts."""
    lines = [
        "## Summary",
        "",
        "| | the paper's claim | verdict | comparisons and effects |",
        "|---|---|---|---|",
    ]
    for number, claim in enumerate(papers, 1):
        lines.append(_summary_line(number, claim))
    lines.append("| | **not in the paper** | | |")
    for number, claim in enumerate(further, len(papers) + 1):
        lines.append(_summary_line(number, claim))
    return "\n".join(lines)


def _summary_line(number: int, claim: Claim) -> str:
    """Return a claim with its verdict, and its figures or the effects on each data set."""
    figures = claim.figures
    if not figures:
        figures = "; ".join(_summarise_data_set(claim, data) for data in _data_sets(claim))
    return f"| {number} | {claim.title} | **{claim.verdict}** | {figures or '–'} |"


def _summarise_data_set(claim: Claim, data: str) -> str:
    """Return how many comparisons on a data set had which outcome, and the range of effects."""
    answers = _answers_on(claim, data)
    return f"{data}: {count_outcomes(claim, answers)} {_range(answers, claim)}"


def count_outcomes(claim: Claim, answers: Sequence[Answer]) -> str:
    """Return how many comparisons had which outcome, such as "9 better, 2 equivalent"."""
    outcomes = [answer.outcome for answer in answers]
    present = [outcome for outcome in Outcome if outcome in outcomes]
    counts = [f"{outcomes.count(outcome)} {claim.label(outcome)}" for outcome in present]
    return ", ".join(counts)


def _range(answers: Sequence[Answer], claim: Claim) -> str:
    """Return the effect with its interval, or the smallest and the largest of several effects.

    Comparisons without a federation that both methods finished have no effect.
    """
    comparisons = [answer.comparison for answer in answers if answer.comparison.federations]
    if not comparisons:
        return "(no effect measured)"
    if len(comparisons) == 1:
        effect = comparisons[0].text(claim.digits)
        return f"({effect} {claim.unit})"
    effects = [comparison.effect for comparison in comparisons]
    number_format = f"+.{claim.digits}f"
    smallest = format(min(effects), number_format)
    largest = format(max(effects), number_format)
    text = f"{smallest} to {largest} {claim.unit}"
    if any(comparison.bounded != 0 for comparison in comparisons):
        text += ", some of them bounds"
    return f"({text})"


# --- its paragraphs


def _paragraph(number: int, claim: Claim) -> str:
    """Return a claim with its verdict, the outcomes, how it was measured, and its figure."""
    parts = [f"**{number}. {claim.title}: {claim.verdict}.**"]
    if claim.figures:
        parts.append(claim.figures)
    else:
        parts += [_describe_data_set(claim, data) for data in _data_sets(claim)]
    if claim.note:
        parts.append(claim.note)
    if claim.picture and claim.verdict != NOT_MEASURED:
        parts.append(f"([figure]({claim.picture}))")
    return " ".join(parts)


def _describe_data_set(claim: Claim, data: str) -> str:
    """Return which methods had which outcome on a data set, with the effects, as a sentence."""
    has_one_first = len({answer.first for answer in claim.answers}) == 1
    parts = []
    for outcome, words in _WORDS.items():
        answers = [answer for answer in _answers_on(claim, data) if answer.outcome is outcome]
        if not answers:
            continue
        effects = _range(answers, claim)
        if has_one_first:
            names = ", ".join(answer.second for answer in answers)
            parts.append(f"{words} {names} {effects}")
        else:
            names = "; ".join(answer.first for answer in answers)
            parts.append(f"{claim.label(outcome)} {effects}: {names}")
    return f"On {data}: {'; '.join(parts)}.{_describe_unseen(claim, data)}"


def _describe_unseen(claim: Claim, data: str) -> str:
    """Return which methods never reached the goal, and which diverged, as sentences."""
    never = []
    diverged = []
    for answer in _answers_on(claim, data):
        comparison = answer.comparison
        federations = comparison.federations
        if not federations:  # a method never finished, so nothing could be compared
            federations = comparison.diverged_first + comparison.diverged_second
        if comparison.censored_second:
            never.append(f"{answer.second} in {comparison.censored_second} of {federations}")
        if comparison.diverged_first:
            diverged.append(f"{answer.first} in {comparison.diverged_first} of {federations}")
        if comparison.diverged_second:
            diverged.append(f"{answer.second} in {comparison.diverged_second} of {federations}")
    text = ""
    if never:
        text += f" Never reached the goal: {', '.join(never)} federations."
    if diverged:
        text += f" Diverged: {', '.join(diverged)} federations."
    return text


# --- its tables


def _answers_table(claim: Claim) -> str:
    """Return the table of a claim's answers.

    It has methods by data sets where one method is compared on several data sets, otherwise a row
    per comparison.
    """
    has_one_first = len({answer.first for answer in claim.answers}) == 1
    if has_one_first and len(_data_sets(claim)) > 1:
        table = _grid(claim)
    else:
        table = _list_answers(claim)
    return f"**{claim.title}** ({claim.unit})\n\n{table}"


def _list_answers(claim: Claim) -> str:
    """Return a table with a row per comparison."""
    rows = []
    for answer in claim.answers:
        effect = answer.comparison.text(claim.digits)
        outcome = _emphasise(claim, answer.outcome)
        rows.append([answer.first, answer.second, effect, outcome])
    return format_table(["first", "second", claim.unit, "outcome"], rows)


def _grid(claim: Claim) -> str:
    """Return a table of the second methods by data sets; the first method is the same in all."""
    data_sets = _data_sets(claim)
    by_place = {(answer.second, answer.data): answer for answer in claim.answers}
    rows = []
    for second in dict.fromkeys(answer.second for answer in claim.answers):
        row = [second]
        for data in data_sets:
            answer = by_place.get((second, data))
            row.append(_grid_entry(answer, claim))
        rows.append(row)
    first = claim.answers[0].first
    return format_table([f"{first} against", *data_sets], rows)


def _grid_entry(answer: Answer | None, claim: Claim) -> str:
    if answer is None:
        return "–"
    effect = answer.comparison.text(claim.digits)
    outcome = _emphasise(claim, answer.outcome)
    return f"{effect} {outcome}"


def _emphasise(claim: Claim, outcome: Outcome) -> str:
    """Return the word for an outcome, in bold if something was decided."""
    if outcome is Outcome.UNDECIDED:
        return outcome.value
    return f"**{claim.label(outcome)}**"


# --- the CSV


COLUMNS = (
    "claim",
    "family",
    "data",
    "setting",
    "first",
    "second",
    "unit",
    "effect",
    "low",
    "high",
    "bound",
    "outcome",
    "reason",
    "seeds",
    "federations",
    "first_higher",
    "never_first",
    "never_second",
    "diverged_first",
    "diverged_second",
    "margin",
    "p_difference",
    "p_difference_holm",
    "p_equivalence",
    "p_equivalence_holm",
)


_BOUNDS = {-1: "effect or lower", 1: "effect or higher", 0: "", None: "unknown on both sides"}


def render_csv(claims: Sequence[Claim]) -> str:
    """Return every comparison as CSV: `family` says which ones were corrected together."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for claim in claims:
        for answer in claim.answers:
            writer.writerow(_make_record(claim, claim.key, answer))
        for answer in claim.details:
            writer.writerow(_make_record(claim, f"{claim.key}, by setting", answer))
    return file.getvalue()


def _make_record(claim: Claim, family: str, answer: Answer) -> dict[str, str | int]:
    """Return a comparison as a row of the CSV."""
    comparison = answer.comparison
    low, high = comparison.interval()
    return {
        "claim": claim.title,
        "family": family,
        "data": answer.data,
        "setting": answer.setting,
        "first": answer.first,
        "second": answer.second,
        "unit": claim.unit,
        "effect": _format_number(comparison.effect),
        "low": _format_number(low),
        "high": _format_number(high),
        "bound": _BOUNDS[comparison.bounded],
        "outcome": claim.label(answer.outcome),
        "reason": comparison.reason,
        "seeds": comparison.seeds,
        "federations": comparison.federations,
        "first_higher": comparison.higher,
        "never_first": comparison.censored_first,
        "never_second": comparison.censored_second,
        "diverged_first": comparison.diverged_first,
        "diverged_second": comparison.diverged_second,
        "margin": "" if comparison.margin is None else f"{comparison.margin:g}",
        "p_difference": _format_number(comparison.p_difference),
        "p_difference_holm": _format_number(answer.decision.p_difference),
        "p_equivalence": _format_number(comparison.p_equivalence),
        "p_equivalence_holm": _format_number(answer.decision.p_equivalence),
    }


def _format_number(value: float) -> str:
    """Return a number with four digits, more than any interval here supports; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"
