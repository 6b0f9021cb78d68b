"""The paper's convergence statements, judged by what benchmarks/theory.py measured on MNIST.

Nothing is compared with another method, so there are no tests: a statement that holds everywhere
with estimated constants holds as far as this can show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedproto.core.files import read_json
from fedproto.reproduce.claims import FAILS, HOLDS, IN_PART, NOT_MEASURED, Claim
from fedproto.reproduce.evidence import not_a_targets_file
from fedproto.theory.along_run import RUN
from fedproto.theory.words import percent, short

#: The file in the folder of results.
MEASURED = "theory.json"
PICTURE = "theory.png"
NOTE = (
    "Constants are the largest values observed, expectations means over replays. Gaps in the proof "
    "are in docs/theory.md, each with a counter-example."
)

#: What was measured, by the setting's title; empty if nothing was.
Summaries = dict[str, dict[str, Any]]


def judge_theory(folder: Path) -> list[Claim]:
    """Return the paper's statements, judged by the file in a folder of results."""
    measured = _read_measured(folder / MEASURED)
    try:
        summaries = {_place(each["title"]): each["summary"] for each in measured.values()}
        return [
            _judge_statement(
                "lemma 1", "lemma_1", "Lemma 1 bounds what local training does", summaries
            ),
            _judge_statement(
                "lemma 2", "lemma_2", "Lemma 2 bounds what aggregation does to a client", summaries
            ),
            _judge_theorem_1(summaries),
            _judge_corollary_1(summaries),
            _judge_theorem_2(summaries),
        ]
    except (KeyError, TypeError) as error:
        raise not_a_targets_file(folder / MEASURED) from error


def judge_aggregation(folder: Path) -> Claim:
    """Return our own statement: aggregation never increases the clients' objectives together."""
    measured = _read_measured(folder / MEASURED)
    title = (
        "With the squared distance, aggregation never increases all clients' objectives together"
    )
    if RUN not in measured:
        return Claim("aggregation", title, NOT_MEASURED)
    try:
        found = measured[RUN]["summary"]["federation"]
        largest = found["largest_aggregation_change"]
        figures = (
            f"The largest change over {found['rounds']} rounds and their replays is {largest:.2g}; "
            f"Theorem 1 without its drift holds in {percent(found['holds_without_drift'])} of them."
        )
    except (KeyError, TypeError) as error:
        raise not_a_targets_file(folder / MEASURED) from error
    return Claim(
        "aggregation",
        title,
        HOLDS if largest <= 0 else FAILS,
        unit="loss",
        figures=figures,
        picture=PICTURE,
        note="It is proved in docs/theory.md, and needs no condition on λ.",
    )


def _read_measured(path: Path) -> dict[str, Any]:
    """Return what was measured in each setting, by its name; nothing if there is no file."""
    if not path.exists():
        return {}
    content = read_json(path)
    measured = content.get("measured") if isinstance(content, dict) else None
    if not isinstance(measured, dict):
        raise not_a_targets_file(path)
    return measured


def _place(title: str) -> str:
    """Return a setting as a part of a sentence."""
    return f"with {title}"


def _judge_statement(key: str, name: str, title: str, summaries: Summaries) -> Claim:
    """Judge an inequality by how often it holds."""
    figures = []
    shares = []
    violated = []
    for setting, summary in summaries.items():
        found = summary["statements"][name]
        shares.append(found["holds"])
        violated.append(found["clearly_violated"])
        figures.append(
            f"{percent(found['holds'])} of {found['checks']} client-rounds {setting} "
            f"(median change {short(found['median_change'])}, bound {short(found['median_bound'])})"
        )
    verdict = NOT_MEASURED
    if shares:
        verdict = IN_PART if min(shares) > 0 else FAILS
        if max(violated) == 0:
            verdict = f"{HOLDS}, within the spread of the replays"
        if min(shares) == 1:
            verdict = HOLDS
    return _claim(key, title, verdict, f"Holds in {' and in '.join(figures)}." if figures else "")


def _judge_theorem_1(summaries: Summaries) -> Claim:
    """Judge Theorem 1 as an inequality, and by what it proves."""
    title = "Theorem 1 bounds what a round does to a client"
    claim = _judge_statement("theorem 1", "theorem_1", title, summaries)
    if not summaries:
        return claim
    proved = []
    for setting, summary in summaries.items():
        found = summary["statements"]["theorem_1"]
        proved.append(found["proves_decrease"])
        claim_figures = (
            f"{setting} the loss decreases in {percent(found['decreases'])}, and the bound "
            f"proves it in {percent(found['proves_decrease'])}"
        )
        claim = _extend(claim, claim_figures)
    if max(proved) == 0:
        claim = _claim(
            claim.key, claim.title, f"{claim.verdict}, and proves no decrease", claim.figures
        )
    return claim


def _extend(claim: Claim, sentence: str) -> Claim:
    figures = f"{claim.figures} {sentence[0].upper()}{sentence[1:]}."
    return _claim(claim.key, claim.title, claim.verdict, figures)


def _judge_corollary_1(summaries: Summaries) -> Claim:
    """Judge whether η and λ of the paper satisfy the paper's own conditions."""
    title = "The paper's η = 0.01 and λ = 1 satisfy Corollary 1"
    figures = []
    shares = []
    for setting, summary in summaries.items():
        found = summary["corollary_1"]
        shares += [found["lambda_holds"], found["eta_holds"]]
        figures.append(
            f"{setting} λ would have to be below {short(found['median_lambda_first'])} "
            f"(median; at most {short(found['largest_lambda_first'])}), and η below "
            f"{short(found['median_eta_without_lambda'])} even with λ = 0"
        )
    verdict = NOT_MEASURED
    if shares:
        verdict = HOLDS if min(shares) == 1 else IN_PART
        if max(shares) == 0:
            verdict = f"{FAILS} in any client-round"
    text = "; ".join(figures)
    return _claim("corollary 1", title, verdict, f"{text[:1].upper()}{text[1:]}." if text else "")


def _judge_theorem_2(summaries: Summaries) -> Claim:
    """Judge whether Theorem 2 predicts rounds for the gradients that were measured."""
    title = "Theorem 2 says how many rounds the measured gradients take"
    figures = []
    vacuous = []
    for setting, summary in summaries.items():
        found = summary["theorem_2"]
        vacuous.append(found["predicted"]["vacuous"])
        figures.append(
            f"{setting} it predicts none for {percent(found['predicted']['vacuous'])} of "
            f"the clients, and its floor is below G² for {percent(found['floor_below_G2'])}"
        )
    verdict = NOT_MEASURED
    if vacuous:
        verdict = IN_PART if min(vacuous) < 1 else f"{FAILS}: vacuous"
        if max(vacuous) == 0:
            verdict = HOLDS
    text = "; ".join(figures)
    return _claim("theorem 2", title, verdict, f"{text[:1].upper()}{text[1:]}." if text else "")


def _claim(key: str, title: str, verdict: str, figures: str) -> Claim:
    return Claim(key, title, verdict, unit="loss", figures=figures, picture=PICTURE, note=NOTE)
