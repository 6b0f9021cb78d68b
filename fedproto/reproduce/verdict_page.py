"""The judged claims as a page that begins with one screen to quote, and as a CSV with every comparison."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedproto.reproduce.statistics import ACCURACY_MARGIN, DEVIATION_MARGIN, ROUNDS_MARGIN, Outcome
from fedproto.reproduce.verdicts import NOT_MEASURED, Answer, Claim, judge_all

PAGE = "VERDICTS.md"
TABLE = "verdicts.csv"

_INTRODUCTION = """# What the numbers say about the paper's claims

Made by `fedproto reproduce verdicts` from the JSON files beside this page."""

_HOW = f"""## How to read this

- **Effect first.** A difference is the first method minus the second, in the same federations
  (same partition, same seed), as the mean over seeds ± the half-width of its 95% interval.
- **Outcomes.** *better* and *worse*: Student's paired test over seeds (each seed's mean over
  its settings is one number). *equivalent*: the difference lies within a margin, by two
  one-sided tests; even a difference that is real counts as equivalent if it is surely smaller
  than the margin. *undecided*: neither was shown; it means that these seeds cannot tell, not
  that there is no difference.
- **Margins.** {ACCURACY_MARGIN} points of accuracy (FedProto leads the best other method by 0.8
  points in the median of the paper's settings; about a third of that does not matter),
  {DEVIATION_MARGIN} points of deviation between clients (it is not known more exactly over 20
  clients), {ROUNDS_MARGIN:.0f} rounds (a tenth of FedProto's). They were set after these
  results existed.
- **Many comparisons.** Each claim is one family; Holm's method keeps the chance of any wrong
  *better* or *worse* in it at 5%, and likewise of any wrong *equivalent*. The intervals are not
  corrected.
- **One seed, or the same difference in every seed,** is undecided.
- **Never got there.** A method that never reached the goal needs more rounds than it was given.
  Its difference is then a bound (≤), which can show that FedProto is faster but not that it is
  slower or equivalent.
- **Diverged.** A run that diverged counts as badly as the worst run that finished, so the
  effect is a bound, too.
- **Data.** "62 characters" is Chars74K's computer fonts, which stand in for FEMNIST; ResNet18
  starts from Tiny-ImageNet weights, which stand in for ImageNet's. MNIST and 62 characters have
  5 seeds, CIFAR-10 has 3. Seeds were fixed before looking, the last round counts, nothing was
  selected on test data, and quick versions do not count."""


def write_verdicts(folder: Path) -> dict[str, str]:
    """The contents of the page and of the CSV, by file name."""
    papers, further = judge_all(folder)
    return {PAGE: page(papers, further), TABLE: table([*papers, *further])}


# --- the page


def page(papers: Sequence[Claim], further: Sequence[Claim]) -> str:
    """A summary of one screen, a paragraph per claim, how to read it, and the tables."""
    claims = [*papers, *further]
    parts = [
        _INTRODUCTION,
        _summary(papers, further),
        "## Claim by claim",
        *(_paragraph(number, claim) for number, claim in enumerate(claims, 1)),
        _HOW,
        "## Every comparison",
        f"Setting by setting, and with p-values, in [{TABLE}]({TABLE}). Bold: decided.",
        *(_answers_table(claim) for claim in claims if claim.answers),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(papers: Sequence[Claim], further: Sequence[Claim]) -> str:
    lines = [
        "## In short",
        "",
        "| | the paper's claim | verdict | comparisons, and effects |",
        "|---|---|---|---|",
    ]
    lines += [_summary_line(number, claim) for number, claim in enumerate(papers, 1)]
    lines.append("| | **not in the paper** | | |")
    lines += [_summary_line(number, claim) for number, claim in enumerate(further, len(papers) + 1)]
    return "\n".join(lines)


def _summary_line(number: int, claim: Claim) -> str:
    figures = claim.figures or "; ".join(_short(claim, data) for data in _data_sets(claim)) or "–"
    return f"| {number} | {claim.title} | **{claim.verdict}** | {figures} |"


def _short(claim: Claim, data: str) -> str:
    """How many comparisons on a data set had which outcome, and the effects from smallest to largest."""
    answers = [answer for answer in claim.answers if answer.data == data]
    return f"{data}: {count_outcomes(claim, answers)} {_range(answers, claim)}"


def _data_sets(claim: Claim) -> list[str]:
    return list(dict.fromkeys(answer.data for answer in claim.answers))


def count_outcomes(claim: Claim, answers: Sequence[Answer]) -> str:
    """How many of the comparisons had which outcome, such as "9 better, 2 equivalent"."""
    outcomes = [answer.outcome for answer in answers]
    counts = [
        f"{outcomes.count(outcome)} {claim.label(outcome)}"
        for outcome in Outcome
        if outcome in outcomes
    ]
    return ", ".join(counts)


def _paragraph(number: int, claim: Claim) -> str:
    found = [claim.figures] if claim.figures else list(_sentences(claim))
    picture = (
        [f"([figure]({claim.picture}))"] if claim.picture and claim.verdict != NOT_MEASURED else []
    )
    said = " ".join([*found, claim.note, *picture])
    return f"**{number}. {claim.title}: {claim.verdict}.** {said}".strip()


_WORDS = {
    Outcome.BETTER: "better than",
    Outcome.WORSE: "worse than",
    Outcome.EQUIVALENT: "equivalent to",
    Outcome.UNDECIDED: "undecided against",
}


def _sentences(claim: Claim) -> Iterator[str]:
    """A sentence per data set: against whom there was which outcome, with the effects."""
    firsts = {answer.first for answer in claim.answers}
    for data in _data_sets(claim):
        parts = []
        for outcome, words in _WORDS.items():
            mine = [
                answer
                for answer in claim.answers
                if (answer.data, answer.outcome) == (data, outcome)
            ]
            if mine and len(firsts) > 1:
                names = "; ".join(answer.first for answer in mine)
                parts.append(f"{claim.label(outcome)} {_range(mine, claim)}: {names}")
            elif mine:
                parts.append(
                    f"{words} {', '.join(answer.second for answer in mine)} {_range(mine, claim)}"
                )
        yield f"On {data} {'; '.join(parts)}.{_unseen(claim, data)}"


def _range(answers: Sequence[Answer], claim: Claim) -> str:
    """The effect with its interval, or the smallest and the largest of several effects."""
    if len(answers) == 1:
        return f"({answers[0].comparison.text(claim.digits)} {claim.unit})"
    effects = sorted(answer.comparison.effect for answer in answers)
    bounds = {answer.comparison.bounded for answer in answers} - {0}
    bound = ", some of them bounds" if bounds else ""
    return (
        f"({effects[0]:+.{claim.digits}f} to {effects[-1]:+.{claim.digits}f} {claim.unit}{bound})"
    )


def _unseen(claim: Claim, data: str) -> str:
    """Who never got there, and whose runs diverged."""
    never = []
    diverged = []
    for answer in claim.answers:
        comparison = answer.comparison
        if answer.data != data:
            continue
        if comparison.censored_second:
            never.append(
                f"{answer.second} in {comparison.censored_second} of {comparison.federations}"
            )
        if comparison.diverged_first:
            diverged.append(
                f"{answer.first} in {comparison.diverged_first} of {comparison.federations}"
            )
        if comparison.diverged_second:
            diverged.append(
                f"{answer.second} in {comparison.diverged_second} of {comparison.federations}"
            )
    text = f" Never got there: {', '.join(never)} federations." if never else ""
    return text + (f" Diverged: {', '.join(diverged)} federations." if diverged else "")


def _answers_table(claim: Claim) -> str:
    """Methods against data sets where all are against FedProto, else a line per comparison."""
    firsts = {answer.first for answer in claim.answers}
    head = f"**{claim.title}** ({claim.unit})"
    if len(firsts) == 1 and len({answer.data for answer in claim.answers}) > 1:
        return f"{head}\n\n{_grid(claim)}"
    lines = [f"| first | second | {claim.unit} | outcome |", "|---|---|---|---|"]
    for answer in claim.answers:
        effect = answer.comparison.text(claim.digits)
        lines.append(
            f"| {answer.first} | {answer.second} | {effect} | {_emphasise(claim, answer.outcome)} |"
        )
    return f"{head}\n\n" + "\n".join(lines)


def _grid(claim: Claim) -> str:
    data_sets = list(dict.fromkeys(answer.data for answer in claim.answers))
    by_place = {(answer.second, answer.data): answer for answer in claim.answers}
    first = claim.answers[0].first
    lines = [f"| {first} against | {' | '.join(data_sets)} |", "|---" * (len(data_sets) + 1) + "|"]
    for second in dict.fromkeys(answer.second for answer in claim.answers):
        entries = [_entry(by_place.get((second, data)), claim) for data in data_sets]
        lines.append(f"| {second} | {' | '.join(entries)} |")
    return "\n".join(lines)


def _entry(answer: Answer | None, claim: Claim) -> str:
    if answer is None:
        return "–"
    return f"{answer.comparison.text(claim.digits)} {_emphasise(claim, answer.outcome)}"


def _emphasise(claim: Claim, outcome: Outcome) -> str:
    return outcome.value if outcome is Outcome.UNDECIDED else f"**{claim.label(outcome)}**"


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


def table(claims: Sequence[Claim]) -> str:
    """Every comparison as CSV: `family` says which ones were corrected together."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for claim in claims:
        for answer in claim.answers:
            writer.writerow(_record(claim, claim.key, answer))
        for answer in claim.details:
            writer.writerow(_record(claim, f"{claim.key}, by setting", answer))
    return file.getvalue()


def _record(claim: Claim, family: str, answer: Answer) -> dict[str, str | int]:
    comparison = answer.comparison
    low, high = comparison.interval()
    bounds = {-1: "effect or lower", 1: "effect or higher", 0: "", None: "unknown on both sides"}
    return {
        "claim": claim.title,
        "family": family,
        "data": answer.data,
        "setting": answer.setting,
        "first": answer.first,
        "second": answer.second,
        "unit": claim.unit,
        "effect": _number(comparison.effect),
        "low": _number(low),
        "high": _number(high),
        "bound": bounds[comparison.bounded],
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
        "p_difference": _number(comparison.p_difference),
        "p_difference_holm": _number(answer.decision.p_difference),
        "p_equivalence": _number(comparison.p_equivalence),
        "p_equivalence_holm": _number(answer.decision.p_equivalence),
    }


def _number(value: float) -> str:
    """Four digits are more than any interval here supports; empty where there is no number."""
    return "" if value != value else f"{value:.4g}"
